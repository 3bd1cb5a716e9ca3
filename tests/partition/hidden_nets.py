"""Small models that do something which a graph of tensor operations does not show.

Each is a body between two linear layers. `Within` has it as a sub-module, which can be kept whole; `Itself` has the
same code in the model's own forward, where it is in the graph or the model is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Reverse(torch.autograd.Function):
    """Gradient reversal (Ganin and Lempitsky 2015, section 3.1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


class Sign(torch.autograd.Function):
    """Straight-through estimator, in the newer form with `setup_context`; returns two tensors."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sign(x), x.abs()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (ctx.saved_tensors[0].abs() < 1) + gradients[1]


reverse, sign = Reverse.apply, Sign.apply


class Body(nn.Module):
    """A linear layer, BatchNorm, and what a subclass does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Reversed(Body):
    def forward(self, x: Tensor) -> Tensor:
        return reverse(self.linear(x), 0.5)


class StraightThrough(Body):
    def forward(self, x: Tensor) -> Tensor:
        signs, sizes = sign(self.linear(x))
        return signs + sizes


class NoGrad(Body):
    """A frozen part in a block."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = self.linear(x)
            frozen = frozen.view(frozen.shape[0], -1).tanh()
        return self.norm(x) + frozen


class Decorated(Body):
    @torch.no_grad()
    def _frozen(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self._frozen(x)


class GradSwitch(Body):
    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.training):
            y = self.linear(x)
        return self.norm(x + y)


class Autocast(Body):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return self.norm(y.float())


class IsTensor(Body):
    def forward(self, x: Any) -> Tensor:
        return self.linear(x if isinstance(x, Tensor) else x[0] * 2)


class AsksIsTensor(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 if torch.is_tensor(x) else 2)


class Checkpointed(Body):
    """BatchNorm runs twice, so its statistics move twice."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inside, x, use_reentrant=False)

    def _inside(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).tanh()


class OldCheckpointed(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inside, x, use_reentrant=True)


class CheckpointedDropout(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def _inside(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.linear(x)))


class PythonRandom(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * random.random()


class LayerDrop(Body):
    """Seldom does anything else, so that two runs may well agree."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 1e-9 else self.linear(x)


class NumpyRandom(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + float(np.random.rand())


class OwnGenerator(Body):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + float(self.numbers.random())


class Counting(Body):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x) * min(1.0, self.steps / 1000)


class WarmingUp(Body):
    """A number that matters only after many steps."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x) if self.steps < 1000 else x


class Remembering(Body):
    """Uses what the forward pass before left in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.before is not None:
            y = y + self.before
        self.before = y.detach().mean(0)
        return y


class Renormed(Body):
    """Limits its weight in every forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = torch.renorm(self.linear.weight.data, 2, 0, 0.1)
        return self.linear(x)


def _double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def _scale_gradient(module: nn.Module, gradients: Any, outputs: Any) -> Any:
    return tuple(None if one is None else one * 0.5 for one in gradients)


class ForwardHook(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(_double)


class BackwardHook(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(_scale_gradient)


class Within(nn.Module):
    """A body as a sub-module, twice, as in a network of equal blocks."""

    def __init__(self, body: Callable[[], Body]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.blocks = nn.ModuleList([body(), body()])
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)


def itself(body: Callable[[], Body]) -> nn.Module:
    """A body with layers around it in the model's own forward."""
    model = body()
    inside = type(model).forward

    class Itself(type(model)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.relu(inside(self, torch.tanh(self.first(x)))))

    Itself.__name__ = type(model).__name__
    return Itself()
