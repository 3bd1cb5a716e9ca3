"""What a bucket of gradients costs: bytes, time and core time, by codec, link and device.

Which layers are worth a codec is decided by `hybridpar.compress.auto`, as in a run; here that is asked for several
speeds of the link that do not depend on the cluster, so that candidates are the same whatever the link is: a faster
link can then only make the best of them faster. The search decides which of these policies fits this link.

How many more training steps a codec takes to the same loss comes from committed measurements; a codec that is not in
that table is not planned with, however fast it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hybridpar.compress import Codec, Policy, format_codec, parse_codec
from hybridpar.compress.auto import FIDELITIES, PLAIN, WITHOUT_ENDS, Layers, choose, kinds_of, small_ends
from hybridpar.compress.rates import CodecRate, LinkCost, lasting_rounds
from hybridpar.planner.inputs import Fidelity, PlannerInputs
from hybridpar.planner.network import Network
from hybridpar.planner.outer_steps import OuterSteps, expected_steps, planned_intervals
from hybridpar.planner.profile import Parameter
from hybridpar.sync.buckets import cut_buckets

#: Speeds of a link, in bytes per second, for which a policy is made.
RUNGS = (1e6, 1e7, 3e7, 1e8, 3e8, 1e9, 1e10)


#: Training steps until a loss is reached, over those that float32 takes. From benchmarks/sync/results/loss.csv
#: (ResNet-18 on digits, two workers, means of five seeds): the codec's loss after 100 steps against the line through
#: the losses of float32 after 50 and 100 steps, and 1 where it is the lower one. Casts count as they do for `close`:
#: their rounding is that of mixed precision. Of codecs in `WITHOUT_ENDS` it is the loss with the
#: first and the last layer in full precision.
STEPS_TO_TARGET = {
    "none": 1.0,
    "fp16": 1.0,
    "bf16": 1.0,
    "onebit:decay=0.5": 1.072,
    "qsgd_mn:bits=4": 1.0,
}


#: What progress is sent as in an outer loop, under `lossy`.
OUTER_CODECS = ("none", "onebit")


@dataclass(frozen=True)
class CodecChoice:
    """Codecs of the gradients, or of the progress of many steps in an outer loop.

    Attributes:
        name: For people.
        codecs: Texts of codecs by parameter; the gradient of a parameter that is not named is sent as it is.
        steps: Training steps to the target over those of float32.
        rank: 0 for gradients as they are, 1 for a codec for all parameters, 2 for rules by parameter.
        outer: Of an outer loop, what its `steps` rest on; None where gradients are exchanged in every step.
    """

    name: str
    codecs: Mapping[str, str]
    steps: float = 1.0
    rank: int = 0
    outer: OuterSteps | None = None

    @property
    def every(self) -> int:
        """Steps from one exchange to the next."""
        return 1 if self.outer is None else self.outer.every


@dataclass(frozen=True)
class BucketTimes:
    """What a bucket takes.

    Attributes:
        bytes: That each worker sends.
        encode_ms: Writing messages.
        wire_ms: On the link, without latency.
        latency_ms: Of its collectives.
        decode_ms: Reading messages.
        core_ms: Core time that moving messages takes; None where that was not measured.
        link_part: What part of the link they fill in `wire_ms`.
    """

    bytes: float
    encode_ms: float
    wire_ms: float
    latency_ms: float
    decode_ms: float
    core_ms: float | None = None
    link_part: float = 1.0


def steps_factor(codecs: Iterable[str]) -> float:
    """Steps to the target over those of float32; of several codecs the most."""
    return max((STEPS_TO_TARGET[text] for text in codecs), default=1.0)


def planned_codecs(fidelity: str) -> tuple[str, ...]:
    """The codecs that a fidelity allows and whose steps to a target are known, `none` not among them."""
    return tuple(text for text in FIDELITIES[fidelity] if text in STEPS_TO_TARGET)


def left_out(fidelity: str) -> tuple[str, ...]:
    """The codecs that a fidelity would allow, but for a measurement that is missing."""
    return tuple(text for text in FIDELITIES[fidelity] if text not in STEPS_TO_TARGET)


def codec_choices(inputs: PlannerInputs) -> tuple[CodecChoice, ...]:
    """All choices of codecs, `none` first: codecs for everything, policies per layer, and outer loops.

    Policies of stricter fidelities are among them, so that a looser one never has less to choose from.
    """
    rates = tuple((text, tuple(tried.items())) for text, tried in inputs.rates.items())
    parts = (inputs.profile.parameters, rates, inputs.workers, inputs.bucket_bytes, inputs.sync_lanes)
    return (*_choices(inputs.fidelity, *parts), *_outer_choices(inputs))


def _outer_choices(inputs: PlannerInputs) -> list[CodecChoice]:
    """The outer loops of which it was measured what they take to an accuracy."""
    if inputs.fidelity != "lossy" or inputs.fixed.every_step:
        return []
    names = [one.name for one in inputs.profile.parameters]
    found = []
    for codec in OUTER_CODECS:
        if codec != "none" and codec not in inputs.rates:
            continue
        for every in planned_intervals(codec):
            row = expected_steps(every, inputs.workers, codec, inputs.run_steps)
            if row is not None and every > 1:
                codecs = {} if codec == "none" else dict.fromkeys(names, codec)
                name = f"an exchange every {every} steps" + (f" as {codec}" if codecs else "")
                found.append(CodecChoice(name, codecs, row.factor, 1 if codecs else 0, row))
    return found


@lru_cache(maxsize=16)  # a scaling curve, and what would help, search many times with the same of these
def _choices(
    fidelity: Fidelity,
    parameters: tuple[Parameter, ...],
    rates: tuple[tuple[str, tuple[tuple[int, tuple[float, float]], ...]], ...],
    workers: int,
    bucket_bytes: int,
    sync_lanes: int,
) -> tuple[CodecChoice, ...]:
    found = [CodecChoice("none", {})]
    timed = {text: CodecRate(dict(tried)) for text, tried in rates}
    known = [text for text in planned_codecs(fidelity) if text in timed]
    names = [one.name for one in parameters]
    codecs = {text: parse_codec(text) for text in known}
    # A policy leaves out what is at its default.
    spelled = {format_codec(codec): text for text, codec in codecs.items()}
    buckets = [[(one.name, one.shape) for one in bucket] for bucket in stage_buckets(parameters, bucket_bytes)]
    layers = Layers(buckets, workers, sync_lanes)
    ends = small_ends([(one.name, one.shape) for one in parameters])
    for text in known:
        whole = ends if text in WITHOUT_ENDS else frozenset[str]()
        texts = {name: text for name in names if name not in whole}
        found.append(CodecChoice(text, texts, steps_factor([text]), 2 if whole else 1))
    for stricter in FIDELITIES:
        allowed = {text: codec for text, codec in codecs.items() if text in planned_codecs(stricter)}
        for policy in _policies(layers, allowed, timed, ends) if workers > 1 else ():
            texts = {name: spelled[text] for name in names if (text := policy.text_of(name)) != "none"}
            if texts and all(texts != dict(one.codecs) for one in found):
                kinds = sorted(set(texts.values()))
                label = f"{', '.join(kinds)} for {len(texts)} of {len(names)} parameters"
                found.append(CodecChoice(label, texts, steps_factor(kinds), 2))
        if stricter == fidelity:
            break
    return tuple(found)


def _policies(
    layers: Layers, codecs: Mapping[str, Codec], rates: Mapping[str, CodecRate], ends: frozenset[str]
) -> list[Policy]:
    """What layers are best sent as, for links of several speeds."""
    if not codecs:
        return []
    kinds = kinds_of(codecs, [layers])
    policies = []
    for speed in RUNGS:
        link = {kind: LinkCost(0.0, 1e3 * 2 / speed) for kind in kinds}
        policies.append(choose([layers], codecs, rates, link, ends=ends)[0])
    return policies


def stage_buckets(parameters: Sequence[Parameter], limit: int) -> list[list[Parameter]]:
    """Parameters of a stage in the buckets that its first step cuts: from the last one to the first."""
    order = list(parameters)[::-1]
    return [[order[index] for index in bucket] for bucket in cut_buckets([4 * one.count for one in order], limit)]


class BucketPrices:
    """What buckets take between the replicas of a stage."""

    def __init__(self, network: Network, rates: Mapping[str, CodecRate], throughput: float) -> None:
        self._network, self._rates, self._throughput = network, rates, throughput
        self._group = network.grouping
        self._codecs = {text: parse_codec(text) for text in rates}
        #: Who exchanges the messages of a codec: leaders of hosts, where there are hosts with several workers.
        self._peers = self._group.hosts if self._group.two_levels else self._group.workers
        self._plain = network.exchange([PLAIN])[PLAIN]

    def times(self, bucket: Sequence[Parameter], codec: CodecChoice) -> BucketTimes:
        """What a bucket takes if its layers are sent with these codecs."""
        workers, factor = self._group.workers, 2 * (self._group.workers - 1) / self._group.workers
        plain = [one for one in bucket if not self._compresses(one, codec)]
        size = 4 * sum(one.count for one in plain)
        sent, wire = factor * size, size * self._plain.ms_per_byte
        latency = self._plain.latency_ms if plain else 0.0
        encode = decode = 0.0
        core = wire * (self._network.core_use(PLAIN) or 0.0)
        collectives = set()
        share = self._group.each if self._group.two_levels else 1  # leaders take turns
        for one in bucket:
            if not self._compresses(one, codec):
                continue
            text = codec.codecs[one.name]
            rounds = lasting_rounds(self._codecs[text], one.shape, self._peers)
            kinds = [(entry.collective, entry.dtype) for entry in rounds]
            costs = self._network.between_hosts(kinds) if self._group.two_levels else self._network.exchange(kinds)
            writing, reading = self._rates[text].times(one.count)
            encode += writing / (share * self._throughput)
            decode += reading / (share * self._throughput)
            for entry, kind in zip(rounds, kinds, strict=True):
                moving = entry.bytes * costs[kind].ms_per_byte
                wire += moving
                core += moving * (self._network.core_use(kind, codec=True) or 0.0)
            sent += sum(entry.sent(self._peers) for entry in rounds) / share
            collectives |= {(index, kind, costs[kind].latency_ms) for index, kind in enumerate(kinds)}
            if self._group.two_levels:
                inside = self._network.inside_cost()
                moving = 4 * one.count * inside.ms_per_byte
                wire += moving
                core += moving * (self._network.inside_core_use() or 0.0)
                sent += 2 * 4 * one.count * 2 * (self._group.each - 1) / self._group.each
        latency += sum(ms for _, _, ms in collectives)
        if collectives and self._group.two_levels:
            latency += self._network.inside_cost().latency_ms
        known = self._network.core_use(PLAIN) is not None
        speed = self._network.bytes_per_ms
        part = 1.0 if speed is None or wire <= 0 else min(1.0, sent / speed / wire)
        return BucketTimes(sent if workers > 1 else 0.0, encode, wire, latency, decode, core if known else None, part)

    def _compresses(self, one: Parameter, codec: CodecChoice) -> bool:
        text = codec.codecs.get(one.name)
        return text is not None and self._codecs[text].fits(one.shape)
