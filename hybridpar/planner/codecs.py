"""What gradients may be sent as, and the choice where nothing but the exchange is known.

Which layers are worth a codec is asked for several speeds of the link that do not depend on the cluster, so that
candidates are the same whatever the link is: a faster link can then only make the best of them faster. The search
decides which of these policies fits this link.

How many more training steps a codec, or an outer loop, takes to the same result comes from committed measurements; what
is not in these tables is not planned with, however fast it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.compress import Codec, Policy, parse_codec, read_policy
from hybridpar.compress.policy import exact_rules
from hybridpar.planner.inputs import PlannerInputs, check_fidelity
from hybridpar.planner.links import measure_cluster
from hybridpar.planner.network import Network, bucket_cost, stage_buckets
from hybridpar.planner.profile import Parameter
from hybridpar.planner.rates import CodecRate, lasting_rounds, measure_rates
from hybridpar.schedule.layout import Layout

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

#: What is expected at least, however good the runs were: less than few of them can tell, and a link on which an outer
#: loop gains no more than that is no reason for one.
LEAST_FACTOR = 1.05
#: A run counts as long as a row's from this part of its steps on: a run's length is known about, without short batches.
NEARLY = 0.9


@dataclass(frozen=True)
class OuterSteps:
    """How many steps to the same accuracy runs with one kind of outer loop took, over those of synchronous training.

    ResNet-18 on digits, until 97 % of the test images are right, each run over the synchronous one of the same fold and
    seed. Only what reached that in all of several runs is planned with.

    Attributes:
        every: H, steps from one exchange to the next; of the plain mean, not streamed.
        workers: How many there were.
        codec: What outer gradients were sent as.
        length: Steps of the run.
        runs: How many.
        lost: Points by which their accuracy at the end was below that of synchronous training, on average.
        mean: Steps to the target over those of synchronous training, on average.
        high: Upper end of the 95 % interval of that average.
    """

    every: int
    workers: int
    codec: str
    length: int
    runs: int
    lost: float
    mean: float
    high: float

    @property
    def factor(self) -> float:
        """Steps to the target over those of synchronous training, at the unfavourable end."""
        return max(LEAST_FACTOR, self.high)

    def __str__(self) -> str:
        side = "less" if self.lost > 0 else "more"
        return (
            f"{self.mean:.2f} (not above {self.high:.2f} with 95 % certainty) times the steps of synchronous training "
            f"to 97 %, and {abs(self.lost):.2f} points {side} at the end: {self.runs} runs of {self.length} steps, "
            f"{self.workers} workers"
        )


#: Rows of `benchmarks/outer/results/accuracy.csv`, by `python -m benchmarks.outer.accuracy --table`.
OUTER_STEPS: tuple[OuterSteps, ...] = (
    OuterSteps(every=16, workers=2, codec="none", length=230, runs=5, lost=0.611, mean=1.041, high=1.216),
    OuterSteps(every=16, workers=2, codec="onebit", length=230, runs=15, lost=0.444, mean=1.089, high=1.16),
    OuterSteps(every=40, workers=2, codec="onebit", length=460, runs=5, lost=0.335, mean=1.202, high=1.463),
)

#: The codecs of these rows, besides gradients as they are.
OUTER_CODECS = ("onebit",)


def expected_steps(workers: int, length: int | None) -> list[OuterSteps]:
    """What is expected of each outer loop that was measured with at least so many workers, in a run at most as long.

    Of several rows the one of the fewest workers counts, and of the longest run.
    """
    rows: dict[tuple[str, int], OuterSteps] = {}
    for row in sorted(OUTER_STEPS, key=lambda row: (row.workers, -row.length)):
        if row.workers >= workers and length is not None and NEARLY * row.length <= length:
            rows.setdefault((row.codec, row.every), row)
    return [rows[key] for key in sorted(rows)]


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


def choose_codecs(
    model: nn.Module, world: World, fidelity: str, bucket_bytes: int, replicas: int
) -> tuple[str, tuple[str, ...]]:
    """What gradients travel fastest as, in the syntax of `--compress`, and what to say of it; a collective.

    Nothing is known of the computation, so all of the exchange counts, as if nothing could hide it.
    """
    if why := nothing_to_choose(model, world, fidelity, replicas):
        return "none", (f"auto     none: {why}",)
    texts = FIDELITIES[fidelity]
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    parameters = tuple(Parameter(name, tuple(parameter.shape), 0) for name, parameter in trained)
    rates = measure_rates(texts, parameters, replicas, world)
    cluster = measure_cluster(world)
    level = cluster.outer
    assert level is not None

    def decide() -> tuple[str, tuple[str, ...]]:
        network = Network(cluster, Layout.dealt(world.size // replicas, world.size // replicas, replicas=replicas))
        choices = policies_of(fidelity, parameters, tuple(rates.items()), replicas, bucket_bytes)
        times = []
        for choice in choices:
            buckets = stage_buckets(parameters, bucket_bytes)
            costs = (bucket_cost(bucket, choice.codecs, network, rates) for bucket in buckets)
            times.append(sum(cost.total_ms for cost in costs))
        best = min(range(len(choices)), key=lambda index: times[index] * choices[index].steps)
        if times[best] * choices[best].steps > MARGIN * times[0]:
            best = 0
        return str(choices[best].policy), (
            f"auto     {choices[best].name} (of none, {', '.join(texts)})",
            f"auto     an exchange takes about {times[best]:,.1f} ms, with none {times[0]:,.1f} ms",
            f"auto     by {world.transport}, {level.bandwidth / 1e6:,.3g} MB/s, {level.latency_ms:.2f} ms a message",
            *(f"auto     {line}" for line in proof_lines(choices[best].codecs.values())),
        )

    return world.from_main(decide)


def nothing_to_choose(model: nn.Module, world: World, fidelity: str, replicas: int) -> str:
    """Why gradients are sent as they are, whatever a measurement would say; empty where one is needed."""
    check_fidelity(fidelity)
    if replicas == 1:
        return "there is a single replica, and its gradients go nowhere"
    if not FIDELITIES[fidelity]:
        return f"fidelity {fidelity} allows nothing else"
    if world.transport == "shared memory":
        return "in shared memory gradients are added where they lie"
    return other_types(model)


def other_types(model: nn.Module) -> str:
    """Why no codec can be used for a model whose parameters are not all float32; empty where they are."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            return f"the parameter {name!r} is {parameter.dtype}, and codecs take float32"
    return ""
