"""Exchanges the messages of many parameters over a process group, in as few collectives as possible.

Round i of all coders becomes one collective per way of collective and type. Where messages cannot be added they are
**sharded**: every worker sends stripe k to worker k, which merges what all sent, and the merged stripes go to everybody
(Seide et al. 2014, section 3: each worker owns 1/K of the sum, so that bytes per worker do not grow with K).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from hybridpar.comm.group import Group, Reduction, split
from hybridpar.compress.codec import NOTHING, Coder, Collective, Round, TensorSpec
from hybridpar.compress.memory import Scratch
from hybridpar.compress.packing import aligned
from hybridpar.compress.received import Received
from hybridpar.errors import UsageError

#: What an exchange does: it writes messages; sends them, or waits for the other workers; and reads them, which at the
#: owner of a stripe is also to add them and to write the sum.
Phase = Literal["encode", "wire", "decode"]

_NOTHING = nullcontext()


def named_range(coder: Coder, doing: str) -> AbstractContextManager[object]:
    """A range of torch's profiler for what a coder does; nothing where no profiler runs."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    return torch.profiler.record_function(f"{doing} {type(getattr(coder, 'quantiser', coder)).__name__}")


class PhaseTimer:
    """Measures the phases of an exchange.

    Args:
        device: Where the exchange works; a GPU's current stream is the one that it uses.
        encode_ms: Milliseconds of writing messages that were measured before.
    """

    def __init__(self, device: torch.device, encode_ms: float = 0.0) -> None:
        self._on_gpu = device.type == "cuda"
        self._now: Callable[[], Any] = _timed_event if self._on_gpu else time.perf_counter
        self._marks: list[Any] = [self._now()]
        self._phases: list[Phase] = []
        self._encode_ms = encode_ms

    def end(self, phase: Phase) -> None:
        """End a phase, which began at the last call or at the start.

        Args:
            phase: What has just been done.
        """
        self._marks.append(self._now())
        self._phases.append(phase)

    def times(self) -> dict[Phase, float]:
        """Milliseconds of each phase. On a GPU this waits for the end of the last one."""
        sums: dict[Phase, float] = {"encode": self._encode_ms, "wire": 0.0, "decode": 0.0}
        for phase, ends in zip(self._phases, pairwise(self._marks), strict=True):
            sums[phase] += self._between(*ends)
        return sums

    def span(self, origin: PhaseTimer) -> tuple[float, float]:
        """Start and end in milliseconds since the start of another exchange of the same device.

        Args:
            origin: Timer of the other exchange.
        """
        first = origin._marks[0]
        return self._between(first, self._marks[0]), self._between(first, self._marks[-1])

    def _between(self, start: Any, stop: Any) -> float:
        if not self._on_gpu:
            return float(stop - start) * 1e3
        stop.synchronize()
        return float(start.elapsed_time(stop))


