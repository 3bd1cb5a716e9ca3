"""Ways of joining pieces into a model: `JOININGS` has a root module of each kind by name.

A root holds a stem, its pieces as `parts` and a head to five classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tests.state.pieces import WIDTH, linear, weight, zeros

CLASSES = 5

#: Makes a model of pieces.
JOININGS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {}


class Root(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.parts, self.head = linear(), nn.ModuleList(parts), nn.Linear(WIDTH, CLASSES)

    def body(self, x: Tensor, first: int = 0) -> Tensor:
        """What the pieces make of a tensor, one after the other."""
        for part in self.parts[first:]:
            x = part(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))


def joining(**held: Callable[[], Any]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Enter a root with this forward, which also holds what the functions return."""

    def made(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        kind = type(forward.__name__, (Root,), {"forward": forward, "__module__": __name__})

        def factory(parts: list[nn.Module]) -> nn.Module:
            model = kind(parts)
            for name, value in held.items():
                setattr(model, name, value())
            return model

        JOININGS[forward.__name__] = factory
        return forward

    return made


JOININGS["loop"] = Root
JOININGS["sequential"] = lambda parts: nn.Sequential(linear(), *parts, nn.Linear(WIDTH, CLASSES))


@joining()
def residual(self, x):
    x = self.stem(x)
    for part in self.parts:
        x = x + part(x) / 2
    return self.head(x)


@joining()
def shared(self, x):
    return self.head(self.parts[0](self.body(self.stem(x))))


@joining()
def asks_the_head(self, x):
    x = self.body(self.stem(x.to(self.head.weight.dtype) / self.head.weight.shape[0]))
    return self.head(x.type_as(self.stem.weight) * (self.stem.weight.numel() / 256))


@joining()
def tied_decoder(self, x):
    x = self.body(self.stem(x).tanh())
    return self.head(functional.linear(x, self.stem.weight.t()).tanh())


def tied_layers(parts: list[nn.Module]) -> nn.Module:
    model = JOININGS["sequential"]([*parts, nn.Tanh(), linear()])
    model[-2].weight = model[0].weight
    return model


JOININGS["tied_layers"] = tied_layers


class KeepsFirst(Root):
    """Its first piece is in evaluation mode, whatever it is asked for."""

    def train(self, mode: bool = True) -> KeepsFirst:
        super().train(mode)
        self.parts[0].eval()
        return self


JOININGS["train_overridden"] = KeepsFirst


@joining(scale=lambda: nn.ParameterList([weight(WIDTH) for _ in range(3)]), shift=lambda: zeros(WIDTH))
def parameters_of_the_root(self, x):
    x = self.stem(x)
    for part, scale in zip(self.parts, self.scale, strict=False):
        x = part(x * (1 + scale)) + self.shift
    return self.head(self.body(x, 3))


@joining(auxiliary=lambda: nn.Linear(WIDTH, CLASSES))
def mode_asked_by_the_root(self, x):
    x = self.body(self.stem(x))
    return self.head(x) + 0.1 * self.auxiliary(x) if self.training else self.head(x)


@joining(n=zeros)
def buffer_of_the_root(self, x):
    x = self.body(self.stem(x))
    if self.training:
        self.n.add_(1)
    return self.head(x * (1 + self.n / 50))


@joining(calls=lambda: 0)
def counter_of_the_root(self, x):
    self.calls += 1
    return self.head(self.body(self.stem(x)))


@joining(norm=lambda: nn.BatchNorm1d(WIDTH))
def statistics_read_early(self, x):
    return self.head(self.norm(self.body(self.stem(x) - self.norm.running_mean)))


@joining()
def attribute_read_later(self, x):
    x = self.stem(x)
    self.parts[0].activation = x
    return self.head(self.body(x) + self.parts[0].activation)


def keeps_features(parts: list[nn.Module]) -> nn.Module:
    """A hook stores what a piece returns, and forward uses it later."""
    model = JOININGS["features"](parts)
    model.stem.register_forward_hook(lambda module, given, made: model.seen.update(stem=made))
    return model


@joining(seen=dict)
def features(self, x):
    x = self.body(self.stem(x))
    return self.head(x + self.seen["stem"] if "stem" in self.seen else x)


JOININGS["features_by_hook"] = keeps_features
