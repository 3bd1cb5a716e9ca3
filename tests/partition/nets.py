"""Small models, each with one thing that makes splitting hard."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Residual(nn.Module):
    """BatchNorm, an in-place activation used twice, and an in-place addition."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(x))
        out += x
        return self.head(self.relu(out).mean((2, 3)))


class Shapes(nn.Module):
    """Numbers from shapes, made at the start and used to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.token = nn.Parameter(torch.randn(1, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        torch._assert(height == width, "square images")
        x = self.second(self.first(x).relu())
        x = torch.cat([self.token.expand(batch, -1, -1), x.reshape(batch, 4, height * width)], dim=2)
        return x.view(x.size(0), -1).sum(1) * (height // 2)


class _Nested(nn.Module):
    """Returns tensors in a dict with a tuple and a list inside; a leaf for the tracer that the tests use."""

    def __init__(self, ordered: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.ordered = ordered

    def forward(self, x: Tensor) -> Any:
        made = {"a": x * self.scale, "b": (x + 1, [x - 1, None]), "c": Pair(x * 2, x * 3)}
        return OrderedDict(made) if self.ordered else made


class _Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, parts: Any) -> Tensor:
        if int(parts["a"].detach().sum() * 0) != 0:  # depends on data, so the tracer must keep this module whole
            raise AssertionError
        return self.weight * (parts["a"] + parts["b"][0] * parts["b"][1][0] + parts["c"].left * parts["c"].right)


class Containers(nn.Module):
    """A nested container between two modules that cannot be traced."""

    def __init__(self, ordered: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.nested = _Opaque(_Nested(ordered))
        self.between = nn.Linear(6, 6)
        self.join = _Join()
        self.after = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        parts = self.nested(self.before(x))
        y = self.between(x)
        joined = self.join(parts)
        return {"out": self.after(joined), "aux": (parts["a"], [y])}


class _Opaque(nn.Module):
    """Keeps what it wraps out of the tracer's sight."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        if bool(torch.isnan(x.detach()).any()):
            raise AssertionError
        return self.inner(x)


class Shared(nn.Module):
    """One parameter used in two places, one module called twice, and a second name for a module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.twice = nn.Linear(6, 6)
        self.alias = self.twice
        self.norm = nn.BatchNorm1d(6)
        self.free = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.end = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.free(x * self.scale)
        x = self.alias(self.norm(self.twice(x)).tanh()) * self.scale
        return self.end(x.tanh())


class Ends(nn.Module):
    """The first and the last layer of a model, which does something between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)


class Views(Ends):
    """Changes a view in place, so that the value it is a view of changes too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh() + 1
        half = y[:, :3]
        half.mul_(2)
        return self.last(y)


class SeenChange(Ends):
    """Changes a view in place where both an earlier reader and the output use what it is a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.first(x) + 1
        before = y * 1.0
        y[:, :3].add_(2)
        return self.last(x.tanh()), self.early(before), y


class Box:
    """Not a plain container: it cannot be sent."""

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


class _Boxing(nn.Module):
    def forward(self, x: Tensor) -> Box:
        return Box(x * 2)


class _Unboxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, box: Box, x: Tensor) -> Tensor:
        if bool(torch.isnan(x.detach()).any()):
            raise AssertionError
        return box.inside * self.weight + x


class Boxed(nn.Module):
    """An object of the user's own between two modules that cannot be traced, and a number that takes work to find."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.boxing, self.unboxing = nn.Linear(6, 6), _Opaque(_Boxing()), _Unboxing()
        self.between, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        box = self.boxing(self.first(x))
        y = self.between(x)
        largest = y.detach().abs().max().item()
        return self.last(self.unboxing(box, y).tanh()) * largest


class Rebound(Ends):
    """Changes a value in place and goes on with the value's own name."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.mul_(2)
        return self.last(y)


class ChangesInput(nn.Module):
    """Changes a view of its input in place, and uses the input again."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0].mul_(2)
        return self.last(x)


class ChangesInEvaluation(Ends):
    """Changes a view in place, and only in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if not self.training:
            y[:, :3].mul_(2)
        return self.last(y)


class Dropping(nn.Module):
    """Random numbers on two branches: their order must not depend on the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.end = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.drop_left, self.drop_right = nn.Dropout(0.5), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.drop_left(self.left(x)) + self.drop_right(self.right(x).relu()))


class Modes(nn.Module):
    """Another graph in evaluation than in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux, self.head = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.body(x).relu()
        return (self.head(x), self.aux(x)) if self.training else self.head(x).softmax(1)


class ModeConstants(Ends):
    """The same graph in both modes but for the values of its constants."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * torch.tensor(0.5 if self.training else 2.0) + torch.tensor(1.0))


class Buffers(Ends):
    """A buffer that is not saved, a constant made in forward, and a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0, 1, 1]), persistent=False)
        self.register_buffer("shift", torch.ones(6))
        self.plain = torch.full((6,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.mask + self.shift * self.plain + torch.tensor([1.0, 2, 3, 4, 5, 6]))


class Branching(nn.Module):
    """Control flow that depends on data: it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.small(x) * 2
        return self.large(x)


class Defaults(nn.Module):
    """Arguments with defaults, and one that is a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None, double: bool = True) -> Tensor:
        x = self.body(x)
        if mask is not None:
            x = x * mask
        return self.head(x) * (2 if double else 1)


IMAGES = (2, 3, 8, 8)
ROWS = (5, 6)

#: Every model that can be cut anywhere, with the shape of its input.
CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "residual": (Residual, IMAGES),
    "shapes": (Shapes, IMAGES),
    "containers": (Containers, ROWS),
    "ordered": (lambda: Containers(ordered=True), ROWS),
    "shared": (Shared, ROWS),
    "views": (Views, ROWS),
    "seen change": (SeenChange, ROWS),
    "rebound": (Rebound, ROWS),
    "boxed": (Boxed, ROWS),
    "dropping": (Dropping, ROWS),
    "modes": (Modes, ROWS),
    "mode constants": (ModeConstants, ROWS),
    "buffers": (Buffers, ROWS),
    "defaults": (Defaults, ROWS),
}
