"""What a bucket of gradients costs: bytes and time, by codec, link and device; and what may be chosen.

Which layers are worth a codec is asked for several speeds of the link that do not depend on the cluster, so that
candidates are the same whatever the link is: a faster link can then only make the best of them faster. The search
decides which of these policies fits this link.

How many more training steps a codec takes to the same loss comes from committed measurements; a codec that is not in
that table is not planned with, however fast it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from hybridpar.compress import Codec, Policy, parse_codec, read_policy
from hybridpar.compress.policy import exact_rules
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.network import LinkCost, Network
from hybridpar.planner.outer_steps import OuterSteps, expected_steps
from hybridpar.planner.profile import Parameter
from hybridpar.planner.rates import CodecRate, lasting_rounds
from hybridpar.schedule.costs import BucketCost
from hybridpar.sync.buckets import cut_buckets

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

#: Speeds of a link, in bytes per second, for which a policy is made.
RUNGS = (1e6, 1e7, 3e7, 1e8, 3e8, 1e9, 1e10)

#: A codec is worth it where that takes at most this part of the time without: less is within the measurements' noise.
MARGIN = 0.9

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


@dataclass(frozen=True)
class CodecChoice:
    """Codecs of the gradients, or of the progress of many steps in an outer loop.

    Attributes:
        name: For people.
        codecs: Texts of codecs by parameter; the gradient of a parameter that is not named is sent as it is.
        steps: Training steps to the target over those of float32.
        alike: Whether it is the same for all parameters; else there are rules by parameter.
        outer: Of an outer loop, what its `steps` rest on; None where gradients are exchanged in every step.
        order: Its number among the choices of a search: 0 for gradients as they are.
    """

    name: str
    codecs: Mapping[str, str] = field(hash=False)
    steps: float = 1.0
    alike: bool = True
    outer: OuterSteps | None = None
    order: int = 0

    @property
    def every(self) -> int:
        """Steps from one exchange to the next."""
        return 1 if self.outer is None else self.outer.every

    @property
    def policy(self) -> Policy:
        """The rules; a codec for all parameters is a rule alone."""
        if self.alike:
            return read_policy(next(iter(self.codecs.values()), "none"))
        return exact_rules(self.codecs.items())


#: Gradients as they are.
PLAIN = CodecChoice("none", {})


def proof_lines(codecs: Iterable[str]) -> list[str]:
    """What is known of the accuracy with codecs that lose something, where some were chosen."""
    rates = [PROVEN[text] for text in codecs if text in PROVEN]
    if not rates:
        return []
    measured = f"its accuracy was compared at a learning rate of {min(rates):g} (momentum 0.9, 32 images a step)"
    return [f"{measured}; a higher rate may cost some"]


def codec_choices(inputs: PlannerInputs) -> tuple[CodecChoice, ...]:
    """All choices of codecs, `none` first: codecs for everything, policies per layer, and outer loops.

    Policies of stricter fidelities are among them, so that a looser one never has less to choose from. Where codecs
    were decided on, these are the only ones, and `none` for where there is nothing to exchange.
    """
    parameters, rates, codecs = inputs.profile.parameters, tuple(inputs.rates.items()), inputs.fixed.codecs
    if codecs is None:
        choices = [*policies_of(inputs.fidelity, parameters, rates, inputs.workers, inputs.bucket_bytes)]
        if inputs.fidelity == "lossy" and not inputs.fixed.every_step:
            choices += _outer_choices(inputs)
    else:
        choices = [PLAIN]
        if codecs:
            alike = len(set(codecs.values())) == 1 and len(codecs) == len(parameters)
            choices.append(CodecChoice(_name_of(codecs, len(parameters), alike), codecs, alike=alike))
    return tuple(replace(choice, order=order) for order, choice in enumerate(choices))


def _name_of(codecs: Mapping[str, str], parameters: int, alike: bool = False) -> str:
    kinds = ", ".join(sorted(set(codecs.values())))
    return kinds if alike else f"{kinds} for {len(codecs)} of {parameters} parameters"


def _outer_choices(inputs: PlannerInputs) -> list[CodecChoice]:
    """The outer loops of which it was measured what they take to an accuracy."""
    choices = []
    for row in expected_steps(inputs.workers, inputs.run_steps):
        name = f"an exchange every {row.every} steps"
        if row.codec == "none":
            choices.append(CodecChoice(name, {}, row.factor, outer=row))
        elif row.codec in inputs.rates:
            codecs = {parameter.name: row.codec for parameter in inputs.profile.parameters}
            choices.append(CodecChoice(f"{name} as {row.codec}", codecs, row.factor, outer=row))
    return choices


@lru_cache(maxsize=16)  # a batch is chosen by many spaces with the same of these
def policies_of(
    fidelity: str,
    parameters: tuple[Parameter, ...],
    rates: tuple[tuple[str, CodecRate], ...],
    workers: int,
    bucket_bytes: int,
) -> tuple[CodecChoice, ...]:
    """All choices of codecs for the gradients of every step, `none` first."""
    timed = dict(rates)
    buckets, ends = stage_buckets(parameters, bucket_bytes), small_ends(parameters)
    choices = [PLAIN]
    for text in FIDELITIES[fidelity]:
        if text in timed:
            left = ends if text in WITHOUT_ENDS else frozenset[str]()
            texts = {layer.name: text for layer in parameters if layer.name not in left}
            choices.append(CodecChoice(text, texts, STEPS_TO_TARGET[text], alike=not left))
    for stricter in FIDELITIES:
        allowed = {text: timed[text] for text in FIDELITIES[stricter] if text in timed}
        for speed in RUNGS if allowed and workers > 1 else ():
            texts = fastest_codecs(buckets, allowed, workers, 2e3 / speed, ends)
            if texts and all(texts != dict(choice.codecs) for choice in choices):
                steps = max(STEPS_TO_TARGET[text] for text in texts.values())
                choices.append(CodecChoice(_name_of(texts, len(parameters)), texts, steps, alike=False))
        if stricter == fidelity:
            break
    return tuple(choices)


def small_ends(parameters: Sequence[Parameter]) -> frozenset[str]:
    """The first and the last layer of a model, as far as they have at most `END` of its elements."""
    layers = [layer for layer in parameters if len(layer.shape) > 1]
    most = END * sum(layer.count for layer in layers)
    return frozenset(layer.name for layer in (*layers[:1], *layers[-1:]) if layer.count <= most)


def fastest_codecs(
    buckets: Iterable[Sequence[Parameter]],
    rates: Mapping[str, CodecRate],
    workers: int,
    ms_per_byte: float,
    ends: Collection[str] = (),
) -> dict[str, str]:
    """What layers are best sent as where a link has this speed and no latency: by name, without those left as they are.

    Each kind of message that a bucket holds is another collective, so a bucket has one codec, for those of its
    layers that it makes faster.
    """
    texts: dict[str, str] = {}
    for bucket in buckets:
        plain = {layer.name: 4 * layer.count * ms_per_byte for layer in bucket}
        total = sum(plain.values())
        best, fastest = MARGIN * total, dict[str, str]()
        for text, rate in rates.items():
            codec, left = parse_codec(text), ends if text in WITHOUT_ENDS else ()
            fitting = [layer for layer in bucket if layer.name not in left and codec.fits(layer.shape)]
            coded = {layer.name: _coded_ms(layer, codec, rate, workers, ms_per_byte) for layer in fitting}
            gains = {name: plain[name] - time for name, time in coded.items() if time < plain[name]}
            if gains and total - sum(gains.values()) < best:
                best, fastest = total - sum(gains.values()), dict.fromkeys(gains, text)
        texts |= fastest
    return texts


def _coded_ms(layer: Parameter, codec: Codec, rate: CodecRate, workers: int, ms_per_byte: float) -> float:
    moving = sum(entry.bytes for entry in lasting_rounds(codec, layer.shape, workers))
    return sum(rate.times(layer.count)) + moving * ms_per_byte


def stage_buckets(parameters: Sequence[Parameter], limit: int) -> list[list[Parameter]]:
    """Parameters of a stage in the buckets that its first step cuts: from the last one to the first."""
    order = list(parameters)[::-1]
    return [
        [order[index] for index in bucket]
        for bucket in cut_buckets([4 * parameter.count for parameter in order], limit)
    ]


def bucket_cost(
    bucket: Sequence[Parameter],
    choice: CodecChoice,
    network: Network,
    rates: Mapping[str, CodecRate],
    *,
    throughput: float = 1.0,
    ready: float = 1.0,
) -> BucketCost:
    """What a bucket takes between the replicas of a stage, whose devices are so many times as fast as the profile's.

    Where there are hosts with several workers, codecs work between hosts: a sum in each host goes before, and one that
    hands the result out comes after. Leaders of hosts take turns.
    """
    group = network.grouping
    factor = 2 * (group.workers - 1) / group.workers
    peers, share = (group.hosts, group.each) if group.two_levels else (group.workers, 1)
    inside = network.inside_hosts() if group.two_levels else LinkCost(0.0, 0.0)
    plain = network.exchange()
    sent = wire = encode = decode = 0.0
    rounds = set[tuple[object, float]]()
    for parameter in bucket:
        size, text = 4 * parameter.count, choice.codecs.get(parameter.name)
        if text is None or not _parsed(text).fits(parameter.shape):
            rounds.add(("plain", plain.latency_ms))
            wire += size * plain.ms_per_byte
            sent += factor * size
            continue
        writing, reading = rates[text].times(parameter.count)
        encode += writing / (share * throughput)
        decode += reading / (share * throughput)
        for index, message in enumerate(lasting_rounds(_parsed(text), parameter.shape, peers)):
            price = network.between_hosts if group.two_levels else network.exchange
            cost = price(message.collective)
            wire += message.bytes * cost.ms_per_byte
            sent += message.sent(peers) / share
            rounds.add(((index, message.collective, message.dtype), cost.latency_ms))
        if group.two_levels:
            rounds.add(("inside", 2 * inside.latency_ms))
            wire += 2 * size * inside.ms_per_byte
            sent += 2 * size * 2 * (group.each - 1) / group.each
    return BucketCost(round(sent / factor), ready, encode, decode, wire, sum(latency for _, latency in rounds))


_parsed = cache(parse_codec)