def _timed_event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step of one worker.

    Attributes:
        payload: Handed to collectives.
        wire: Sent to others, by the collectives' own factor: 2 (K - 1) / K of the payload for a ring's all-reduce.
    """

    payload: int = 0
    wire: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.payload + other.payload, self.wire + other.wire)


class _Meeting(ABC):
    """The messages of a round that share collectives."""

    traffic: Traffic
    #: For each coder what it writes, and what it reads.
    parts: Sequence[Sequence[Tensor]]
    received: Sequence[Sequence[Tensor]]

    def __init__(self, index: int, coders: Sequence[Coder]) -> None:
        self.index = index
        self._coders = coders
        self._device = coders[0].spec.device

    def write(self) -> None:
        """Have all coders write their messages, those of a class together."""
        kinds: dict[type[Coder], tuple[list[Coder], list[Sequence[Tensor]]]] = defaultdict(lambda: ([], []))
        for coder, parts in zip(self._coders, self.parts, strict=True):
            coders, messages = kinds[type(coder)]
            coders.append(coder)
            messages.append(parts)
        for kind, (coders, messages) in kinds.items():
            with named_range(coders[0], "encode"):
                kind.write_together(coders, self.index, messages)

    @abstractmethod
    def meet(self, group: Group, timer: PhaseTimer) -> None:
        """Send the messages; what comes of them is then in `received`."""

    def read(self) -> None:
        """Have all coders read what came; most do nothing then but know where it is."""
        for coder, views in zip(self._coders, self.received, strict=True):
            if type(coder).read is Coder.read:
                coder.messages = views
            else:
                with named_range(coder, "decode"):
                    coder.read(self.index, views)


class _Reduced(_Meeting):
    """Messages that one all-reduce adds, or reduces otherwise."""

    def __init__(self, index: int, coders: Sequence[Coder]) -> None:
        super().__init__(index, coders)
        rounds, workers = [coder.rounds[index] for coder in coders], coders[0].spec.workers
        sizes = [entry.sizes[0] for entry in rounds]
        self._reduction: Reduction = rounds[0].collective.value
        self._buffer = torch.zeros(sum(sizes), dtype=rounds[0].dtype, device=self._device)
        self.parts = self.received = [(view,) for view in split(self._buffer, sizes)]
        self.traffic = Traffic(self._buffer.nbytes, 2 * self._buffer.nbytes * (workers - 1) // workers)

    def meet(self, group: Group, timer: PhaseTimer) -> None:
        group.all_reduce(self._buffer, self._reduction)
        timer.end("wire")


class _Gathered(_Meeting):
    """Messages that everybody receives from everybody, and others that are added when they are there."""

    def __init__(self, index: int, coders: Sequence[Coder]) -> None:
        super().__init__(index, coders)
        rounds, workers = [coder.rounds[index] for coder in coders], coders[0].spec.workers
        sizes = [aligned(entry.bytes) for entry in rounds]
        count = sum(sizes)
        self._sent = torch.zeros(count, dtype=torch.uint8, device=self._device)
        self._gathered = torch.zeros(workers * count, dtype=torch.uint8, device=self._device)

        def views(memory: Tensor) -> list[Tensor]:
            pieces = zip(split(memory, sizes), rounds, strict=True)
            return [piece[: entry.bytes].view(entry.dtype) for piece, entry in pieces]

        self.parts = [(view,) for view in views(self._sent)]
        rows = split(self._gathered, [count] * workers)
        self.received = list(zip(*map(views, rows), strict=True))
        # What is added comes last, and of two workers: see `Exchange.open`.
        gathered = sum(entry.collective is Collective.GATHER for entry in rounds)
        self._terms = [row[sum(sizes[:gathered]) :].view(torch.float32) for row in rows]
        self.received[gathered:] = [(view,) for view in views(rows[0])[gathered:]]
        self.traffic = Traffic(count, (workers - 1) * count)

    def meet(self, group: Group, timer: PhaseTimer) -> None:
        group.all_gather(self._gathered, self._sent)
        timer.end("wire")
        if self._terms[0].numel():
            self._terms[0].add_(self._terms[1])


class _Sharded(_Meeting):
    """Messages that are merged stripe by stripe by the stripe's owner."""

    def __init__(self, index: int, coders: Sequence[Coder]) -> None:
        super().__init__(index, coders)
        spec = coders[0].spec
        sizes = [[coder.rounds[index].sizes[owner] for coder in coders] for owner in range(spec.workers)]
        self._in_sizes = tuple(map(sum, sizes))
        mine, most = self._in_sizes[spec.rank], max(self._in_sizes)
        self._out_sizes = (mine,) * spec.workers

        def new(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.uint8, device=self._device)

        self._sent, self._stripe = new(sum(self._in_sizes)), new(sum(self._out_sizes))
        self._sum, self._sums = new(most), new(most * spec.workers)
        self.parts = _by_coder(split(self._sent, self._in_sizes), sizes)
        self._stripes = _by_coder(split(self._stripe, self._out_sizes), [sizes[spec.rank]] * spec.workers)
        self._merged = split(self._sum, sizes[spec.rank])
        self.received = _by_coder(split(self._sums, [most] * spec.workers), sizes)
        to_owners, from_owner = self._sent.numel() - mine, (spec.workers - 1) * most
        self.traffic = Traffic(self._sent.numel() + most, to_owners + from_owner)

    def meet(self, group: Group, timer: PhaseTimer) -> None:
        group.all_to_all(self._stripe, self._sent, self._out_sizes, self._in_sizes)
        timer.end("wire")
        for coder, parts, out in zip(self._coders, self._stripes, self._merged, strict=True):
            with named_range(coder, "merge"):
                coder.merge(self.index, parts, out)
        timer.end("decode")
        group.all_gather(self._sums, self._sum)
        timer.end("wire")


