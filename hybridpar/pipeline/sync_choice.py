"""Why: `--compress auto` measures between the workers, decides on one of them, and says what it expects of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hybridpar.compress import Policy, TorchGroup, format_codec, parse_codec
from hybridpar.compress.auto import PLAIN, Layers, Prediction, candidates_of, choose, kinds_of
from hybridpar.compress.rates import CodecRate, Kind, LinkCost, measure_codec, measure_link, meet_over
from hybridpar.pipeline.buckets import make_buckets
from hybridpar.pipeline.collective import BackendSum
from hybridpar.pipeline.control import all_reduce_bytes
from hybridpar.pipeline.world import World


@dataclass(frozen=True)
class Choice:
    """What was measured and chosen.

    Attributes:
        policy: What gradients travel as.
        lines: What to tell the user.
        predicted: What the sync of a step is predicted to take; None where nothing travels.
    """

    policy: Policy
    lines: tuple[str, ...]
    predicted: Prediction | None = None


def choose_policy(
    parameters: Mapping[str, nn.Parameter],
    world: World,
    *,
    fidelity: str,
    bucket_bytes: int,
    sync_lanes: int | None = None,
    backward_ms: float | None = None,
    job: World | None = None,
) -> Choice:
    """Measure the link between the workers and the codecs that are allowed, and choose; a collective.

    Args:
        parameters: All parameters of the model by name, in the model's order.
        world: The workers that exchange gradients.
        fidelity: `exact`, `close` or `lossy`.
        bucket_bytes: Size at which a bucket is full.
        sync_lanes: Sync lanes; default: one for each of the world's groups.
        backward_ms: Time of the backward pass that sync can hide behind; None where it is not known.
        job: All workers, of which the first decides; default: those of `world`.

    Raises:
        UsageError: There is no such fidelity.
        SyncError: A worker died or did not answer in time.
    """
    codecs, job = candidates_of(fidelity), job or world
    if world.size == 1:
        lines = ("auto     none: there is one replica, and its gradients go nowhere",)
        return Choice(Policy.of(parse_codec("none")), lines)
    group = world.lane_sums[0]
    excuse = "" if codecs else f"fidelity {fidelity} allows nothing else"
    if not all(job.gather(isinstance(group, BackendSum))) and codecs:
        codecs, excuse = {}, "workers that share memory only add"
    layers = _layers(parameters, world.size, bucket_bytes, sync_lanes or len(world.lane_sums), backward_ms)
    kinds = kinds_of(codecs, layers)

    def add(_: Kind, message: Tensor) -> None:
        group.all_reduce(message)

    with world.named_errors("measuring the link"):
        meet = meet_over(TorchGroup(group.group)) if isinstance(group, BackendSum) else add
        mine = measure_link(kinds, meet, world.device)
    links = job.gather(mine)  # of all stages, where there are several

    def decide() -> Choice:
        link = {kind: LinkCost.slowest([one[kind] for one in links if isinstance(one, dict)]) for kind in kinds}
        shapes = {shape for bucket in layers.buckets for _, shape in bucket}
        rates: dict[str, CodecRate] = {}
        for text, codec in codecs.items():
            if (rate := measure_codec(codec, shapes, world.size, world.device)) is not None:
                rates[text] = rate
        policy, predicted, without = choose(layers, codecs, rates, link)
        return Choice(policy, _lines(policy, predicted, without, link[PLAIN], world, list(codecs), excuse), predicted)

    return job.from_main(decide)


def _layers(
    parameters: Mapping[str, nn.Parameter], workers: int, bucket_bytes: int, lanes: int, backward_ms: float | None
) -> Layers:
    """As the first step cuts them."""
    order = [(name, parameter) for name, parameter in list(parameters.items())[::-1] if parameter.requires_grad]
    buckets = [
        [(slot.name, tuple(slot.parameter.shape)) for slot in bucket.slots]
        for bucket in make_buckets([(name, _without_memory(one)) for name, one in order], bucket_bytes)
    ]
    return Layers(buckets, workers, lanes, backward_ms)


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"))


def _lines(
    policy: Policy,
    predicted: Prediction,
    without: Prediction,
    link: LinkCost,
    world: World,
    tried: Sequence[str],
    excuse: str,
) -> tuple[str, ...]:
    speed = "too fast to time"
    if link.ms_per_byte > 0:
        speed = f"{all_reduce_bytes(1_000_000, world.size) / (1e9 * link.ms_per_byte):,.3g} MB/s"
    if policy.changes_nothing:
        chosen, expected = "none", f"sync predicted {without.sync_ms:,.1f} ms a step"
    else:
        texts = sorted({format_codec(rule.codec) for rule in policy.rules})
        where = "all" if policy.rules[0].pattern == "*" else f"{len(policy.rules)}"
        chosen = f"{', '.join(texts)} for {where} parameters"
        expected = f"sync predicted {predicted.sync_ms:,.1f} ms a step, with none {without.sync_ms:,.1f} ms"
    return (
        f"auto     link between replicas: {world.transport}, {speed}, {link.latency_ms:.2f} ms a message",
        f"auto     {chosen} ({excuse or 'of none, ' + ', '.join(tried)})",
        f"auto     {expected}",
    )
