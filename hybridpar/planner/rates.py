"""Measures how fast codecs are, on all workers at the same time.

A codec is measured by a whole exchange of a few of the model's shapes, over a group that sends nothing.
"""

from __future__ import annotations

import functools
import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.comm.group import Group, Reduction, split
from hybridpar.comm.world import World
from hybridpar.compress import parse_codec
from hybridpar.compress.codec import Codec, Round, TensorSpec
from hybridpar.compress.exchange import Exchange
from hybridpar.compress.policy import bind
from hybridpar.errors import HybridparError
from hybridpar.machine.process import host_identity
from hybridpar.machine.steady import halves_apart
from hybridpar.partition.profile_cache import machine_key
from hybridpar.planner.profile import Parameter
from hybridpar.planner.store import NOISE, remembered

_WAYS = ("encode", "decode")

#: Elements of the largest piece of a parameter that a codec is tried on.
_MOST_ELEMENTS = 1 << 20
#: Bytes of gradients that are tried together, more than caches near a core hold; pieces of them at most; and tries.
_COLD_BYTES, _MOST_PIECES, _TRIES = 16 << 20, 16, 4


class _Alone(Group):
    """A group in which this worker is alone: whatever it sends comes back as if from all the others."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        """Leave the tensor as it is, as if the others had sent zeros."""

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        mine = split(inp, in_sizes)[self.rank]
        for piece in split(out, out_sizes):
            piece.copy_(mine)

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
        a larger one longer in proportion; so does every parameter where a single size was tried.
        """
        known = sorted(self.tried)
        if count >= known[-1] or len(known) == 1:
            encode, decode = self.tried[known[-1]]
            return encode * count / known[-1], decode * count / known[-1]
        index = min(max(bisect_right(known, count), 1), len(known) - 1)
        low, high = known[index - 1], known[index]
        part = max(0.0, (count - low) / (high - low))
        encode, decode = (
            before + part * (after - before) for before, after in zip(self.tried[low], self.tried[high], strict=True)
        )
        return encode, decode


def measure_rates(
    codecs: Sequence[str],
    parameters: Iterable[Parameter | torch.nn.Parameter],
    workers: int,
    device: torch.device,
    *,
    world: World | None = None,
    cache: Path | None = None,
) -> dict[str, dict[int, tuple[float, float]]]:
    """How fast codecs are on a device; those that fit no layer, or cannot run here, are left out."""
    shapes = sorted({tuple(one.shape) for one in parameters})
    tried_by = min(max(workers, 2), 8)
    beside = Counter(world.gather(host_identity())).most_common(1)[0][1] if world is not None else 1
    key = {
        "shapes": shapes,
        "beside": beside,
        "workers": tried_by,
        **machine_key(device),
    }
    rates: dict[str, dict[int, tuple[float, float]]] = {}
    for text in codecs:
        measure = partial(_rate, text, shapes, tried_by, device)
        of_all = measure if world is None else partial(_rate_of_all, world, measure)
        found = remembered("codec", {**key, "codec": text}, cache, of_all, world)
        counts = sorted({int(name.partition(" ")[0]) for name in found})
        if counts:
            rates[text] = {count: (found[f"{count} encode"], found[f"{count} decode"]) for count in counts}
    return rates


def _rate(text: str, shapes: Sequence[tuple[int, ...]], workers: int, device: torch.device) -> dict[str, float]:
    """Milliseconds by number of elements and direction; nothing where the codec fits no layer, or cannot run here."""
    try:
        rate = measure_codec(parse_codec(text), shapes, workers, device)
    except HybridparError:
        return {}
    tried = {} if rate is None else rate.tried
    times = {f"{count} {way}": took for count, both in tried.items() for way, took in zip(_WAYS, both, strict=True)}
    return times if rate is None else times | {NOISE: rate.noise}


def _rate_of_all(world: World, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The mean of what all measure at the same time; a collective."""
    world.barrier()
    told: list[dict[str, float]] = world.gather(measure())  # type: ignore[assignment]
    means = {name: statistics.mean(one[name] for one in told) for name in told[0] if all(name in one for one in told)}
    return means | {NOISE: max(one.get(NOISE, 0.0) for one in told)}


@torch.no_grad()
def measure_codec(
    codec: Codec, shapes: Iterable[tuple[int, ...]], workers: int, device: torch.device
) -> CodecRate | None:
    """Try a codec on a few of a model's shapes; None where it fits none of them."""
    fitting = sorted({shape for shape in shapes if codec.fits(shape)}, key=math.prod)
    if not fitting:
        return None
    tried, noise = {}, 0.0
    for index in sorted({0, len(fitting) // 2, len(fitting) - 1}):
        shape = _piece(codec, fitting[index])
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
    """Milliseconds to write and to read the messages of a piece of several that are exchanged together, and noise.

    In a step a bucket comes to the codec from memory, after all others; the same piece each time would stay in cache.
    """
    draw = torch.Generator().manual_seed(0)
    count = math.prod(shape)
    pieces = max(1, min(_MOST_PIECES, _COLD_BYTES // (4 * count)))
    exchange = Exchange(
        [bind(codec, TensorSpec(f"trial {index}", shape, workers=workers, device=device)) for index in range(pieces)]
    )
    gradients = [torch.randn(count, generator=draw, dtype=torch.float32).to(device) for _ in range(pieces)]
    results = [torch.empty_like(gradient) for gradient in gradients]
    times = []
    for _ in range(1 + _TRIES):  # the first makes the scratch memory
        times.append(exchange.run(_Alone(workers), gradients, results).times())
        exchange.commit()
    encode, decode = (statistics.median(getattr(phase, way) for phase in times[1:]) for way in ("encode", "decode"))
    return encode / pieces, decode / pieces, halves_apart([phase.encode + phase.decode for phase in times[1:]])
