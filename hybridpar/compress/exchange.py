"""Exchanges the messages of many parameters over a process group, in as few collectives as possible.

Round i of all coders becomes one collective per way of collective and type. Where messages cannot be added they are
**sharded**: every worker sends stripe k to worker k, which merges what all sent, and the merged stripes go to everybody
(Seide et al. 2014, section 3: each worker owns 1/K of the sum, so that bytes per worker do not grow with K).

An exchange is written as a sequence of requests, each of them one collective; who carries them out is another matter:
a group of workers (`hybridpar.comm.group`), or one process that plays all workers
(`hybridpar.compress.together`).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.group import Group, Reduction, split
from hybridpar.compress.codec import Coder, Collective, Round, Scratch, TensorSpec
from hybridpar.compress.packing import aligned
from hybridpar.errors import UsageError


class Phase(enum.Enum):
    """What an exchange is doing."""

    #: Writing messages.
    ENCODE = "encode"
    #: Sending messages, or waiting for the other workers.
    WIRE = "wire"
    #: Reading messages; at the owner of a stripe also adding them and writing the sum.
    DECODE = "decode"


def named_range(coder: Coder, doing: str) -> AbstractContextManager[object]:
    """A range of torch's profiler for what a coder does; nothing where no profiler runs."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    work = coder.at_work
    return torch.profiler.record_function(f"{doing} {type(getattr(work, 'quantiser', work)).__name__}")


_NOTHING = nullcontext()


@dataclass(frozen=True)
class PhaseTimes:
    """Milliseconds of an exchange, or of several.

    Attributes:
        encode: From gradients to messages.
        wire: On the way.
        decode: From messages to gradients.
    """

    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(self.encode + other.encode, self.wire + other.wire, self.decode + other.decode)

    @property
    def total(self) -> float:
        """All of it."""
        return self.encode + self.wire + self.decode


class PhaseTimer:
    """Measures the phases of an exchange.

    Args:
        device: Where the exchange works; a GPU's current stream is the one that it uses.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = [self._now()]
        self._phases: list[Phase] = []
        self._more: list[tuple[Phase, float]] = []

    def end(self, phase: Phase) -> None:
        """End a phase, which began at the last call or at the start.

        Args:
            phase: What has just been done.
        """
        self._marks.append(self._now())
        self._phases.append(phase)

    def add(self, phase: Phase, ms: float) -> None:
        """Count what was measured elsewhere, before the timer started or after it ended.

        Args:
            phase: What was done.
            ms: Milliseconds that it took.
        """
        self._more.append((phase, ms))

    def times(self) -> PhaseTimes:
        """Milliseconds of each phase. On a GPU this waits for the end of the last one."""
        sums = dict.fromkeys(Phase, 0.0)
        for phase, ms in self._more:
            sums[phase] += ms
        for phase, start, stop in zip(self._phases, self._marks, self._marks[1:], strict=False):
            sums[phase] += self._between(start, stop)
        return PhaseTimes(sums[Phase.ENCODE], sums[Phase.WIRE], sums[Phase.DECODE])

    def span(self, origin: PhaseTimer) -> tuple[float, float]:
        """Start and end in milliseconds since the start of another exchange of the same device.

        Args:
            origin: Timer of the other exchange.
        """
        first = origin._marks[0]
        return self._between(first, self._marks[0]), self._between(first, self._marks[-1])

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        if not self._on_gpu:
            return float(stop - start) * 1e3
        stop.synchronize()
        return float(start.elapsed_time(stop))


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Replace a tensor by the sum, maximum or bitwise and over the workers.

    Attributes:
        tensor: What is replaced by the result.
        reduction: Which it is.
    """

    tensor: Tensor
    reduction: Reduction

    def through(self, group: Group) -> None:
        """Have it carried out."""
        group.all_reduce(self.tensor, self.reduction)


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send each worker its part of a tensor, and receive one from each.

    Attributes:
        out: Where the parts of all workers go, by rank.
        inp: The parts for all workers, by rank.
        out_sizes: Elements from each worker.
        in_sizes: Elements for each worker.
    """

    out: Tensor
    inp: Tensor
    out_sizes: tuple[int, ...]
    in_sizes: tuple[int, ...]

    def through(self, group: Group) -> None:
        """Have it carried out."""
        group.all_to_all(self.out, self.inp, self.out_sizes, self.in_sizes)


@dataclass(frozen=True, eq=False)
class AllGather:
    """Receive every worker's tensor, by rank; all have one size.

    Attributes:
        out: Where the tensors of all workers go, by rank.
        inp: The tensor of this worker.
    """

    out: Tensor
    inp: Tensor

    def through(self, group: Group) -> None:
        """Have it carried out."""
        group.all_gather(self.out, self.inp)


Request = AllReduce | AllToAll | AllGather


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step of one worker.

    Attributes:
        payload: Handed to collectives.
        wire: Sent to others, by the collectives' own factor: 2 (K - 1) / K of the payload for a ring's all-reduce.
        pull: Of these, bytes of results: what owners of stripes send to all, and the second half of an all-reduce.
        timer: Where its time went; None for a step that has not been done.
    """

    payload: int = 0
    wire: int = 0
    pull: int = 0
    timer: PhaseTimer | None = field(default=None, compare=False, repr=False)

    @property
    def push(self) -> int:
        """Bytes sent to where gradients are added up."""
        return self.wire - self.pull

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.payload + other.payload, self.wire + other.wire, self.pull + other.pull)


