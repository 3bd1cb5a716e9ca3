"""A lane that finds missing waits between queues on a CPU.

A `Checker` gives every lane a vector clock (Fidge 1988, Mattern 1989). The clocks advance where work is *issued*, by
one thread in one order, so they say which accesses the program has ordered and not which ones happened to come first.
While work runs, a dispatch mode sees every operator; each tensor argument is an access to a range of bytes of a
storage. Two accesses to overlapping bytes, at least one of them a write, by two lanes, must be ordered by clocks, or
the operator fails with a `LaneError` before it runs. As with happens-before race detectors for threads (FastTrack,
Flanagan and Freund 2009) one run proves it for every interleaving of that run's program.

A GPU knows one more race. When the last reference to a tensor goes, CUDA's caching allocator gives its memory back to
the stream it was allocated on, at once, in the order of issue. If another stream still works on it and the allocating
stream has not waited for that, the next tensor is written over it. So the checker also looks at what the allocating
lane had waited for whenever a storage is freed. `uses=` of `Lane.submit`, or `Lane.keep`, makes that safe.

Not seen: memory that is touched outside operators (NumPy, raw pointers), threads that are neither the host's nor a
lane's, and an asynchronous collective that outlives the work that started it.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpar import lanes
from hybridpar.errors import LaneError
from hybridpar.lanes.base import Family, Lane, Stop, Work
from hybridpar.lanes.cpu import CpuCaller, CpuEvent, CpuLane, Worker, _Task
from tests.lanes.op_effects import Effect, extent, operands, storage_of, tensors_in

#: For every lane the number of its last work that is known to come before. A lane that is not named counts as 0.
Clock = Mapping[str, int]

_CALLER = "caller"


@dataclass(frozen=True, slots=True)
class Ticket:
    """What is fixed about a piece of work when it is issued.

    Attributes:
        lane: Where it runs.
        tick: Its number on that lane; one higher after every event that the work marks.
        end: Its number when it ends.
        clocks: The clock of every lane at that moment.
        delay: Seconds to sleep before it runs.
    """

    lane: str
    tick: int
    end: int
    clocks: Mapping[str, Clock]
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class _Access:
    lane: str
    tick: int
    op: str
    writes: bool
    low: int
    high: int
    shape: tuple[int, ...]

    def is_before(self, clock: Clock) -> bool:
        return self.tick <= clock.get(self.lane, 0)


@dataclass(slots=True)
class _Storage:
    """What is known of one piece of memory. Holds no reference to it.

    Attributes:
        alive: Calls back when the storage is freed; kept here because a weak reference must outlive its referent.
        owner: The lane that allocated it, as far as that was seen, else the first that touched it.
        accesses: Those a later access could race with.
        last: The last access of every lane.
        kept: For every lane the last work through which it keeps the storage alive.
    """

    alive: weakref.ref[torch.UntypedStorage]
    owner: str | None = None
    accesses: list[_Access] = field(default_factory=list)
    last: dict[str, _Access] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)


class Checker:
    """Proves at run time that every tensor access on lanes is ordered by waits.

    Give it to one `Lanes`. Lanes are watched always, the host thread inside of `with checker:`; leaving that block
    waits for the lanes and raises if anything was found.

    Args:
        seed: Of the random delays.
        max_delay: Longest random sleep before a piece of work, in seconds, so that interleavings vary.

    Attributes:
        violations: Every violation so far, as text.
    """

    def __init__(self, seed: int = 0, max_delay: float = 0.002) -> None:
        self.violations: list[str] = []
        self._max_delay = max_delay
        self._random = random.Random(seed)
        # Reentrant, because storing an access may free an object whose storage then reports its own end.
        self._lock = threading.RLock()
        self._clocks: dict[str, Clock] = {_CALLER: {_CALLER: 1}}
        self._host: Clock = {}  # what the host thread has waited for; work of every lane issued later comes after it
        self._storages: dict[int, _Storage] = {}
        self._thread = threading.local()
        self._settle: Callable[[], None] | None = None
        self._mode: Any = None  # the one that watches the host

    def attach(self, settle: Callable[[], None]) -> None:
        """Called by `Lanes`, with a function that waits for all its work.

        Args:
            settle: Waits for all work of the lanes.

        Raises:
            LaneError: The checker has lanes already.
        """
        if self._settle is not None:
            raise LaneError("the checker watches other lanes already", fix="Make a checker for each `Lanes`.")
        self._settle = settle

    def opened(self, lane: str) -> None:
        """A lane begins: after all the host has waited for.

        Args:
            lane: Name of the lane.
        """
        with self._lock:
            self._clocks[lane] = self._host

    def submitted(self, lane: str, uses: Sequence[torch.Tensor], marks: int = 0) -> Ticket:
        """Work is issued to a lane that keeps `uses` alive, and will mark some events on its way.

        Args:
            lane: Name of the lane.
            uses: Tensors that the work uses.
            marks: How many events the work marks.
        """
        with self._lock:
            tick = end = self._advance(lane)
            for _ in range(marks):
                end = self._advance(lane)
            self._keep(lane, end, uses)
            return Ticket(lane, tick, end, dict(self._clocks), self._random.random() * self._max_delay)

    def mark_clocks(self, ticket: Ticket, marks: int) -> list[Clock]:
        """The clocks of the events that the work of a ticket marks: what it does later is not in them.

        Args:
            ticket: What `submitted` returned.
            marks: How many events.
        """
        return [{**ticket.clocks[ticket.lane], ticket.lane: ticket.tick + number} for number in range(marks)]

    def marked(self) -> None:
        """The work running on this thread has passed an event."""
        ticket: Ticket = self._thread.ticket
        self._thread.ticket = replace(ticket, tick=ticket.tick + 1)

    def recorded(self, lane: str) -> Clock:
        """The clock that an event carries when it is recorded now.

        Args:
            lane: Name of the lane.
        """
        with self._lock:
            clock = self._clocks[lane]
            if lane == _CALLER:  # whose work has no numbers of its own: what it does from now on is not in the event
                self._advance(lane)
            return clock

    def waited(self, lane: str, clock: Clock) -> None:
        """Work issued to a lane from now on comes after an event.

        Args:
            lane: Name of the lane.
            clock: How far into every lane's work an event comes after.
        """
        with self._lock:
            self._clocks[lane] = _merge(self._clocks[lane], clock)

    def host_waited(self, clock: Clock) -> None:
        """The host blocked until an event was done, so whatever it issues from now on, to any lane, comes after it.

        Args:
            clock: How far into every lane's work an event comes after.
        """
        with self._lock:
            self._host = _merge(self._host, clock)
            for lane, own in self._clocks.items():
                self._clocks[lane] = _merge(own, clock)

    def joined(self) -> None:
        """All lanes are finished."""
        with self._lock:
            for clock in list(self._clocks.values()):
                self.host_waited(clock)

    def _advance(self, lane: str) -> int:
        clock = self._clocks[lane]
        tick = clock.get(lane, 0) + 1
        self._clocks[lane] = {**clock, lane: tick}
        return tick

    @contextmanager
    def during(self, ticket: Ticket) -> Iterator[None]:
        """Watch the work of a ticket on this thread, after its delay.

        Args:
            ticket: What `submitted` returned.
        """
        self._thread.ticket = ticket
        try:
            time.sleep(ticket.delay)
            with _Watch(self):
                yield
        finally:
            self._thread.ticket = None

    def kept(self, tensors: Sequence[torch.Tensor]) -> None:
        """The lane of the work running on this thread keeps tensors alive until it has passed that work.

        Args:
            tensors: Of any lanes.
        """
        with self._lock:
            now = self._now()
            self._keep(now.lane, now.end, tensors)
            if now.lane == _CALLER:
                self._advance(_CALLER)

    def _now(self) -> Ticket:
        """The work this thread is running; the host's place in the order of issue where it runs none."""
        ticket: Ticket | None = getattr(self._thread, "ticket", None)
        tick = self._clocks[_CALLER][_CALLER]
        return ticket or Ticket(_CALLER, tick, tick, self._clocks)

    def _keep(self, lane: str, tick: int, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None:
                kept = self._known(storage).kept
                kept[lane] = max(kept.get(lane, 0), tick)

    def _known(self, storage: torch.UntypedStorage) -> _Storage:
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            known = self._storages[key] = _Storage(weakref.ref(storage, lambda _: self._freed(key)))
        return known

    def before(self, op: str, arguments: Sequence[tuple[torch.Tensor, Effect]]) -> set[int]:
        """Check the arguments of an operator. Returns the keys of their storages.

        Args:
            op: The operator.
            arguments: Its tensors, with what it does to them.
        """
        keys = set()
        for tensor, effect in arguments:
            storage = storage_of(tensor)
            if storage is not None:
                keys.add(storage._cdata)
                if effect != "metadata":
                    self._access(op, tensor, storage, writes=effect == "write")
        return keys

    def after(self, op: str, result: object, arguments: set[int]) -> None:
        """Take note of the memory that an operator allocated, and so wrote.

        Args:
            op: The operator.
            result: What it returned.
            arguments: What `before` returned.
        """
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in arguments:
                self._access(op, tensor, storage, writes=storage._cdata not in self._storages)
        if op == "aten::_local_scalar_dense":  # .item(): the host waits until its own lane has the number
            with self._lock:
                now = self._now()
                if now.lane == _CALLER:
                    self.host_waited(self.recorded(_CALLER))

    def _access(self, op: str, tensor: torch.Tensor, storage: torch.UntypedStorage, *, writes: bool) -> None:
        low, high = extent(tensor)
        if low == high:
            return
        with self._lock:
            now = self._now()
            clock = now.clocks[now.lane]
            known = self._known(storage)
            if known.owner is None:
                known.owner = now.lane
            access = _Access(now.lane, now.tick, op, writes, low, high, tuple(tensor.shape))
            remaining = []
            for other in known.accesses:
                before = other.is_before(clock)
                if not before and (writes or other.writes) and low < other.high and other.low < high:
                    self._fail(*_race(access, other))
                # Whatever races with an access that is covered by this one will be seen to race with this one.
                covered = before and low <= other.low and other.high <= high
                if not (covered and (writes or (other.lane == now.lane and not other.writes))):
                    remaining.append(other)
            remaining.append(access)
            known.accesses = remaining
            known.last[now.lane] = access

    def _freed(self, key: int) -> None:
        with self._lock:
            known = self._storages.pop(key)
            owner = known.owner
            if owner is None:
                return
            clock = self._now().clocks.get(owner, {})
            for lane, last in known.last.items():
                if lane != owner and last.tick > known.kept.get(lane, 0) and not last.is_before(clock):
                    self.violations.append(str(LaneError(*_early_release(last, owner))))

    def _fail(self, what: str, why: str, fix: str) -> None:
        error = LaneError(what, why, fix)
        self.violations.append(str(error))
        raise error

    def assert_clean(self) -> None:
        """Raise if anything was found.

        Raises:
            LaneError: With all violations.
        """
        with self._lock:
            if self.violations:
                raise LaneError(f"{len(self.violations)} violations of lane order", "\n".join(self.violations))

    def __enter__(self) -> Checker:
        self._mode = _Watch(self)
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, traceback)
        if error is None:
            if self._settle is not None:
                self._settle()
            self.assert_clean()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operator of one thread to the checker, also those that autograd runs in the backward pass."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._checker = checker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = func._schema.name
        arguments = self._checker.before(op, operands(func, args, kwargs))
        result = func(*args, **kwargs)
        self._checker.after(op, result, arguments)
        return result


