"""The interface of lanes and events.

A *lane* is an in-order queue of work on a device: a CUDA stream on a GPU, a thread on a CPU. One
host thread issues all work, in one total order. The rules are CUDA's, the stricter of the two: submitting orders
nothing across lanes, not even what the host itself did before; only `wait` does. Because a wait names an event that was
recorded earlier in the total order, no program written against lanes can deadlock.

If work raises, its lane stops: later work on it is skipped, lanes that wait for it stop too, and the host raises the
original exception at its next submit or wait, so that nothing hangs.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from hybridpar.errors import LaneError

Work = Callable[[], None]


class Failure:
    """What stopped a lane."""

    def __init__(self, error: BaseException, lane: str, *, met: bool = False) -> None:
        error.add_note(f"on lane {lane!r}")
        self.error = error
        self.met = met
        self._traceback = error.__traceback__

    def throw(self) -> NoReturn:
        """Raise the original exception; resetting the traceback keeps it from growing with every raise."""
        self.met = True
        raise self.error.with_traceback(self._traceback)


class Stop:
    """Whether a lane was stopped."""

    failure: Failure | None = None


class Family:
    """What the lanes of one process share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.closed = False
        #: The thread that may issue; 0 where none may, as it runs the work of a lane, or the lanes are closed.
        self.issuer = threading.get_ident()

    #: The host thread's own place; see `Lanes`.
    caller: Lane

    def event(self) -> Event:
        """An event that is not recorded yet, for `Lane.record`. Waiting for it before that is an error."""
        return self.caller.new_event(self)

    def is_issuer(self) -> bool:
        """Whether this thread may issue now."""
        return threading.get_ident() == self.issuer

    @contextmanager
    def on_behalf(self) -> Iterator[None]:
        """Inside, this thread issues for the one that issues, which waits for it meanwhile.

        That is what autograd's own thread does on a GPU: hooks run on it while the backward pass is waited for.
        """
        issuer, self.issuer = self.issuer, threading.get_ident()
        try:
            yield
        finally:
            self.issuer = 0 if self.closed else issuer

    def refuse(self) -> NoReturn:
        """Say why this thread must not issue now."""
        if self.closed:
            raise LaneError("the lanes are closed", "A closed family takes no work, events or waits.")
        raise LaneError(
            "a lane was given work, an event or a wait by other code than its issuing thread",
            "One host thread issues everything, so that there is one order and no deadlock.",
            "Issue from the thread that made the `Lanes`, and not from inside of work.",
        )


class Event(ABC):
    """A point in a lane's queue, from `Lane.record`, or from `Lanes.event` to be recorded once later.

    Attributes:
        family: What its lane belongs to.
        lane: In whose queue it is; None before it is recorded.
        failure: What stopped the lane before it.
        is_over: Whether it is known that the lane has passed it, and nothing failed before.
    """

    family: Family
    lane: Lane | None = None
    failure: Failure | None = None
    is_over = False

    def synchronize(self) -> None:
        """Let the host wait for the event. For boundaries only: in steady state lanes wait, never the host.

        Raises:
            LaneError: The event was never recorded.
            BaseException: Work queued before the event failed; its own exception.
        """
        self.recorded_on()
        self._block()
        if self.failure is not None:
            self.failure.throw()

    def recorded_on(self) -> Lane:
        """The lane whose queue the event is in.

        Raises:
            LaneError: The event was never recorded.
        """
        if self.lane is None:
            raise LaneError(
                "the event was not recorded",
                "CUDA takes an event without a recorded point as done, so waiting for it would order nothing.",
                "Record it on a lane before anything waits for it.",
            )
        return self.lane

    @abstractmethod
    def _block(self) -> None:
        """Block this thread until the lane has passed the event."""


