"""Chooses a codec for each bucket of gradients by predicting the time of a step.

For each layer and each codec that may be used: the time of its messages on this link and of the codec on this device.
Layers are sent in buckets, and each kind of message that a bucket holds costs the latency of a collective; so a bucket
is given one codec, for those of its layers that it makes faster, or none. The prediction is that of the sync: lanes
work side by side, the link serves one after the other, and what backward hides does not count where its time is known.
With stages and without, buckets leave in the last micro-batch's backward pass, and hide behind what is left of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from hybridpar.compress.codec import Codec, Collective
from hybridpar.compress.exchange import PhaseTimes
from hybridpar.compress.policy import Policy, exact_rules, parse_codec
from hybridpar.compress.rates import CodecRate, Kind, LinkCost, lasting_rounds
from hybridpar.errors import check, nearest

#: Casts, whose rounding is that of mixed precision.
CLOSE = ("fp16", "bf16")

#: Codecs, as text, for which the table in benchmarks/sync shows that the accuracy stays: the mean difference to float32
#: is above -0.5 points, and the lower end of its 95 % interval above -1.0; and the loss after 100 steps is at most 0.05
#: above. With the learning rate at which it does, the best of a grid (32 images a step, momentum 0.9).
PROVEN = {"onebit:decay=0.5": 0.01, "qsgd_mn:bits=4": 0.005}

#: Codecs that leave the model's first and last layer as they are, where each has at most `END` of the elements: with
#: few bytes more the loss stays nearer to that of float32 (benchmarks/sync).
WITHOUT_ENDS = ("onebit:decay=0.5",)
END = 1 / 500

#: What may be chosen from. `exact` allows no codec.
FIDELITIES: dict[str, tuple[str, ...]] = {"exact": (), "close": CLOSE, "lossy": (*CLOSE, *PROVEN)}

#: A codec is chosen where the prediction is at most this part of that without: less is within the measurements' noise.
_MARGIN = 0.9

#: A parameter's name, and its codec.
_Rule = tuple[str, str]

#: Gradients without a codec.
PLAIN: Kind = (Collective.SUM, torch.float32)


def candidates_of(fidelity: str) -> dict[str, Codec]:
    """The codecs that a fidelity allows besides `none`, by their text."""
    check(fidelity in FIDELITIES, f"unknown fidelity {fidelity!r}", fix=nearest(fidelity, FIDELITIES))
    return {text: parse_codec(text) for text in FIDELITIES[fidelity]}


@dataclass(frozen=True)
class Prediction:
    """What the sync of a step is predicted to take on a worker.

    Attributes:
        sync_ms: Time in which any lane is at it.
        exposed_ms: Time by which it outlasts backward; all of it where backward's time is not known.
    """

    sync_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class Layers:
    """What a worker exchanges: parameters in the order in which their gradients come, cut into buckets.

    Without stages that is the whole model, and equal on all workers; in a pipeline each position has its own.

    Attributes:
        buckets: Names and shapes.
        workers: How many workers exchange them.
        lanes: Sync lanes.
        backward_ms: Time of the last micro-batch's backward pass here, in which buckets leave; None where it is not
            known.
        after_ms: Time for which others' backward passes go on after that, as those of the stages before do.
    """

    buckets: Sequence[Sequence[tuple[str, tuple[int, ...]]]]
    workers: int
    lanes: int = 1
    backward_ms: float | None = None
    after_ms: float = 0.0


def small_ends(layers: Sequence[tuple[str, tuple[int, ...]]]) -> frozenset[str]:
    """The first and the last layer of a model, as far as they have at most `END` of its elements."""
    counts = [(name, math.prod(shape)) for name, shape in layers if len(shape) > 1]
    most = END * sum(count for _, count in counts)
    return frozenset(name for name, count in (*counts[:1], *counts[-1:]) if count <= most)


def kinds_of(codecs: Mapping[str, Codec], parts: Sequence[Layers]) -> list[Kind]:
    """How the messages of codecs are reduced, and those of gradients without one; equal on all workers."""
    kinds = {PLAIN: None}
    shapes = {shape for part in parts for bucket in part.buckets for _, shape in bucket}
    for codec in codecs.values():
        fitting = sorted((shape for shape in shapes if codec.fits(shape)), key=math.prod)
        for entry in lasting_rounds(codec, fitting[0], parts[0].workers) if fitting else ():
            kinds[entry.collective, entry.dtype] = None
    return list(kinds)


def choose(
    parts: Sequence[Layers],
    codecs: Mapping[str, Codec],
    rates: Mapping[str, CodecRate],
    link: Mapping[Kind, LinkCost],
    *,
    hides: bool = True,
    ends: Collection[str] = (),
) -> tuple[Policy, list[Prediction], list[Prediction]]:
    """The policy with which a step is predicted to be fastest: all wait for the worker whose sync ends last."""
    plain = [[_plain_times(bucket, link) for bucket in part.buckets] for part in parts]
    best, rules = [list(times) for times in plain], [[list[_Rule]() for _ in part.buckets] for part in parts]
    for number, index in _places(parts):
        bucket, without = parts[number].buckets[index], plain[number][index]
        for text, codec in codecs.items():
            if text in rates:
                whole = ends if text in WITHOUT_ENDS else ()
                times, names = _times(bucket, codec, rates[text], link, parts[number].workers, whole)
                if names and times.total < min(best[number][index].total, _MARGIN * without.total):
                    best[number][index], rules[number][index] = times, [(name, text) for name in names]
    if hides:
        _spare_hidden(best, rules, plain, parts)
    none, mixed = _predict_all(plain, parts), _predict_all(best, parts)
    chosen = [rule for part in rules for bucket in part for rule in bucket]
    if not chosen or _exposed(mixed) > _MARGIN * _exposed(none):
        return Policy.of(parse_codec("none")), none, none
    layers = sum(len(bucket) for part in parts for bucket in part.buckets)
    if len(chosen) == layers and len({text for _, text in chosen}) == 1:
        return Policy.of(parse_codec(chosen[0][1])), mixed, none
    return exact_rules(chosen), mixed, none


def _places(parts: Sequence[Layers]) -> list[tuple[int, int]]:
    """Part and bucket, for every bucket."""
    return [(number, index) for number, part in enumerate(parts) for index in range(len(part.buckets))]


def _spare_hidden(
    best: list[list[PhaseTimes]],
    rules: list[list[list[_Rule]]],
    plain: Sequence[Sequence[PhaseTimes]],
    parts: Sequence[Layers],
) -> None:
    """Leave buckets uncompressed where that makes the step no longer."""
    least = _exposed(_predict_all(best, parts))
    for number, index in _places(parts):
        if rules[number][index]:
            trial = list(best[number])
            trial[index] = plain[number][index]
            if predict(trial, parts[number]).exposed_ms <= least:
                best[number], rules[number][index] = trial, []


def _predict_all(times: Sequence[Sequence[PhaseTimes]], parts: Sequence[Layers]) -> list[Prediction]:
    return [predict(buckets, part) for buckets, part in zip(times, parts, strict=True)]


def _exposed(predictions: Sequence[Prediction]) -> float:
    return max(one.exposed_ms for one in predictions)


def predict(buckets: Sequence[PhaseTimes], layers: Layers) -> Prediction:
    """What buckets take together: lanes work side by side, and the link serves one message after the other."""
    sizes = [sum(math.prod(shape) for _, shape in bucket) for bucket in layers.buckets]
    ready, gathered = 0.0, 0
    free = [0.0] * layers.lanes
    link_free, end, busy = 0.0, 0.0, 0.0
    for index, times in enumerate(buckets):
        gathered += sizes[index]
        if layers.backward_ms is not None:
            # Gradients come as fast as there are parameters: no better is known of single layers.
            ready = layers.backward_ms * gathered / max(1, sum(sizes))
        lane = index % layers.lanes
        start = max(free[lane], ready)
        link_free = max(start + times.encode, link_free) + times.wire
        free[lane] = link_free + times.decode
        busy += max(0.0, free[lane] - max(start, end))
        end = max(end, free[lane])
    hidden = 0.0 if layers.backward_ms is None else layers.backward_ms + layers.after_ms
    return Prediction(busy, max(0.0, end - hidden))


def _plain_times(bucket: Sequence[tuple[str, tuple[int, ...]]], link: Mapping[Kind, LinkCost]) -> PhaseTimes:
    size = sum(4 * math.prod(shape) for _, shape in bucket)
    return PhaseTimes(0.0, link[PLAIN].ms(size), 0.0)


def _times(
    bucket: Sequence[tuple[str, tuple[int, ...]]],
    codec: Codec,
    rate: CodecRate,
    link: Mapping[Kind, LinkCost],
    workers: int,
    whole: Collection[str],
) -> tuple[PhaseTimes, list[str]]:
    """What a bucket takes if a codec is used for those layers that it makes faster, but `whole` ones; and which."""
    encode = wire = decode = 0.0
    names, collectives = [], set[tuple[int, Kind]]()
    for name, shape in bucket:
        count = math.prod(shape)
        plain = 4 * count * link[PLAIN].ms_per_byte
        if name not in whole and codec.fits(shape):
            writing, reading = rate.times(count)
            rounds = lasting_rounds(codec, shape, workers)
            moving = sum(entry.bytes * link[entry.collective, entry.dtype].ms_per_byte for entry in rounds)
            if writing + moving + reading < plain:
                encode, wire, decode = encode + writing, wire + moving, decode + reading
                collectives |= {(index, (entry.collective, entry.dtype)) for index, entry in enumerate(rounds)}
                names.append(name)
                continue
        wire += plain
        collectives.add((0, PLAIN))
    wire += sum(link[kind].latency_ms for _, kind in collectives)
    return PhaseTimes(encode, wire, decode), names
