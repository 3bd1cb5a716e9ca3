"""Generates random models, for combinations of layers that no test names."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 4


class Two(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Step:
    """One step of a random model: what it does, and which earlier values it takes."""

    kind: str
    left: int
    right: int


class _Pack(nn.Module):
    """Returns a nested container; looking at its data keeps it out of the tracer's sight."""

    def __init__(self, nesting: str) -> None:
        super().__init__()
        self.nesting = nesting
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, left: Tensor, right: Tensor) -> Any:
        if bool(torch.isnan(left.detach()).any()):
            raise FloatingPointError
        scaled = left * self.scale
        if self.nesting == "tuple":
            return scaled, (right + 1, [left * right, None])
        if self.nesting == "dict":
            return {"a": scaled, "b": Two(right + 1, left * right)}
        return OrderedDict([("a", [scaled, (right + 1,)]), ("b", {"c": left * right})])


def _tensors(parts: Any) -> list[Tensor]:
    if isinstance(parts, Tensor):
        return [parts]
    items = parts.values() if isinstance(parts, dict) else parts or ()
    return [tensor for item in items for tensor in _tensors(item)]


class _Unpack(nn.Module):
    """Takes a container whole, so that the container itself is what crosses a border."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, parts: Any, other: Tensor) -> Tensor:
        if bool(torch.isnan(other.detach()).any()):
            raise FloatingPointError
        first, *rest = _tensors(parts)
        for tensor in rest:
            first = first + self.weight * tensor
        return first * other.tanh()


class RandomNet(nn.Module):
    """Values of one shape, each made from two earlier ones; all values that nobody uses are returned, nested.

    Args:
        steps: What makes the values, in order; value 0 is the input.
    """

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.common = nn.Linear(WIDTH, WIDTH)
        makers = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "norm": lambda: nn.BatchNorm1d(WIDTH),
            "dropout": lambda: nn.Dropout(0.3),
            "relu": lambda: nn.ReLU(inplace=True),
        }
        self.layers = nn.ModuleList()
        for step in steps:
            if step.kind in makers:
                self.layers.append(makers[step.kind]())
            elif step.kind in ("tuple", "dict", "nested"):
                self.layers.append(nn.ModuleList([_Pack(step.kind), _Unpack(), _Unpack()]))
            else:
                self.layers.append(nn.Identity())

    def __repr__(self) -> str:
        return f"RandomNet({self.steps})"

    def forward(self, x: Tensor) -> Any:
        values, used = [x], set()
        for step, layer in zip(self.steps, self.layers, strict=True):
            left, right = values[step.left], values[step.right]
            used |= {step.left, step.right}
            if step.kind in ("tuple", "dict", "nested"):
                parts = layer[0](left, right)
                made = layer[1](parts, left) + layer[2](parts, right)
            elif step.kind == "shared":
                made = self.common(left) * right
            elif step.kind == "relu":
                made = layer(left + right)
            elif step.kind == "in place":
                made = left * 1.5
                made += right
            elif step.kind == "change":  # everybody who takes `left` later sees it
                made = left.mul_(2) if step.left else left + 1
            elif step.kind == "view":
                made = left + right
                made[:, :2].add_(1)
            elif step.kind == "change a view":
                made = left + right
                left[:, 1:].add_(0.5) if step.left else None
            elif step.kind == "chunk":
                first, second = left.chunk(2, dim=1)
                made = torch.cat([second * right[:, :2], first], dim=1)
            elif step.kind == "max":
                made = torch.max(left, dim=1).values.unsqueeze(1) * right
            elif step.kind == "shape":
                made = left.reshape(left.size(0), -1) * (right.shape[1] // 2)
            else:
                made = layer(left) + right
            values.append(made)
        loose = [value for index, value in enumerate(values) if index not in used]
        return {"out": loose[-1], "others": (loose[:-1], values[len(values) // 2])}


KINDS = (
    "linear", "norm", "dropout", "relu", "shared", "in place", "change", "view", "change a view", "chunk", "max",
    "shape", "tuple", "dict", "nested",
)  # fmt: skip


@st.composite
def random_nets(draw: st.DrawFn, most: int = 8) -> RandomNet:
    """A random model in float64, where only a wrong gradient differs by more than 1e-5."""
    steps = []
    for index in range(draw(st.integers(1, most))):
        earlier = st.integers(0, index)
        steps.append(Step(draw(st.sampled_from(KINDS)), draw(earlier), draw(earlier)))
    torch.manual_seed(draw(st.integers(0, 99)))
    return RandomNet(steps).double()
