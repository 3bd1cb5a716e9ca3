"""What each parameter of a model is sent as, and what that saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hybridpar.compress import Policy, read_policy

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
