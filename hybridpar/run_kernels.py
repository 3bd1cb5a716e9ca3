"""Why: a run says which of its depthwise convolutions run on tuned kernels, why others do not, and what it gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import nn

from hybridpar.config import TrainConfig
from hybridpar.pipeline.world import World
from hybridpar.plan import KernelChoice, Kernels
from hybridpar.staging import lane_threads, shape_of
from hybridpar.tvm_kernels.choice import Choices, Decision, active_choices
from hybridpar.tvm_kernels.cuda_device import gpu_at
from hybridpar.tvm_kernels.database import KernelKey
from hybridpar.tvm_kernels.device import cpu_fingerprint
from hybridpar.tvm_kernels.layers import DepthwiseLayer, depthwise_layers
from hybridpar.tvm_kernels.saving import measure_saving
from hybridpar.tvm_kernels.shapes import Direction, Layout
from hybridpar.worker_share import micro_batch_samples

#: Reasons, and layers for each of them, that are shown at the start.
_SHOWN = 4


@dataclass(frozen=True)
class KernelUse:
    """What the depthwise convolutions of a run run on.

    Attributes:
        config: Options of the run.
        choices: What decided.
        operations: Layer, direction and decision of each operation of a training step of one micro-batch.
    """

    config: TrainConfig
    choices: Choices
    operations: Sequence[tuple[DepthwiseLayer, Direction, Decision]]

    @property
    def tuned(self) -> int:
        """Operations on tuned kernels."""
        return sum(decision.kernel is not None for _, _, decision in self.operations)

    def notes(self) -> list[str]:
        """Lines for the start of the run."""
        if not self.operations:
            return ["kernels  the model has no depthwise convolution that could be tuned"]
        lines = [f"kernels  {self.tuned} of {len(self.operations)} depthwise operations run on tuned kernels"]
        reasons: dict[str, list[str]] = {}
        for layer, direction, decision in self.operations:
            if decision.kernel is None:
                reasons.setdefault(decision.why, []).append(f"{layer.name} {direction}")
        ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
        for why, names in ordered[:_SHOWN]:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"         torch, as {why}: {', '.join(names[:_SHOWN])}{more}")
        if len(ordered) > _SHOWN:
            lines.append(f"         torch, for {len(ordered) - _SHOWN} other reasons: all are in plan.json")
        return lines

    def section(self) -> Kernels:
        """The section of the plan."""
        return Kernels(
            database=self.choices.database.name,
            choices=tuple(
                KernelChoice(
                    layer=layer.name,
                    direction=direction.value,
                    kernel="tuned" if decision.kernel is not None else f"stock: {decision.why}",
                )
                for layer, direction, decision in self.operations
            ),
        )

    def measured(self, world: World) -> dict[str, Any]:
        """The entry of the summary; a collective that times kernels against torch on all workers at once."""
        often = Counter(decision.key for _, _, decision in self.operations if decision.kernel is not None)
        saved = self.config.micro_batches * measure_saving(self.choices, often)
        everyone = [float(one) for one in world.gather(saved)]  # type: ignore[arg-type]
        return {
            "tuned": self.tuned,
            "stock": len(self.operations) - self.tuned,
            "saved_ms": round(fmean(everyone), 3) if often else None,
        }


def prepare_kernels(
    model: nn.Module, config: TrainConfig, world: World, sample_shape: Sequence[int]
) -> KernelUse | None:
    """Decide for all depthwise convolutions of a run, and load their kernels before the first step.

    Args:
        model: The whole model, swapped.
        config: Options.
        world: The workers.
        sample_shape: Of one sample.

    Returns:
        None where kernels were not asked for.

    Raises:
        KernelError: A kernel is missing, and HYBRIDPAR_KERNELS is `strict`.
    """
    choices = active_choices()
    if not config.uses_kernels or choices is None:
        return None
    shape = shape_of(config, world.size)
    samples = micro_batch_samples(config, shape.replicas)
    layout = Layout.CHANNELS_LAST if config.uses_channels_last else Layout.CONTIGUOUS
    layers = depthwise_layers(model, (samples, *sample_shape), layout=layout) if len(sample_shape) == 3 else []
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
    )
