"""Measures how fast codecs are, on all workers at the same time.

A codec is measured by a whole exchange of a few of the model's shapes, over a group that sends nothing. Noisy
measurements are repeated a few times, and are not kept where they stay noisy.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from hybridpar.comm.group import Group, Reduction, split
from hybridpar.comm.world import World
from hybridpar.compress import parse_codec
from hybridpar.compress.codec import Codec, Round, TensorSpec
from hybridpar.compress.exchange import Exchange
from hybridpar.errors import HybridparError
from hybridpar.machine.process import host_identity
from hybridpar.machine.steady import MOST_NOISE, halves_apart, repeat_until_steady
from hybridpar.partition.profile_cache import machine_key
from hybridpar.planner.profile import Parameter
from hybridpar.planner.trials import remembered

_log = logging.getLogger(__name__)

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
        part = split(inp, in_sizes)[self.rank]
        for piece in split(out, out_sizes):
            piece.copy_(part)

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        out.view(self.size, -1).copy_(inp.expand(self.size, -1))

    def send(self, tensor: Tensor, rank: int) -> None:
        """Do nothing."""

    def recv(self, tensor: Tensor, rank: int) -> None:
        """Leave the tensor as it is."""

    def close(self) -> None:
        """Do nothing."""


_Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class CodecRate:
    """How fast a codec is on this device.

    Attributes:
        tried: Numbers of elements that it was tried on, ascending, with milliseconds to write messages and to read
            them; none where it fits no layer, or cannot run here.
        noise: How far tries lay apart at most, relative.
    """

    tried: tuple[tuple[int, _Milliseconds, _Milliseconds], ...]
    noise: float = 0.0

    def __post_init__(self) -> None:
        if any(first[0] >= second[0] for first, second in pairwise(self.tried)):
            raise ValueError("numbers of elements must ascend")

    def times(self, count: int) -> tuple[float, float]:
        """Milliseconds to write and to read a parameter of so many elements.

        On the line between the two nearest that were tried. A smaller parameter than any takes as long as the smallest,
        a larger one longer in proportion; so does every parameter where a single size was tried.
        """
        most, encode, decode = self.tried[-1]
        if count >= most or len(self.tried) == 1:
            return encode * count / most, decode * count / most
        index = max(1, bisect_right(self.tried, count, key=lambda row: row[0]))
        (low, *before), (high, *after) = self.tried[index - 1 : index + 1]
        part = max(0.0, (count - low) / (high - low))
        encode, decode = (first + part * (second - first) for first, second in zip(before, after, strict=True))
        return encode, decode


RATE: TypeAdapter[CodecRate] = TypeAdapter(CodecRate)


def measure_rates(
    codecs: Sequence[str],
    parameters: Iterable[Parameter | torch.nn.Parameter],
    workers: int,
    world: World,
) -> dict[str, CodecRate]:
    """How fast codecs are, measured or remembered; those that fit no layer, or cannot run here, are left out.

    A collective.
    """
    shapes = sorted({tuple(parameter.shape) for parameter in parameters})
    messages_of = min(max(workers, 2), 8)
    beside = Counter(world.gather(host_identity())).most_common(1)[0][1]
    key = {"shapes": shapes, "beside": beside, "workers": messages_of, **machine_key(world.device)}
    rates = {}
    for text in codecs:
        measure = functools.partial(_measure_steadily, text, shapes, messages_of, world)
        rate = remembered(world, "codec", {**key, "codec": text}, RATE, measure)
        if rate.tried:
            rates[text] = rate
    return rates


def _measure_steadily(text: str, shapes: Sequence[tuple[int, ...]], workers: int, world: World) -> CodecRate:
    """The least noisy of a few measurements; a collective."""
    measure = functools.partial(_measure_together, text, shapes, workers, world)
    tries, noise = repeat_until_steady(measure, lambda tries: min(rate.noise for rate in tries), MOST_NOISE)
    if noise > MOST_NOISE and world.is_main:
        _log.warning(
            "codec %s: repeated timings differ by %.0f %%; they are used now and not kept: measure again when "
            "nothing else runs",
            text,
            100 * noise,
        )
    return min(tries, key=lambda rate: rate.noise)


def _measure_together(text: str, shapes: Sequence[tuple[int, ...]], workers: int, world: World) -> CodecRate:
    """The mean of what all workers measure at the same time; a collective."""
    world.barrier()
    try:
        local_rate = measure_codec(parse_codec(text), shapes, workers, world.device)
    except HybridparError:  # it cannot run here
        local_rate = CodecRate(())
    rates: list[CodecRate] = world.gather(local_rate)  # type: ignore[assignment]
    if not all(rate.tried for rate in rates):
        return CodecRate(())
    rows = []
    for of_size in zip(*(rate.tried for rate in rates), strict=True):
        counts, encoding, decoding = zip(*of_size, strict=True)
        rows.append((counts[0], statistics.mean(encoding), statistics.mean(decoding)))
    return CodecRate(tuple(rows), max(rate.noise for rate in rates))


@torch.no_grad()
def measure_codec(codec: Codec, shapes: Iterable[tuple[int, ...]], workers: int, device: torch.device) -> CodecRate:
    """Try a codec on a few of a model's shapes, as far as it fits them."""
    fitting = sorted({shape for shape in shapes if codec.fits(shape)}, key=math.prod)
    tried, noise = {}, 0.0
    for index in sorted({0, len(fitting) // 2, len(fitting) - 1}) if fitting else ():
        shape = _piece(codec, fitting[index])
        encode, decode, apart = _time_exchanges(codec, shape, workers, device)
        tried[math.prod(shape)] = encode, decode
        noise = max(noise, apart)
    return CodecRate(tuple((count, *times) for count, times in sorted(tried.items())), noise)


@functools.cache
def lasting_rounds(codec: Codec, shape: tuple[int, ...], workers: int) -> tuple[Round, ...]:
    """The rounds of a parameter once a warm-up is over."""
    return codec.bind(TensorSpec("trial", shape, workers=workers, device=torch.device("meta"))).rounds


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
        [codec.bind(TensorSpec(f"trial {index}", shape, workers=workers, device=device)) for index in range(pieces)]
    )
    gradients = [torch.randn(count, generator=draw, dtype=torch.float32).to(device) for _ in range(pieces)]
    results = [torch.empty_like(gradient) for gradient in gradients]
    times = []
    for _ in range(1 + _TRIES):  # the first makes the scratch memory
        times.append(exchange.run(_Alone(workers), gradients, results).times())
        exchange.commit()
    encode, decode = [phases["encode"] for phases in times[1:]], [phases["decode"] for phases in times[1:]]
    both = halves_apart([sum(pair) for pair in zip(encode, decode, strict=True)])
    return statistics.median(encode) / pieces, statistics.median(decode) / pieces, both