class _Stage:
    """The messages of one round that share collectives."""

    def __init__(self, index: int, members: Sequence[tuple[Coder, Round]]) -> None:
        self.index = index
        self._coders = [coder for coder, _ in members]
        #: What each coder writes.
        self._parts: Mapping[int, Sequence[Tensor]] = {}

    def write(self, coder: Coder) -> bool:
        """Have a coder write its message, if it has one here."""
        parts = self._parts.get(id(coder))
        if parts is None:
            return False
        with named_range(coder, "encode"):
            coder.write(self.index, parts)
        return True

    def _note_parts(self, parts: Sequence[Sequence[Tensor]]) -> None:
        self._parts = {id(coder): own for coder, own in zip(self._coders, parts, strict=True)}

    def requests(self, timer: PhaseTimer, *, written: bool) -> Iterator[Request]:
        """The collectives of the round; messages are written before, unless they have been."""
        if not written:
            kinds: dict[type[Coder], tuple[list[Coder], list[Sequence[Tensor]]]] = {}
            for coder in self._coders:
                coders, parts = kinds.setdefault(type(coder.at_work), ([], []))
                coders.append(coder.at_work)
                parts.append(self._parts[id(coder)])
            for kind, (coders, parts) in kinds.items():
                with named_range(coders[0], "encode"):
                    kind.write_together(coders, self.index, parts)
            timer.end(Phase.ENCODE)
        yield from self._requests(timer)
        timer.end(Phase.DECODE)

    def _requests(self, timer: PhaseTimer) -> Iterator[Request]:
        raise NotImplementedError


