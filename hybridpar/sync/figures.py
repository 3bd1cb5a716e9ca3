"""What each parameter is sent as, and what the sync of a step cost, added up over buckets and lanes.

Sync lanes note the cost of each bucket; it is added up when it is read, after the step. Nothing here makes the host
wait for a GPU within a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hybridpar.compress import Policy, read_policy

if TYPE_CHECKING:
    from hybridpar.compress import PhaseTimer


@dataclass(frozen=True)
class BucketCost:
    """What one bucket cost in one step.

    Attributes:
        full: Bytes that this worker would have sent in an all-reduce of float32, or of the type that the bucket has.
        sent: Bytes that it sent.
        timer: Where the time went; None where it was not measured.
    """

    full: int
    sent: int
    timer: PhaseTimer | None = None


@dataclass(frozen=True)
class SyncFigures:
    """What the sync of gradients took in one step of one worker.

    Attributes:
        bytes_before: What it would have sent in an all-reduce of the gradients as they are.
        bytes_after: What it sent.
        encode_ms: Time in which messages were written, over all lanes; None where it was not measured. So are the next.
        wire_ms: Time in which messages were sent, or waited for the other workers.
        decode_ms: Time in which they were read.
        sync_ms: Time in which any lane was at it.
        residual_norm: Norm of all that this worker has not sent yet; None in most steps.
        residual_norms: The same of each parameter.
    """

    bytes_before: int = 0
    bytes_after: int = 0
    encode_ms: float | None = None
    wire_ms: float | None = None
    decode_ms: float | None = None
    sync_ms: float | None = None
    residual_norm: float | None = None
    residual_norms: Mapping[str, float] | None = None


@dataclass
class SyncCosts:
    """What is known of the sync of one step, written by the lanes.

    Attributes:
        buckets: By the bucket's number.
        residuals: For each parameter the sum of squares of what was not sent, 0-d; empty in most steps.
        updated: Bytes of updated parameters that this worker sent, where replicas divide the optimizer's work.
    """

    buckets: dict[int, BucketCost] = field(default_factory=dict)
    residuals: dict[str, Tensor] = field(default_factory=dict)
    updated: int = 0

    @property
    def sent(self) -> int:
        """Bytes that this worker sent; known when all buckets have landed."""
        return self.updated + sum([cost.sent for cost in self.buckets.values()])


def add_up(parts: Iterable[SyncCosts]) -> SyncFigures:
    """The figures of a step from what was noted of each stage. On a GPU this waits for the end of its sync."""
    parts = list(parts)
    costs = [cost for part in parts for cost in part.buckets.values()]
    squares = {name: float(square) for part in parts for name, square in part.residuals.items()}
    timers = [cost.timer for cost in costs if cost.timer is not None]
    times = [timer.times() for timer in timers]
    return SyncFigures(
        sum(cost.full for cost in costs),
        sum(cost.sent for cost in costs),
        encode_ms=sum(time["encode"] for time in times) if times else None,
        wire_ms=sum(time["wire"] for time in times) if times else None,
        decode_ms=sum(time["decode"] for time in times) if times else None,
        sync_ms=_covered(timer.span(timers[0]) for timer in timers) if timers else None,
        residual_norm=sum(squares.values()) ** 0.5 if squares else None,
        residual_norms={name: square**0.5 for name, square in squares.items()} or None,
    )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


@dataclass(frozen=True)
class LayerBytes:
    """What one parameter is sent as.

    Attributes:
        layer: Its name.
        kind: `conv`, `depthwise`, `linear`, `norm`, `bias`, `embedding` or `other`.
        size: Its number of elements.
        codec: What it is sent as, as text.
        bytes_before: What a worker sends of it in a step as it is.
        bytes_after: What it sends as the codec.
    """

    layer: str
    kind: str
    size: int
    codec: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class WireFormat:
    """What the gradients of a model are sent as.

    Attributes:
        policy: By which rules.
        layers: Each parameter; empty where gradients are added as they are.
    """

    policy: Policy
    layers: Sequence[LayerBytes]

    @property
    def applied(self) -> Policy:
        """The rules as far as they have an effect: those of `none` where no parameter is sent as a codec."""
        return self.policy if any(row.codec != "none" for row in self.layers) else read_policy("none")


def layer_bytes(model: nn.Module, known: Mapping[str, tuple[str, int, int]]) -> list[LayerBytes]:
    """A row for each parameter that is exchanged, in the model's order."""
    return [
        LayerBytes(name, kind_of(module, name.rpartition(".")[2]), parameter.numel(), *known[name])
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(path, recurse=False)
        if name in known
    ]


def kind_of(module: nn.Module, name: str) -> str:
    """What a parameter of a module is, by the parameter's own name."""
    if isinstance(module, _NORMS):
        return "norm"
    if "bias" in name:
        return "bias"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "depthwise" if module.groups == module.in_channels > 1 else "conv"
    if isinstance(module, (nn.Linear, nn.Bilinear)) or "proj_weight" in name:
        return "linear"
    return "embedding" if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else "other"