def _merge(one: Clock, two: Clock) -> Clock:
    return {lane: max(one.get(lane, 0), two.get(lane, 0)) for lane in one.keys() | two.keys()}


def _race(now: _Access, then: _Access) -> tuple[str, str, str]:
    does = "writes" if now.writes else "reads"
    did = "written" if then.writes else "read"
    return (
        f"{now.op} on lane {now.lane!r} {does} a tensor of shape {now.shape} that {then.op} on lane {then.lane!r} "
        f"has {did} (shape {then.shape}), and nothing orders the two",
        "On a GPU the two run at the same time.",
        f"Record an event on lane {then.lane!r} after {then.op}, and let lane {now.lane!r} wait for it "
        f"before {now.op}.",
    )


def _early_release(last: _Access, owner: str) -> tuple[str, str, str]:
    return (
        f"a tensor of shape {last.shape} allocated on lane {owner!r} was released while {last.op} on lane "
        f"{last.lane!r} may still use it",
        f"On a GPU its memory is handed out again to lane {owner!r} at once.",
        f"Pass it in `uses=` to lane {last.lane!r}, or let lane {owner!r} wait for an event recorded on lane "
        f"{last.lane!r} after {last.op} before the last reference goes.",
    )


class Lanes(lanes.Lanes):
    """Lanes that a checker may watch; on a CPU, whose lanes obey the rules of those on a GPU.

    Args:
        device: As for `hybridpar.lanes.Lanes`.
        check: Proves that every access is ordered.
    """

    def __init__(self, device: torch.device | str, *, check: Checker | None = None) -> None:
        super().__init__(device)
        self._checker = check
        if check is not None:
            self.caller = _CheckedCaller(self, check)
            self._lanes["caller"] = self.caller
            check.attach(self._settle)

    def open(self, name: str, **options: Any) -> Lane:
        lane = super().open(name, **options)
        if self._checker is not None:
            lane = self._lanes[name] = self.others[-1] = _CheckedLane(self, name, self._workers[-1], self._checker)
        return lane

    def _end(self, patience: float | None = None) -> None:
        super()._end(patience)
        if self._checker is not None:
            self._checker.joined()

    def _settle(self) -> None:
        """Let the host wait for all lanes."""
        if not self.closed:
            for lane in self._lanes.values():
                lane.synchronize()