class Lane(ABC):
    """An in-order queue of work on a device.

    Args:
        family: What the lane belongs to.
        name: What messages call it.
        stop: Where it is noted that the lane was stopped; its own if it is not given.

    Attributes:
        name: What messages call it; `caller` is the host thread's own.
        device: Where the work runs.
        new_event: Makes an event of the family that is not recorded yet.
    """

    new_event: Callable[[Family], Event]

    def __init__(self, family: Family, name: str, stop: Stop | None = None) -> None:
        self.name = name
        self.device = family.device
        self._family = family
        self._stop = stop or Stop()
        self._marks: deque[Any] = deque()  # of the work that is running, those still to come

    @property
    def failure(self) -> Failure | None:
        """What stopped the lane, if anything did."""
        return self._stop.failure

    def forgive(self) -> None:
        """Go on after a failure, see `Lanes.forgive`."""
        self._stop.failure = None

    def submit(self, work: Work, *, uses: Sequence[torch.Tensor] = (), marks: Sequence[Event] = ()) -> None:
        """Queue work. It runs with the grad mode, inference mode and autocast of the submitting code.

        On CUDA the host runs `work` at once and it queues kernels; on a CPU the lane's thread runs it later.

        Args:
            work: What to do. It must not issue work itself, and it must wait for what it starts asynchronously.
            uses: Tensors of other lanes that the work reads or writes. They are kept alive until the lane has passed
                the work, so that their memory is not handed out again while it is still in use.
            marks: Events from `Lanes.event` that the work passes on its way, by calling `mark` with each of them in
                this order; those it did not are passed at its end. For other lanes they count as recorded from here
                on, so they can start on what is ready before the work has ended.

        Raises:
            LaneError: The family is closed, or this is not the thread that issues; an event was recorded before.
            BaseException: Earlier work on the lane failed; its own exception. Where work runs at once, also this
                work's own.
        """
        if threading.get_ident() != self._family.issuer:
            self._family.refuse()
        if self._stop.failure is not None:
            self._stop.failure.throw()
        for event in marks:
            self._claim(event)
        self._submit(work, uses, marks)

    def record(self, event: Event | None = None) -> Event:
        """Mark this point of the queue.

        Args:
            event: An event from `Lanes.event` that was not recorded yet; None makes a new one.

        Returns:
            The event, which is passed when everything that was issued before is done.

        Raises:
            LaneError: The event is of another family, or was recorded before; or the family is closed.
        """
        if threading.get_ident() != self._family.issuer:
            self._family.refuse()
        if event is None:
            event = self.new_event(self._family)
            event.lane = self
        else:
            self._claim(event)
        self._record(event)
        return event

    def mark(self, event: Event) -> None:
        """Called by work running on this lane: pass an event that was given to `submit` in `marks`.

        On a GPU also from autograd's thread, which runs the backward pass while the work waits for it.

        Args:
            event: The next one of them.

        Raises:
            LaneError: Called from elsewhere, or out of order.
        """
        if not self._marks or self._marks[0] is not event:
            raise self._misplaced_mark()
        self._record(self._marks.popleft())

    def wait(self, event: Event) -> None:
        """Let work that is submitted from now on start after the event. The host waits only for `caller` on a CPU.

        Args:
            event: Recorded before.

        Raises:
            LaneError: The event was not recorded yet, or is of another family; or the family is closed.
            BaseException: On `caller` only: work before the event failed; its own exception.
        """
        if threading.get_ident() != self._family.issuer:
            self._family.refuse()
        if event.family is not self._family or event.lane is None:
            self._check_family(event)
            event.recorded_on()
        if event.lane is not self:
            self._wait(event)

    def synchronize(self) -> None:
        """Let the host wait for everything queued so far. For boundaries only.

        Raises:
            BaseException: Work on the lane failed; its own exception.
        """
        if not self._family.closed:
            self.record().synchronize()
        elif self.failure is not None:
            self.failure.throw()

    @abstractmethod
    def keep(self, *tensors: torch.Tensor) -> None:
        """Called by work running on this lane: keep tensors alive as `uses` does.

        For tensors of other lanes that did not exist yet when the work was submitted, for instance an activation that
        the work takes out of a mailbox. On `caller` it may be called anywhere, after the use.

        Args:
            tensors: Of other lanes.

        Raises:
            LaneError: Called from elsewhere.
        """

    @abstractmethod
    def drain(self, patience: float | None = None) -> None:
        """Finish what is queued and give back what the lane holds; called when the family is closed.

        Args:
            patience: Seconds to wait for work that cannot be interrupted; None waits as long as it takes.
        """

    def _claim(self, event: Event) -> None:
        """Make an event a point of this lane."""
        self._check_family(event)
        if event.lane is not None:
            raise LaneError(
                f"the event was recorded before, on lane {event.lane.name!r}",
                "An event marks one point of one lane, so that it is clear what a wait is for.",
                "Make a new event for the new point.",
            )
        event.lane = self

    def _check_family(self, event: Event) -> None:
        if event.family is not self._family:
            raise LaneError(
                f"lane {self.name!r} was given an event of another family of lanes",
                "Only lanes of one family are issued in one order, so only they can wait for each other.",
                "Open both lanes from the same `Lanes`.",
            )

    def _misplaced_keep(self) -> LaneError:
        return LaneError(
            f"keep() of lane {self.name!r} was called outside its work",
            fix="Call it inside the submitted function, or pass the tensors in `uses=`.",
        )

    def _misplaced_mark(self) -> LaneError:
        return LaneError(
            f"mark() of lane {self.name!r} was called outside its work, or out of order",
            "Work passes the events of `marks` one after another, in the order in which they were given.",
            "Call it inside the submitted function.",
        )

    @abstractmethod
    def _submit(self, work: Work, uses: Sequence[torch.Tensor], marks: Sequence[Any]) -> None: ...

    @abstractmethod
    def _record(self, event: Any) -> None: ...

    @abstractmethod
    def _wait(self, event: Any) -> None: ...


#: Lists that are kept; a training run needs a few for each size of batch. What is kept is never let go, because a
#: captured graph may read it.
_MOST = 4096


class Constants:
    """Numbers that the host knows, copied to a device once: a copy per step would stall a stream, and be no part of a
    captured graph. To be used on one lane, which orders the copy before its uses.

    The numbers of a step (sizes of micro-batches, momenta, which parameters were used) are the same in nearly every
    step, so each list of them is found again by its values.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[float, ...], torch.Tensor] = {}

    def of(self, *values: float) -> torch.Tensor:
        """The values as a 1-D float64 tensor, which others hold too: it must not be written to."""
        known = self._known.get(values)
        if known is None:
            known = torch.tensor(values, dtype=torch.float64).to(self._device)
            if len(self._known) < _MOST:
                self._known[values] = known
        return known


def start_copy(values: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor to the host."""
    if values.device.type == "cpu":
        return values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return copy.copy_(values, non_blocking=True)