class _Fused(_Stage):
    """The messages of one round that are reduced by one all-reduce."""

    def __init__(self, index: int, members: Sequence[tuple[Coder, Round]], workers: int) -> None:
        super().__init__(index, members)
        first = members[0][1]
        self._collective = first.collective
        sizes = [sum(entry.sizes) for _, entry in members]
        self._buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=members[0][0].spec.device)
        self._note_parts([(view,) for view in split(self._buffer, sizes)])
        payload = self._buffer.numel() * first.dtype.itemsize
        wire = 2 * payload * (workers - 1) // workers
        self.traffic = Traffic(payload, wire, wire // 2)

    def _requests(self, timer: PhaseTimer) -> Iterator[Request]:
        yield AllReduce(self._buffer, Reduction(self._collective.value))
        timer.end(Phase.WIRE)
        for coder in self._coders:
            with named_range(coder, "decode"):
                coder.read(self.index, self._parts[id(coder)])


class _Sharded(_Stage):
    """The messages of one round that are reduced stripe by stripe by the stripe's owner."""

    def __init__(self, index: int, members: Sequence[tuple[Coder, Round]], workers: int) -> None:
        super().__init__(index, members)
        spec = members[0][0].spec
        rank = spec.rank
        sent = [[entry.sizes[owner] for _, entry in members] for owner in range(workers)]
        merged = [[entry.merged[owner] for _, entry in members] for owner in range(workers)]
        self._in_sizes = tuple(sum(sizes) for sizes in sent)
        self._out_sizes = (self._in_sizes[rank],) * workers
        most = max(sum(sizes) for sizes in merged)

        def new(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.uint8, device=spec.device)

        self._inp, self._received = new(sum(self._in_sizes)), new(sum(self._out_sizes))
        self._own, self._gathered = new(most), new(most * workers)
        # For each coder its views: of all stripes it sends, of what it gets for its own, of that merged, of all merged.
        self._note_parts(_by_coder(split(self._inp, self._in_sizes), sent))
        self._from_all = _by_coder(split(self._received, self._out_sizes), [sent[rank]] * workers)
        self._merged = [views[0] for views in _by_coder([self._own], [merged[rank]])]
        self._all_merged = _by_coder(split(self._gathered, [most] * workers), merged)
        pull = (workers - 1) * most
        self.traffic = Traffic(self._inp.numel() + most, self._inp.numel() - self._in_sizes[rank] + pull, pull)

    def _requests(self, timer: PhaseTimer) -> Iterator[Request]:
        yield AllToAll(self._received, self._inp, self._out_sizes, self._in_sizes)
        timer.end(Phase.WIRE)
        for coder, parts, out in zip(self._coders, self._from_all, self._merged, strict=True):
            with named_range(coder, "merge"):
                coder.merge(self.index, parts, out)
        timer.end(Phase.DECODE)
        yield AllGather(self._gathered, self._own)
        timer.end(Phase.WIRE)
        for coder, parts in zip(self._coders, self._all_merged, strict=True):
            with named_range(coder, "decode"):
                coder.read(self.index, parts)


class _Gathered(_Stage):
    """The messages of one round that are gathered on all workers, and others of float32 that are added when they are
    there.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[tuple[Coder, Round]],
        added: Sequence[tuple[Coder, Round]],
        workers: int,
    ) -> None:
        super().__init__(index, [*added, *members])
        dtype = members[0][1].dtype
        unit = torch.float32.itemsize // dtype.itemsize
        plain = [sum(entry.sizes) * unit for _, entry in added]
        sizes = [sum(entry.sizes) for _, entry in members]
        device = members[0][0].spec.device
        head = aligned(sum(plain))
        count = head + sum(sizes)
        self._own = torch.zeros(count, dtype=dtype, device=device)
        self._all = torch.zeros(workers * count, dtype=dtype, device=device)
        mine = [(one.view(torch.float32),) for one in split(self._own, plain)]
        self._note_parts([*mine, *_by_coder([self._own[head:]], [sizes])])
        by_worker = split(self._all, [count] * workers)
        self._gathered = list(zip([coder for coder, _ in members], self._cut(by_worker, head, sizes), strict=True))
        self._terms = [one[: sum(plain)].view(torch.float32) for one in by_worker]
        self._sum = torch.zeros(sum(plain) // unit, dtype=torch.float32, device=device)
        sums = split(self._sum, [sum(entry.sizes) for _, entry in added])
        self._added = list(zip([coder for coder, _ in added], sums, strict=True))
        payload = count * dtype.itemsize
        self.traffic = Traffic(payload, (workers - 1) * payload)

    @staticmethod
    def _cut(by_worker: Sequence[Tensor], head: int, sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
        return _by_coder([one[head:] for one in by_worker], [sizes] * len(by_worker))

    def _requests(self, timer: PhaseTimer) -> Iterator[Request]:
        yield AllGather(self._all, self._own)
        timer.end(Phase.WIRE)
        if self._added:
            torch.add(self._terms[0], self._terms[1], out=self._sum)
            for other in self._terms[2:]:
                self._sum.add_(other)
        for coder, part in self._added:
            with named_range(coder, "decode"):
                coder.read(self.index, (part,))
        for coder, views in self._gathered:
            with named_range(coder, "decode"):
                coder.read(self.index, views)


def _check_gradient(spec: TensorSpec, gradient: Tensor) -> None:
    if gradient.layout == torch.strided and gradient.dtype == torch.float32 and gradient.shape == (spec.count,):
        return
    kind = "" if gradient.layout == torch.strided else "sparse "
    fix = "Hand over gradients as views: parameter.grad.view(-1)."
    if kind:
        fix = "Give layers such as nn.Embedding sparse=False, or leave their parameters out of the exchange."
    elif gradient.dtype != torch.float32:
        fix = "Keep the parameters in float32; a complex one can be trained as torch.view_as_real."
    elif gradient.numel() != spec.count:
        fix = "Bind a new coder where a layer changes its shape; what was kept for the old shape ends with it."
    raise UsageError(
        f"the gradient of {spec.name!r} is {kind}{gradient.dtype} of shape {tuple(gradient.shape)}, "
        f"and torch.float32 of shape {(spec.count,)} is needed",
        "Codecs take dense gradients, flat, of the shape that they were bound to.",
        fix,
    )


def _by_coder(regions: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[tuple[Tensor, ...]]:
    """Cut each region by its sizes, and give every coder its piece of each region."""
    pieces = [split(region, cut) for region, cut in zip(regions, sizes, strict=True)]
    return list(zip(*pieces, strict=True))


class Exchange:
    """Exchanges the gradients of some parameters, in messages that all of them share.

    One exchange runs on one lane at a time. Its memory is made once, when the rounds are first known.

    Args:
        coders: One per parameter, in an order that is equal on all workers; at least one.

    Raises:
        ValueError: The coders are bound to different workers, or two of them to one parameter.
    """

    def __init__(self, coders: Sequence[Coder]) -> None:
        places = {(coder.spec.rank, coder.spec.workers) for coder in coders}
        if len(places) != 1 or len({coder.spec.name for coder in coders}) != len(coders):
            raise ValueError(f"an exchange needs coders of one worker and of different parameters, not {places}")
        self.coders = tuple(coders)
        self._workers = coders[0].spec.workers
        self._rounds: tuple[tuple[Round, ...], ...] = ()
        self._stages: list[_Fused | _Sharded | _Gathered] = []
        self._timer: PhaseTimer | None = None
        scratch = Scratch(coders[0].spec.device)
        for coder in coders:
            coder.use(scratch)

    @property
    def traffic(self) -> Traffic:
        """Bytes of the next step. They do not depend on what the gradients are."""
        self._lay_out()
        return sum((stage.traffic for stage in self._stages), Traffic())

    def requests(self, gradients: Sequence[Tensor], outs: Sequence[Tensor]) -> Iterator[Request]:
        """A step as the collectives it consists of; each must have been carried out when the next is asked for.

        Args:
            gradients: One per coder, 1-D float32.
            outs: Where the mean over the workers goes, or the sum; 1-D float32. They may be the gradients.

        Raises:
            UsageError: A gradient is sparse, not flat, not float32, or of another size than the parameter that its
                coder is bound to. Nothing was started then, and `rollback` is not needed.
        """
        self._lay_out()
        timer = self._timer = PhaseTimer(self.coders[0].spec.device)
        for coder, gradient in zip(self.coders, gradients, strict=True):
            _check_gradient(coder.spec, gradient)
        for coder, gradient in zip(self.coders, gradients, strict=True):
            coder.begin(gradient)
        timer.end(Phase.ENCODE)
        for stage in self._stages:
            yield from stage.requests(timer, written=False)
        for coder, out in zip(self.coders, outs, strict=True):
            coder.finish(out)
        timer.end(Phase.DECODE)

    def run(self, group: Group, gradients: Sequence[Tensor], outs: Sequence[Tensor]) -> Traffic:
        """Do a step over a group of workers; see `requests`.

        Args:
            group: The workers; their ranks are those that the coders are bound to.
            gradients: One per coder, 1-D float32.
            outs: Where results go, 1-D float32; they may be the gradients.

        Returns:
            Bytes that it took, and where its time went.

        Raises:
            ValueError: The coders are not bound to this worker of the group.
            UsageError: A gradient does not fit.
        """
        self._check_group(group)
        for request in self.requests(gradients, outs):
            request.through(group)
        return self._done()

    def open(self) -> None:
        """Begin a step in which gradients come one by one: `take` each, then `carry`, then `finish` of each coder.

        For codecs that take gradients at once (`Codec.at_once`).
        """
        self._lay_out()

    def take(self, index: int, gradient: Tensor) -> None:
        """Write the first message of a parameter; the gradient is not needed afterwards.

        Args:
            index: Of its coder.
            gradient: 1-D float32.

        Raises:
            UsageError: The gradient does not fit.
        """
        coder = self.coders[index]
        _check_gradient(coder.spec, gradient)
        coder.begin(gradient)
        for stage in self._stages:
            if stage.write(coder):
                break
        coder.release()

    def carry(self, group: Group) -> Traffic:
        """Exchange the messages that `take` wrote, and those that follow. What comes of them is had from each coder's
        `finish`.

        Args:
            group: The workers; their ranks are those that the coders are bound to.

        Returns:
            Bytes that it took, and where its time went.

        Raises:
            ValueError: The coders are not bound to this worker of the group.
        """
        self._check_group(group)
        timer = self._timer = PhaseTimer(self.coders[0].spec.device)
        for stage in self._stages:
            for request in stage.requests(timer, written=stage.index == 0):
                request.through(group)
        return self._done()

    def _check_group(self, group: Group) -> None:
        spec = self.coders[0].spec
        if (spec.rank, spec.workers) != (group.rank, group.size):
            raise ValueError(
                f"coders of worker {spec.rank} of {spec.workers} on worker {group.rank} of {group.size} of the group"
            )

    def _done(self) -> Traffic:
        return replace(sum((stage.traffic for stage in self._stages), Traffic()), timer=self._timer)

    def commit(self, unused: Collection[str] = ()) -> None:
        """The step counts.

        Args:
            unused: Names of parameters for which it does not: no worker had a gradient for them.
        """
        for coder in self.coders:
            if coder.spec.name in unused:
                coder.rollback()
            else:
                coder.commit()

    def rollback(self) -> None:
        """The step does not count; all state is as it was before."""
        for coder in self.coders:
            coder.rollback()

    def _lay_out(self) -> None:
        """Make the messages' memory, where rounds are not those of the step before."""
        rounds = tuple(coder.rounds for coder in self.coders)
        if rounds == self._rounds:
            return
        self._rounds, self._stages = rounds, []
        for index in range(max(map(len, rounds))):
            kinds: dict[tuple[Collective, torch.dtype], list[tuple[Coder, Round]]] = {}
            for coder, own in zip(self.coders, rounds, strict=True):
                if index < len(own):
                    entry = own[index]
                    kinds.setdefault((entry.collective, entry.dtype), []).append((coder, entry))
            # Between two workers, sums of float32 can go along with messages that are gathered.
            added: list[tuple[Coder, Round]] = []
            if self._workers == 2 and (Collective.GATHER, torch.uint8) in kinds:
                added = kinds.pop((Collective.SUM, torch.float32), [])
            for (collective, _), members in kinds.items():
                if collective is Collective.SHARD:
                    self._stages.append(_Sharded(index, members, self._workers))
                elif collective is Collective.GATHER:
                    self._stages.append(_Gathered(index, members, added, self._workers))
                else:
                    self._stages.append(_Fused(index, members, self._workers))
