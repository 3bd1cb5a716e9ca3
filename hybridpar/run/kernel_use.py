"""Which convolutions and norms of a run use kernels, why others do not, and how much time that is to save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.machine.process import host_identity
from hybridpar.plan import KernelChoice, Kernels, ResolvedPlan
from hybridpar.planner.resolve import lane_threads
from hybridpar.run.part import Part, Run
from hybridpar.sync.batchnorm import without_replicas
from hybridpar.tvm_kernels.choice import Choices, Decision, active_choices, use_choices
from hybridpar.tvm_kernels.confirm import LIMIT, confirm_kernels
from hybridpar.tvm_kernels.database import default_database
from hybridpar.tvm_kernels.layers import DepthwiseLayer, NormLayer, tunable_layers
from hybridpar.tvm_kernels.machine import cpu_fingerprint, gpu_at
from hybridpar.tvm_kernels.norm_swap import why_stock
from hybridpar.tvm_kernels.operation import KernelKey
from hybridpar.tvm_kernels.shapes import Layout

#: Reasons, and layers for each of them, that are shown at the start.
_SHOWN = 4

_OPERATIONS = "depthwise operations run on tuned kernels"
_NORMS = "norms run fused with their activations"


@dataclass(frozen=True)
class KernelUse(Part):
    """What the depthwise convolutions and the norms of a run run on.

    Attributes:
        micro_batches: Of a replica and step.
        choices: What decided.
        operations: Layer and decision of each direction of each convolution in a training step of one micro-batch.
        norms: Each norm of one micro-batch, and why it runs on torch; empty where it runs on kernels.
        confirmed: A line on the kernels that were timed before that; empty where none were.
    """

    micro_batches: int
    choices: Choices
    operations: Sequence[tuple[DepthwiseLayer, Decision]]
    norms: Sequence[tuple[NormLayer, str]] = ()
    confirmed: str = ""

    @property
    def tuned(self) -> int:
        """Operations on kernels, where a norm with its activation is one."""
        convolutions = sum(decision.kernel is not None for _, decision in self.operations)
        return convolutions + sum(not why for _, why in self.norms)

    def notes(self) -> list[str]:
        """Lines for the start of the run."""
        if not self.operations and not self.norms:
            return ["kernels  the model has no depthwise convolution and no norm for which there are kernels"]
        lines = [f"kernels  {self.confirmed}"] if self.confirmed else []
        decided = [(f"{layer.name} {one.key.direction}", one.why) for layer, one in self.operations]
        for own, said in ((decided, _OPERATIONS), ([(layer.name, why) for layer, why in self.norms], _NORMS)):
            on_torch = [(why, name) for name, why in own if why]
            if own:
                lines.append(f"kernels  {len(own) - len(on_torch)} of {len(own)} {said}")
                lines += _reasons(on_torch)
        return lines

    def section(self) -> Kernels:
        """The section of the plan."""
        decided = [(layer.name, str(one.key.direction), one.why) for layer, one in self.operations]
        decided += [(layer.name, "batch_norm_act", why) for layer, why in self.norms]
        choices = [
            KernelChoice(layer=name, direction=direction, kernel=f"stock: {why}" if why else "tuned")
            for name, direction, why in decided
        ]
        return Kernels(database=self.choices.database.name, choices=tuple(choices))

    def summary(self, run: Run) -> dict[str, Any]:
        """How many operations run on kernels, and the time that their records promise to save."""
        won = [one.record.saved_ms for _, one in self.operations if one.kernel is not None and one.record is not None]
        everyone = [float(one) for one in run.world.gather(sum(won) * self.micro_batches)]  # type: ignore[arg-type]
        saved_ms = round(fmean(everyone), 3) if won else None
        stock = len(self.operations) + len(self.norms) - self.tuned
        return {"kernels": {"tuned": self.tuned, "stock": stock, "saved_ms": saved_ms}}


def _reasons(on_torch: Sequence[tuple[str, str]]) -> list[str]:
    """Lines that say why things run on torch, by reason, the most frequent first."""
    reasons: dict[str, list[str]] = {}
    for why, name in on_torch:
        reasons.setdefault(why, []).append(name)
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    lines = []
    for why, names in ordered[:_SHOWN]:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        lines.append(f"         torch, as {why}: {', '.join(names[:_SHOWN])}{more}")
    if len(ordered) > _SHOWN:
        lines.append(f"         torch, for {len(ordered) - _SHOWN} other reasons: all are in plan.json")
    return lines


def prepare_kernels(
    model: nn.Module,
    config: TrainConfig,
    plan: ResolvedPlan,
    world: World,
    sample_shape: Sequence[int],
    confirm: bool = False,
) -> KernelUse | None:
    """Decide for all depthwise convolutions and norms of a run, and load their kernels before the first step.

    A collective of all workers.
    """
    choices = active_choices()
    if plan.kernels is None or choices is None:
        return None
    samples = plan.micro_batch_samples(config.samples_per_step)
    layout = Layout.CHANNELS_LAST if plan.channels_last else Layout.CONTIGUOUS
    layers: list[DepthwiseLayer] = []
    norms: list[NormLayer] = []
    if len(sample_shape) == 3:
        with without_replicas(model):  # looking must leave no trace in a step's statistics
            layers, norms = tunable_layers(model, (samples, *sample_shape), layout=layout)
    threads = lane_threads(plan.layout, world.device)
    device = cpu_fingerprint()
    if world.device.type == "cuda":
        threads, device = 1, gpu_at(world.device.index or 0).fingerprint
    dtype = "float32" if plan.compute.amp == "none" else "bfloat16"
    where = threads, device
    operations = [
        (layer, KernelKey(direction, layer.shape, layer.layout, *where, dtype))
        for layer in layers
        for direction in layer.needs
    ]
    keys = Counter(key for _, key in operations)
    confirmed = ""
    if confirm and plan.kernels.database == "auto" and world.device.type == "cpu" and dtype == "float32":
        confirmed = _confirm(keys, choices, world)
        choices = active_choices() or choices
    choices.prepare(keys)
    return KernelUse(
        plan.pipeline.micro_batches,
        choices,
        [(layer, choices.decide(key)) for layer, key in operations],
        [(norm, why_stock(norm.shape, norm.layout, world.device, dtype)) for norm in norms],
        confirmed,
    )


def _confirm(keys: Mapping[KernelKey, int], choices: Choices, world: World) -> str:
    """Time kernels on one worker of each machine, while the others wait, and have all use the records."""
    hosts, said = world.gather(host_identity()), ""
    if hosts.index(hosts[world.rank]) == world.rank:
        said = confirm_kernels(keys, choices.database, min(LIMIT, world.timeout / 4))
    if any(world.gather(said)):
        use_choices(Choices(default_database()))
    return said
