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
from hybridpar.planner.resolve import DTYPES, lane_threads
from hybridpar.run.part import Part, Run
from hybridpar.sync.batchnorm import without_replicas
from hybridpar.tvm_kernels.choice import Choices, active_choices, use_choices
from hybridpar.tvm_kernels.confirm import LIMIT, confirm_kernels
from hybridpar.tvm_kernels.database import default_database
from hybridpar.tvm_kernels.layers import tunable_layers
from hybridpar.tvm_kernels.machine import cpu_fingerprint, gpu_at
from hybridpar.tvm_kernels.norm_swap import why_stock
from hybridpar.tvm_kernels.shapes import KernelKey, Layout

#: What a plan says of an operation that runs on a kernel.
_TUNED = "tuned"


@dataclass(frozen=True)
class KernelUse(Part):
    """What the depthwise convolutions and the norms of a run run on.

    Attributes:
        section: The same as a section of the plan, with all of them.
        saved_ms: What the records of this worker's kernels promise to save in a step; None where it uses none.
        confirmed: A line on the kernels that were timed before that; empty where none were.
    """

    section: Kernels
    saved_ms: float | None
    confirmed: str = ""

    def notes(self) -> list[str]:
        """Lines for the start of the run."""
        if not self.section.choices:
            return ["kernels  the model has no depthwise convolution and no norm for which there are kernels"]
        lines = [f"kernels  {self.confirmed}"] if self.confirmed else []
        by_kernel = Counter(choice.kernel for choice in self.section.choices)
        tuned = f"{by_kernel.pop(_TUNED, 0)} of {len(self.section.choices)}"
        lines.append(f"kernels  {tuned} operations of convolutions and norms run on kernels of their own")
        stock = [f"{count} on torch, as {kernel.removeprefix('stock: ')}" for kernel, count in by_kernel.items()]
        return [*lines, *(f"         {line}" for line in stock)]

    def summary(self, run: Run) -> dict[str, Any]:
        """How many operations run on kernels, and the time that their records promise to save."""
        saved: list[Any] = run.world.gather(self.saved_ms or 0.0)
        saved_ms = None if self.saved_ms is None else round(fmean(saved), 3)
        tuned = sum(choice.kernel == _TUNED for choice in self.section.choices)
        return {"kernels": {"tuned": tuned, "stock": len(self.section.choices) - tuned, "saved_ms": saved_ms}}


def open_kernels(run: Run) -> list[KernelUse]:
    """Decide which kernels a run uses, and note that in its plan; a collective."""
    # A run that is resumed goes on with the same kernels, bit for bit.
    confirm, shape = run.folder.checkpoint is None, run.samples.images.sample_shape
    use = prepare_kernels(run.trainer.model, run.config, run.plan, run.world, shape, confirm)
    if use is None:
        return []
    run.plan = run.plan.model_copy(update={"kernels": use.section})
    run.notes += use.notes()
    return [use]


def prepare_kernels(
    model: nn.Module, config: TrainConfig, plan: ResolvedPlan, world: World, shape: Sequence[int], confirm: bool = False
) -> KernelUse | None:
    """Decide for all depthwise convolutions and norms of a run, and load their kernels before the first step.

    A collective of all workers.
    """
    choices = active_choices()
    if plan.kernels is None or choices is None:
        return None
    samples = plan.micro_batch_samples(config.samples_per_step)
    layout = Layout.CHANNELS_LAST if plan.channels_last else Layout.CONTIGUOUS
    with without_replicas(model):  # looking must leave no trace in a step's statistics
        layers, norms = tunable_layers(model, (samples, *shape), layout=layout)
    dtype = DTYPES[plan.compute.amp]
    where = lane_threads(plan.layout, world.device), cpu_fingerprint()
    if world.device.type == "cuda":
        where = 1, gpu_at(world.device.index or 0).fingerprint
    keys = [
        (layer.name, KernelKey(direction, layer.shape, layer.layout, *where, dtype))
        for layer in layers
        for direction in layer.needs
    ]
    counts, confirmed = Counter(key for _, key in keys), ""
    if confirm and plan.kernels.database == "auto" and world.device.type == "cpu":
        confirmed = _confirm(counts, choices, world)
        choices = active_choices() or choices
    choices.prepare(counts)
    decisions = [choices.decide(key) for _, key in keys]
    why = [(name, str(key.direction), decision.why) for (name, key), decision in zip(keys, decisions, strict=True)]
    for norm in norms:
        why.append((norm.name, "batch_norm_act", why_stock(norm.shape, norm.layout, world.device, dtype)))
    operations = [
        KernelChoice(layer=layer, direction=direction, kernel=f"stock: {reason}" if reason else _TUNED)
        for layer, direction, reason in why
    ]
    records = [decision.record for decision in decisions if decision.kernel is not None]
    saved = sum(record.saved_ms for record in records if record is not None) * plan.pipeline.micro_batches
    section = Kernels(database=choices.database.name, choices=tuple(operations))
    return KernelUse(section, saved if records else None, confirmed)


def _confirm(keys: Mapping[KernelKey, int], choices: Choices, world: World) -> str:
    """Time kernels on one worker of each machine, while the others wait, and have all use the records."""
    hosts, said = world.gather(host_identity()), ""
    if hosts.index(hosts[world.rank]) == world.rank:
        said = confirm_kernels(keys, choices.database, min(LIMIT, world.timeout / 4))
    if any(world.gather(said)):
        use_choices(Choices(default_database()))
    return said
