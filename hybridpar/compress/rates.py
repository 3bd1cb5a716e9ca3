"""Measures how fast a link and a codec are.

A link is measured by the collectives that codecs really use, each in the type of its messages: how long a
small message takes, and how much longer a large one. A codec is measured by a whole exchange of a few of the model's
shapes, over a group that sends nothing.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.comm.group import Group, Reduction, split
from hybridpar.compress.codec import Codec, Collective, Round, TensorSpec
from hybridpar.compress.exchange import Exchange
from hybridpar.compress.policy import bind
from hybridpar.machine.steady import halves_apart

#: How a message is reduced, and its type.
Kind = tuple[Collective, torch.dtype]

_SMALL_BYTES = 4 << 10
_LARGE_BYTES = 512 << 10
_SMALL_REPEATS, _LARGE_REPEATS = 7, 3

#: Elements of the largest piece of a parameter that a codec is tried on.
_MOST_ELEMENTS = 1 << 20
#: Bytes of gradients that are tried together, more than caches near a core hold; pieces of them at most; and tries.
_COLD_BYTES, _MOST_PIECES, _TRIES = 16 << 20, 16, 4


@dataclass(frozen=True)
class LinkCost:
    """What a collective of one kind costs.

    Attributes:
        latency_ms: Of a message of 4 KB.
        ms_per_byte: For each byte more that a worker hands over.
    """

    latency_ms: float
    ms_per_byte: float

    def ms(self, size: int) -> float:
        """Time of a message of so many bytes."""
        return self.latency_ms + self.ms_per_byte * size

    @classmethod
    def slowest(cls, costs: Sequence[LinkCost]) -> LinkCost:
        """What holds for all of several links."""
        return cls(max(one.latency_ms for one in costs), max(one.ms_per_byte for one in costs))


@torch.no_grad()
def measure_link(
    kinds: Iterable[Kind], meet: Callable[[Kind, Tensor], None], device: torch.device
) -> dict[Kind, LinkCost]:
    """Measure how long collectives take; every worker calls this with the same kinds."""
    found = {}
    for kind in kinds:
        small, large = (
            _median_ms(lambda message, kind=kind: meet(kind, message), kind[1], size, device, repeats)  # type: ignore[misc]
            for size, repeats in ((_SMALL_BYTES, _SMALL_REPEATS), (_LARGE_BYTES, _LARGE_REPEATS))
        )
        found[kind] = LinkCost(small, max(large - small, 0.0) / (_LARGE_BYTES - _SMALL_BYTES))
    flat = [value for cost in found.values() for value in (cost.latency_ms, cost.ms_per_byte)]
    told = torch.tensor([*flat, 1.0], dtype=torch.float64, device=device)
    meet((Collective.SUM, torch.float64), told)
    *sums, workers = told.tolist()
    means = [value / workers for value in sums]
    return {kind: LinkCost(*means[2 * place : 2 * place + 2]) for place, kind in enumerate(found)}


def meet_over(group: Group) -> Callable[[Kind, Tensor], None]:
    """A function that reduces messages over a group as `Exchange` does; stripes are of one size."""

    def meet(kind: Kind, message: Tensor) -> None:
        if kind[0] is Collective.GATHER:
            group.all_gather(message.new_empty(message.numel() * group.size), message)
            return
        if kind[0] is not Collective.SHARD:
            group.all_reduce(message, Reduction(kind[0].value))
            return
        stripe = message.numel() // group.size
        whole = message[: stripe * group.size]
        sizes = [stripe] * group.size
        received = torch.empty_like(whole)
        group.all_to_all(received, whole, sizes, sizes)
        group.all_gather(whole, received[:stripe].clone())

    return meet


def _median_ms(
    work: Callable[[Tensor], None], dtype: torch.dtype, size: int, device: torch.device, repeats: int
) -> float:
    message = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work(message)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


class _Alone(Group):
    """A group of which this worker is the first and the only one: whatever it sends comes back from all the others."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        """Leave the tensor as it is, as if the others had sent zeros."""

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        own = split(inp, in_sizes)[self.rank]
        for piece in split(out, out_sizes):
            piece.copy_(own)

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        out.view(self.size, -1).copy_(inp.expand(self.size, -1))

    def send(self, tensor: Tensor, rank: int) -> None:
        """Do nothing."""

    def recv(self, tensor: Tensor, rank: int) -> None:
        """Leave the tensor as it is."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class CodecRate:
    """How fast a codec is on this device.

    Attributes:
        tried: For each number of elements that it was tried on: milliseconds to write messages and to read them.
        noise: How far tries lay apart at most, relative.
    """

    tried: Mapping[int, tuple[float, float]]
    noise: float = 0.0

    def times(self, count: int) -> tuple[float, float]:
        """Milliseconds to write and to read a parameter of so many elements.

        On the line between the two nearest that were tried. A smaller parameter than any takes as long as the smallest,
        a larger one longer in proportion; so does every one where only one was tried.
        """
        known = sorted(self.tried)
        if count >= known[-1] or len(known) == 1:
            encode, decode = self.tried[known[-1]]
            return encode * count / known[-1], decode * count / known[-1]
        place = min(max(bisect_right(known, count), 1), len(known) - 1)
        low, high = known[place - 1], known[place]
        part = max(0.0, (count - low) / (high - low))
        encode, decode = (
            before + part * (after - before) for before, after in zip(self.tried[low], self.tried[high], strict=True)
        )
        return encode, decode