class _CheckedEvent(CpuEvent):
    def __init__(self, family: Family, checker: Checker) -> None:
        super().__init__(family)
        self.clock: Clock | None = None
        self._checker = checker

    def run(self, stop: Stop) -> None:
        super().run(stop)
        self.is_over = False  # whoever goes on is to say so

    def _block(self) -> None:
        super()._block()
        if self.clock is not None and self.family.is_issuer():
            self._checker.host_waited(self.clock)


class _CheckedTask(_Task):
    def __init__(self, ticket: Ticket, checker: Checker, *work: Any) -> None:
        super().__init__(*work)
        self._checker = checker
        self._watch = checker.during(ticket)

    def run(self, worker: Worker) -> None:
        with self._watch:
            super().run(worker)

    def mark(self, event: CpuEvent) -> bool:
        passed = super().mark(event)
        if passed:
            self._checker.marked()
        return passed


class _CheckedLane(CpuLane):
    def __init__(self, family: Family, name: str, worker: Worker, checker: Checker) -> None:
        super().__init__(family, name, worker)
        self._checker = checker
        self.new_event = lambda family: _CheckedEvent(family, checker)
        checker.opened(name)

    def keep(self, *tensors: torch.Tensor) -> None:
        super().keep(*tensors)
        self._checker.kept(tensors)

    def _submit(self, work: Work, uses: Sequence[torch.Tensor], marks: Sequence[Any]) -> None:
        ticket = self._checker.submitted(self.name, uses, len(marks))
        for event, clock in zip(marks, self._checker.mark_clocks(ticket, len(marks)), strict=True):
            event.clock = clock
        self._worker.queue.put(_CheckedTask(ticket, self._checker, work, uses, marks))

    def _record(self, event: Any) -> None:
        event.clock = self._checker.recorded(self.name)
        super()._record(event)

    def _wait(self, event: Any) -> None:
        if event.clock is not None:
            self._checker.waited(self.name, event.clock)
        super()._wait(event)


class _CheckedCaller(CpuCaller):
    def __init__(self, family: Family, checker: Checker) -> None:
        super().__init__(family, "caller")
        self._checker = checker
        self.new_event = lambda family: _CheckedEvent(family, checker)

    def keep(self, *tensors: torch.Tensor) -> None:
        self._checker.kept(tensors)

    def _submit(self, work: Work, uses: Sequence[torch.Tensor], marks: Sequence[Any]) -> None:
        try:
            super()._submit(work, uses, marks)
        finally:
            self.keep(*uses)

    def _record(self, event: Any) -> None:
        event.clock = self._checker.recorded(self.name)
        super()._record(event)

    def _wait(self, event: Any) -> None:
        super()._wait(event)
        if event.clock is not None:
            self._checker.waited(self.name, event.clock)
