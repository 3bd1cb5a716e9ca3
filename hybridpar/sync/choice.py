"""`--compress auto`: measures the link between the workers and the codecs, chooses one, and predicts its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.compress import Policy, format_codec, parse_codec
from hybridpar.compress.auto import PLAIN, PROVEN, Layers, Prediction, candidates_of, choose, kinds_of, small_ends
from hybridpar.compress.rates import CodecRate, LinkCost, measure_codec, measure_link, meet_over
from hybridpar.sync.buckets import make_buckets


@dataclass(frozen=True)
class Choice:
    """What was measured and chosen.

    Attributes:
        policy: What gradients are sent as.
        lines: What to tell the user.
        predicted: What the sync of a step is predicted to take on rank 0; None where nothing is sent.
        backward_ms: Time of the whole model's backward pass on a micro-batch, where that was measured for the choice.
    """

    policy: Policy
    lines: tuple[str, ...]
    predicted: Prediction | None = None
    backward_ms: float | None = None


@dataclass(frozen=True)
class Part:
    """What the workers of a pipeline position train; without stages the whole model.

    Attributes:
        groups: Parameters by name, of each stage, in the order in which gradients come; each is cut into buckets alone.
        backward_ms: Time of their backward passes on the last micro-batch; None where it is not known.
        after_ms: Time for which those of other positions go on after that.
    """

    groups: Sequence[Mapping[str, nn.Parameter]]
    backward_ms: float | None = None
    after_ms: float = 0.0

    def layers(self, workers: int, bucket_bytes: int, lanes: int) -> Layers:
        """Their buckets as the first step cuts them."""
        buckets = []
        for group in self.groups:
            order = [(name, _without_memory(one)) for name, one in list(group.items())[::-1] if one.requires_grad]
            for bucket in make_buckets(order, bucket_bytes):
                buckets.append([(slot.name, tuple(slot.parameter.shape)) for slot in bucket.slots])
        return Layers(buckets, workers, lanes, self.backward_ms, self.after_ms)


def choose_policy(
    parts: Sequence[Part],
    world: World,
    *,
    fidelity: str,
    bucket_bytes: int,
    sync_lanes: int,
    job: World | None = None,
    time_backward: Callable[[], float] | None = None,
) -> Choice:
    """Measure the link between the workers and the codecs that are allowed, and choose; a collective."""
    codecs, job = candidates_of(fidelity), job or world
    if world.size == 1:
        lines = ("auto     none: there is one replica, and its gradients go nowhere",)
        return Choice(Policy.of(parse_codec("none")), lines)
    group = world.lane_groups[0]
    excuse = "" if codecs else f"fidelity {fidelity} allows nothing else"
    if codecs and any(job.gather(world.transport == "shared memory")):
        codecs, excuse = {}, "in shared memory gradients are added where they lie"
    plain_layers = [part.layers(world.size, bucket_bytes, sync_lanes) for part in parts]
    kinds = kinds_of(codecs, plain_layers)
    with world.named_errors("measuring the link"):
        mine = measure_link(kinds, meet_over(group), world.device)
    links = job.gather(mine)  # of all stages, where there are several

    def decide() -> Choice:
        link = {kind: LinkCost.slowest([one[kind] for one in links if isinstance(one, dict)]) for kind in kinds}
        took = time_backward() if codecs and time_backward is not None else None
        layers = plain_layers if took is None else [replace(one, backward_ms=took) for one in plain_layers]
        timed = all(one.backward_ms is not None for one in layers)
        shapes = {shape for part in layers for bucket in part.buckets for _, shape in bucket}
        rates: dict[str, CodecRate] = {}
        for text, codec in codecs.items():
            if (rate := measure_codec(codec, shapes, world.size, world.device)) is not None:
                rates[text] = rate
        hides = world.device.type != "cpu"
        groups = (group for part in parts for group in part.groups)
        whole = [(name, tuple(one.shape)) for group in groups for name, one in group.items() if one.requires_grad]
        policy, predicted, without = choose(layers, codecs, rates, link, hides=hides, ends=small_ends(whole))
        lines = (
            _link_line(link[PLAIN], world),
            f"auto     {_names(policy)} ({excuse or 'of none, ' + ', '.join(codecs)})",
            *_prediction_lines(policy, predicted, without, layers),
            *(("auto     backward's time is not known, so all of the sync counts",) if codecs and not timed else ()),
            *proof_lines(policy),
        )
        return Choice(policy, lines, predicted[0], took)

    return job.from_main(decide)


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"))


def _link_line(link: LinkCost, world: World) -> str:
    speed = "too fast to time"
    if link.ms_per_byte > 0:
        speed = f"{all_reduce_bytes(1_000_000, world.size) / (1e9 * link.ms_per_byte):,.3g} MB/s"
    return f"auto     link between replicas: {world.transport}, {speed}, {link.latency_ms:.2f} ms a message"


def _names(policy: Policy) -> str:
    if policy.changes_nothing:
        return "none"
    texts = sorted({format_codec(rule.codec) for rule in policy.rules})
    where = "all" if policy.rules[0].pattern == "*" else f"{len(policy.rules)}"
    return f"{', '.join(texts)} for {where} parameters"


def proof_lines(policy: Policy) -> list[str]:
    """What is known of the accuracy with codecs that lose something, where some were chosen."""
    used = {format_codec(rule.codec) for rule in policy.rules}
    rates = [rate for text, rate in PROVEN.items() if format_codec(parse_codec(text)) in used]
    if not rates:
        return []
    measured = f"its accuracy was compared at a learning rate of {min(rates):g} (momentum 0.9, 32 images a step)"
    return [f"auto     {measured}; a higher rate may cost some"]


def _prediction_lines(
    policy: Policy, predicted: Sequence[Prediction], without: Sequence[Prediction], layers: Sequence[Layers]
) -> list[str]:
    """Of the position whose sync ends last, for which all others wait."""
    last = max(range(len(layers)), key=lambda part: (without[part].exposed_ms, without[part].sync_ms))
    where = f" on position {last}" if len(layers) > 1 else ""

    def told(value: Callable[[Prediction], float]) -> str:
        text = f"{value(predicted[last]):,.1f} ms"
        return text if policy.changes_nothing else f"{text}, with none {value(without[last]):,.1f} ms"

    lines = [f"auto     sync predicted{where}: {told(lambda one: one.sync_ms)}"]
    backward = layers[last].backward_ms
    if backward is None:
        return lines
    hides = backward + layers[last].after_ms
    return [*lines, f"auto     {hides:,.1f} ms of backward hide it but for {told(lambda one: one.exposed_ms)}"]
