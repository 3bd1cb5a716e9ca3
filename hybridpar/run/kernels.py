"""Which convolutions and norms of a run use tuned kernels, why others do not, and how much time that saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.plan import KernelChoice, Kernels, Plan
from hybridpar.planner.stage_plan import lane_threads, micro_batch_samples, shape_of
from hybridpar.sync.batchnorm import without_replicas
from hybridpar.tvm_kernels.choice import Choices, Decision, active_choices
from hybridpar.tvm_kernels.conv_norm_choice import ConvNormDecision, convolution_of, prepare_conv_norms
from hybridpar.tvm_kernels.conv_norm_measure import measure_conv_norm_saving
from hybridpar.tvm_kernels.conv_norm_records import CONV_NORM_OP, ConvNormKey
from hybridpar.tvm_kernels.cuda_device import gpu_at
from hybridpar.tvm_kernels.database import KernelKey
from hybridpar.tvm_kernels.device import cpu_fingerprint
from hybridpar.tvm_kernels.kernel import TunedKernel
from hybridpar.tvm_kernels.layers import DepthwiseLayer, NormLayer, conv_norm_shapes, tunable_layers
from hybridpar.tvm_kernels.norm_choice import NormDecision, decide_norm
from hybridpar.tvm_kernels.norm_measure import measure_norm_saving
from hybridpar.tvm_kernels.norm_records import NORM_OP, NormKey
from hybridpar.tvm_kernels.saving import measure_saving
from hybridpar.tvm_kernels.shapes import Direction, Layout

#: Reasons, and layers for each of them, that are shown at the start.
_SHOWN = 4


@dataclass(frozen=True)
class KernelUse:
    """What the depthwise convolutions and the norms of a run run on.

    Attributes:
        config: Options of the run.
        choices: What decided.
        operations: Layer, direction and decision of each operation of a training step of one micro-batch.
        norms: Layer and decision of each norm of one micro-batch.
        pairs: Layer and decision of each convolution that alone is read by a norm.
    """

    config: TrainConfig
    choices: Choices
    operations: Sequence[tuple[DepthwiseLayer, Direction, Decision]]
    norms: Sequence[tuple[NormLayer, NormDecision]] = ()
    pairs: Sequence[tuple[DepthwiseLayer, ConvNormDecision]] = ()

    @property
    def tuned(self) -> int:
        """Operations on kernels, where a norm with its activation is one."""
        convolutions = sum(decision.kernel is not None for _, _, decision in self.operations)
        return convolutions + sum(decision.fused for _, decision in self.norms)

    def notes(self) -> list[str]:
        """Lines for the start of the run."""
        if not self.operations and not self.norms:
            return ["kernels  the model has no depthwise convolution and no norm that could be tuned"]
        lines = []
        if self.operations:
            on_torch = [
                (decision.why, f"{layer.name} {direction}")
                for layer, direction, decision in self.operations
                if decision.kernel is None
            ]
            tuned = len(self.operations) - len(on_torch)
            lines.append(f"kernels  {tuned} of {len(self.operations)} depthwise operations run on tuned kernels")
            lines += _reasons(on_torch)
        if self.norms:
            on_torch = [(decision.why, layer.name) for layer, decision in self.norms if not decision.fused]
            fused = len(self.norms) - len(on_torch)
            lines.append(f"kernels  {fused} of {len(self.norms)} norms run fused with their activations")
            lines += _reasons(on_torch)
        leaving = sum(decision.kernel is not None for _, decision in self.pairs)
        if leaving:
            lines.append(f"kernels  {leaving} of {len(self.pairs)} convolutions sum up their results for norms")
        return lines

    def section(self) -> Kernels:
        """The section of the plan."""
        operations = [(layer.name, way.value, one.kernel, "stock", one.why) for layer, way, one in self.operations]
        norms = [(layer.name, NORM_OP, one.fused or None, "stock", one.why) for layer, one in self.norms]
        pairs = [(layer.name, CONV_NORM_OP, one.kernel, "apart", one.why) for layer, one in self.pairs]
        choices = tuple(
            KernelChoice(layer=name, direction=what, kernel="tuned" if kernel is not None else f"{other}: {why}")
            for name, what, kernel, other, why in (*operations, *norms, *pairs)
        )
        return Kernels(database=self.choices.database.name, choices=choices)

    def measured(self, world: World) -> dict[str, Any]:
        """The entry of the summary; a collective that times kernels against torch on all workers at once.

        Args:
            world: All workers.
        """
        often = Counter(decision.key for _, _, decision in self.operations if decision.kernel is not None)
        norms = Counter(decision.key for _, decision in self.norms if decision.fused)
        saved = measure_saving(self.choices, often) + measure_norm_saving(norms) + self._saved_together()
        saved *= self.config.micro_batches
        everyone = [float(one) for one in world.gather(saved)]  # type: ignore[arg-type]
        return {
            "tuned": self.tuned,
            "stock": len(self.operations) + len(self.norms) - self.tuned,
            "saved_ms": round(fmean(everyone), 3) if often or norms else None,
        }

    def _saved_together(self) -> float:
        """Milliseconds that convolutions and the norms behind them save besides, as the ones sum up for the others."""
        pairs = []
        for _, decision in self.pairs:
            alone = self.choices.decide(convolution_of(decision.key)).kernel
            if decision.kernel is not None and isinstance(alone, TunedKernel):
                pairs.append((decision.key.shape, decision.kernel, alone))
        return measure_conv_norm_saving(pairs)


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
    model: nn.Module, config: TrainConfig, world: World, sample_shape: Sequence[int], plan: Plan | None = None
) -> KernelUse | None:
    """Decide for all depthwise convolutions and norms of a run, and load their kernels before the first step.

    Args:
        model: The whole model, swapped.
        config: Options.
        world: The workers.
        sample_shape: Of one sample.
        plan: Of the stages, where there is one.

    Returns:
        None where kernels were not asked for.

    Raises:
        KernelError: A kernel is missing, and HYBRIDPAR_KERNELS is `strict`.
    """
    choices = active_choices()
    if not config.uses_kernels or choices is None:
        return None
    shape = shape_of(config, world.size, plan)
    samples = micro_batch_samples(config, shape.replicas)
    layout = Layout.CHANNELS_LAST if config.uses_channels_last else Layout.CONTIGUOUS
    layers: list[DepthwiseLayer] = []
    norms: list[NormLayer] = []
    if len(sample_shape) == 3:
        with without_replicas(model):  # looking must leave no trace in a step's statistics
            layers, norms = tunable_layers(model, (samples, *sample_shape), layout=layout)
    threads = lane_threads(shape, world.device)
    device = cpu_fingerprint()
    if world.device.type == "cuda":
        threads, device = 1, gpu_at(world.device.index or 0).fingerprint
    dtype = "float32" if config.amp == "none" else "bfloat16"
    operations = [
        (layer, direction, KernelKey(direction, layer.shape, layer.layout, threads, device, dtype))
        for layer in layers
        for direction in layer.needs
    ]
    decisions = choices.prepare(key for _, _, key in operations)
    for decision in decisions:
        choices.decide(decision.key)  # complains where it must
    return KernelUse(
        config,
        choices,
        [(layer, direction, decision) for (layer, direction, _), decision in zip(operations, decisions, strict=True)],
        [(norm, _decide(choices, norm, threads, device, dtype)) for norm in norms],
        _pairs(choices, layers, norms, threads, dtype) if world.device.type == "cpu" else (),
    )


def _pairs(
    choices: Choices, layers: Sequence[DepthwiseLayer], norms: Sequence[NormLayer], threads: int, dtype: str
) -> list[tuple[DepthwiseLayer, ConvNormDecision]]:
    """Convolutions that could leave their moments to norms, and whether they do."""
    if dtype != "float32":  # under autocast the operation is seen, and so only it runs
        return []
    shapes = conv_norm_shapes(layers, norms)
    keys = [ConvNormKey(shape, threads, cpu_fingerprint()) for _, shape in shapes]
    return [(layer, one) for (layer, _), one in zip(shapes, prepare_conv_norms(choices, keys), strict=True)]


def _decide(choices: Choices, norm: NormLayer, threads: int, device: str, dtype: str) -> NormDecision:
    key = NormKey(norm.shape, threads, device, norm.layout, dtype)
    if norm.layout is not Layout.CHANNELS_LAST:
        return NormDecision(key, None, "there are kernels for channels_last alone")
    if dtype != "float32":
        return NormDecision(key, None, "there are kernels for float32 alone")
    return decide_norm(choices.database, key)