@torch.no_grad()
def measure_codec(
    codec: Codec, shapes: Iterable[tuple[int, ...]], workers: int, device: torch.device
) -> CodecRate | None:
    """Try a codec on a few of a model's shapes; None where it fits none of them."""
    fitting = sorted({shape for shape in shapes if codec.fits(shape)}, key=math.prod)
    if not fitting:
        return None
    tried, noise = {}, 0.0
    for place in sorted({0, len(fitting) // 2, len(fitting) - 1}):
        shape = _piece(codec, fitting[place])
        encode, decode, apart = _time_exchanges(codec, shape, workers, device)
        tried[math.prod(shape)] = encode, decode
        noise = max(noise, apart)
    return CodecRate(tried, noise)


@functools.cache
def lasting_rounds(codec: Codec, shape: tuple[int, ...], workers: int) -> tuple[Round, ...]:
    """The rounds of a parameter once a warm-up is over."""
    return codec.bind(TensorSpec("trial", shape, workers=workers)).lasting.rounds


def _piece(codec: Codec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """As much of a shape as is worth trying, cut along the first dimension."""
    rows = max(1, _MOST_ELEMENTS // max(1, math.prod(shape[1:])))
    cut = (min(rows, shape[0]), *shape[1:]) if shape else shape
    return cut if codec.fits(cut) else shape


def _time_exchanges(
    codec: Codec, shape: tuple[int, ...], workers: int, device: torch.device
) -> tuple[float, float, float]:
    """Milliseconds to write and to read the messages of one piece of several that are exchanged together, and noise.

    In a step a bucket comes to the codec from memory, after all others; one piece again and again would stay in cache.
    """
    draw = torch.Generator().manual_seed(0)
    count = math.prod(shape)
    pieces = max(1, min(_MOST_PIECES, _COLD_BYTES // (4 * count)))
    exchange = Exchange(
        [bind(codec, TensorSpec(f"trial {place}", shape, workers=workers, device=device)) for place in range(pieces)]
    )
    gradients = [torch.randn(count, generator=draw, dtype=torch.float32).to(device) for _ in range(pieces)]
    results = [torch.empty_like(one) for one in gradients]
    times = []
    for _ in range(1 + _TRIES):  # the first one makes the scratch memory
        timer = exchange.run(_Alone(workers), gradients, results).timer
        exchange.commit()
        assert timer is not None
        times.append(timer.times())
    encode, decode = (statistics.median(getattr(one, way) for one in times[1:]) for way in ("encode", "decode"))
    return encode / pieces, decode / pieces, halves_apart([one.encode + one.decode for one in times[1:]])