#: How messages of each collective meet; the others are reduced.
_MEETINGS: dict[Collective, type[_Meeting]] = {Collective.GATHER: _Gathered, Collective.SHARD: _Sharded}


def _check_gradient(spec: TensorSpec, gradient: Tensor) -> None:
    if gradient.shape == (spec.count,) and gradient.dtype == torch.float32 and gradient.layout == torch.strided:
        return
    sparse = "" if gradient.layout == torch.strided else "sparse "
    raise UsageError(
        f"the gradient of {spec.name!r} is {sparse}{gradient.dtype} of shape {tuple(gradient.shape)}, "
        f"and torch.float32 of shape {(spec.count,)} is needed",
        "Codecs take dense gradients, flat, of the shape that they were bound to.",
        "Keep parameters in float32, give layers such as nn.Embedding sparse=False, hand over gradients as views "
        "(parameter.grad.view(-1)), and bind a new coder where a layer changes its shape.",
    )


def _by_coder(regions: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[tuple[Tensor, ...]]:
    """Cut each region by its sizes, and give every coder its piece of each region."""
    pieces = [split(region, cut) for region, cut in zip(regions, sizes, strict=True)]
    return list(zip(*pieces, strict=True))


class Exchange:
    """Exchanges the gradients of some parameters, in messages that all of them share.

    One exchange runs on one lane at a time. Its memory is made once, when the rounds are first known.

    Args:
        coders: One per parameter, in an order that is equal on all workers.

    Raises:
        ValueError: The coders are bound to different workers, or two of them to one parameter.
    """

    def __init__(self, coders: Sequence[Coder]) -> None:
        workers = {(coder.spec.rank, coder.spec.workers) for coder in coders}
        if len(workers) > 1 or len({coder.spec.name for coder in coders}) != len(coders):
            raise ValueError(f"an exchange needs coders of one worker and of different parameters, not {workers}")
        self.coders = tuple(coders)
        self._lasting = [coder for coder in coders if coder.lasts]
        self._scratch = Scratch(coders[0].spec.device if coders else torch.device("cpu"))
        # The coders that work in this step, what they declare, and how that is laid out.
        self._working: list[Coder] = []
        self._rounds: list[tuple[Round, ...]] = []
        self._meetings: list[_Meeting] = []
        self._first: list[Sequence[Tensor]] = []
        self._traffic = Traffic()
        #: What comes of each parameter's gradients; there when everything was carried.
        self.received: list[Received] = []

    @property
    def traffic(self) -> Traffic:
        """Bytes of the next step. They do not depend on what the gradients are."""
        return self.open()

    def run(self, group: Group, gradients: Sequence[Tensor], outs: Sequence[Tensor]) -> PhaseTimer:
        """Do a step over a group of workers.

        Args:
            group: The workers; their ranks are those that the coders are bound to.
            gradients: One per coder, 1-D float32 of any stride.
            outs: Where the mean over the workers goes, or the sum; as the gradients, and they may be those.

        Returns:
            Where its time went.

        Raises:
            ValueError: The coders are not bound to this worker of the group.
            UsageError: A gradient is sparse, not flat, not float32, or of another size than the parameter that its
                coder is bound to. Nothing was started then.
        """
        self.open()
        timer = PhaseTimer(self.coders[0].spec.device)
        for coder, gradient in zip(self._working, gradients, strict=True):
            _check_gradient(coder.spec, gradient)
        for coder, gradient in zip(self._working, gradients, strict=True):
            coder.gradient = gradient.contiguous()
        self._meet(group, timer, written=False)
        for coder, out in zip(self._working, outs, strict=True):
            result = out.contiguous()
            coder.finish(result)
            if result is not out:
                out.copy_(result)
        timer.end("decode")
        return timer

    def open(self) -> Traffic:
        """Begin a step in which gradients come one by one: `take` each, then `carry`; then `received` is there.

        For codecs that take gradients at once (`Codec.at_once`).

        Returns:
            Bytes of the step.
        """
        working = [coder.working for coder in self.coders]
        rounds = [coder.rounds for coder in working]
        if working == self._working and rounds == self._rounds:
            return self._traffic
        self._working, self._rounds, self._meetings = working, rounds, []
        first: dict[int, Sequence[Tensor]] = {}
        for index in range(max(map(len, rounds), default=0)):
            kinds: dict[tuple[Collective, torch.dtype], list[int]] = defaultdict(list)
            for number, entries in enumerate(rounds):
                if index < len(entries):
                    kinds[entries[index].collective, entries[index].dtype].append(number)
            # Between two workers sums of float32 go along with what is gathered: as many bytes, and one call less.
            gathered = kinds.get((Collective.GATHER, torch.uint8))  # they come first
            if gathered is not None and self.coders[0].spec.workers == 2:
                gathered += kinds.pop((Collective.SUM, torch.float32), [])
            for (collective, _), numbers in kinds.items():
                kind = _MEETINGS.get(collective, _Reduced)
                meeting = kind(index, [working[number] for number in numbers])
                self._meetings.append(meeting)
                first.update(zip(numbers, meeting.parts, strict=True) if index == 0 else ())
        self._first = [first[number] for number in range(len(working))]
        self._traffic = sum((meeting.traffic for meeting in self._meetings), Traffic())
        for coder in working:
            coder.scratch = self._scratch
        self.received = []
        return self._traffic

    def take(self, index: int, gradient: Tensor) -> None:
        """Write the first message of a parameter; the gradient is not needed afterwards.

        Args:
            index: Of its coder.
            gradient: 1-D float32, contiguous.

        Raises:
            UsageError: The gradient does not fit.
        """
        coder = self._working[index]
        if gradient.numel() != coder.spec.count or gradient.dtype != torch.float32:
            _check_gradient(coder.spec, gradient)
        coder.gradient = gradient
        with named_range(coder, "encode") if torch.autograd.profiler._is_profiler_enabled else _NOTHING:
            coder.write(0, self._first[index])
        coder.gradient = NOTHING

    def carry(self, group: Group, encode_ms: float = 0.0) -> PhaseTimer:
        """Exchange the messages that `take` wrote, and those that follow. What comes of them is in `received`.

        Args:
            group: The workers; their ranks are those that the coders are bound to.
            encode_ms: Milliseconds that `take` took.

        Returns:
            Where its time went.

        Raises:
            ValueError: The coders are not bound to this worker of the group.
        """
        timer = PhaseTimer(self.coders[0].spec.device, encode_ms)
        self._meet(group, timer, written=True)
        return timer

    def _meet(self, group: Group, timer: PhaseTimer, *, written: bool) -> None:
        """All rounds, of which the first may have been written before."""
        spec = self.coders[0].spec
        if (spec.rank, spec.workers) != (group.rank, group.size):
            raise ValueError(
                f"coders of worker {spec.rank} of {spec.workers} on worker {group.rank} of {group.size} of the group"
            )
        for meeting in self._meetings:
            if meeting.index or not written:
                meeting.write()
                timer.end("encode")
            meeting.meet(group, timer)
            meeting.read()
            timer.end("decode")
        if not self.received:  # it stays where it came to be in this step
            self.received = [coder.received() for coder in self._working]

    def commit(self, unused: Collection[str] = ()) -> None:
        """The step counts.

        Args:
            unused: Names of parameters for which it does not: no worker had a gradient for them.
        """
        for coder in self._lasting:
            if coder.spec.name not in unused:
                coder.commit()
