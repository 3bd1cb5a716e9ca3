"""Small modules that map a tensor [N, 16] to [N, 16], among them every way in which a module can keep state.

`PIECES` has a factory of each by name. Most are a `forward` and what the module holds, from which `piece` makes a class
of that name: parts of one class would be kept whole together.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, weight_norm
from torch.nn.utils import spectral_norm as spectral_norm_by_hook
from torch.utils.checkpoint import checkpoint

WIDTH = 16

PIECES: dict[str, Callable[[], nn.Module]] = {}

#: Names of pieces by what may be refused or differs: `counts` Python values in every pass, `changes` parameters,
#: `tested` changes state in evaluation too, what is `poisoned` by a value that is not
#: finite stays so, `objects` are not put back.
TAGS: dict[str, set[str]] = {tag: set() for tag in ("counts", "changes", "tested", "poisoned", "objects")}


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 4)


def zeros(*shape: int, persistent: bool = True) -> nn.Buffer:
    return nn.Buffer(torch.zeros(shape), persistent=persistent)


def ones(*shape: int) -> nn.Buffer:
    return nn.Buffer(torch.ones(*shape))


def enter(name: str, factory: Callable[[], nn.Module], tags: str = "") -> None:
    assert name not in PIECES
    PIECES[name] = factory
    for tag in tags.split():
        TAGS[tag].add(name)


def piece(tags: str = "", **held: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a module with this forward; it holds the values given, or what they return where they are functions."""

    def made(forward: Callable[..., Any]) -> Callable[..., Any]:
        kind = type(forward.__name__, (nn.Module,), {"forward": forward, "__module__": __name__})

        def factory() -> nn.Module:
            module = kind()
            for name, value in held.items():
                value = value() if callable(value) else value
                module.register_buffer(name, None) if value is None else setattr(module, name, value)
            return module

        enter(forward.__name__, factory, tags)
        return forward

    return made


# ---------------------------------------------------------------- layers


def images(*layers: nn.Module) -> nn.Sequential:
    """Layers of images [N, 4, 2, 2]."""
    return nn.Sequential(nn.Unflatten(1, (4, 2, 2)), *layers, nn.Flatten())


def frozen(module: nn.Module, every: int = 1) -> nn.Module:
    for parameter in list(module.parameters())[::every]:
        parameter.requires_grad_(False)
    return module


def hooked(module: nn.Module, register: str, hook: Callable[..., Any]) -> nn.Module:
    getattr(module, register)(hook)
    return module


def without_mode(module: nn.Module) -> nn.Module:
    module.training = False
    return module


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "nested": lambda: nn.Sequential(nn.Sequential(linear(), nn.ReLU()), nn.Sequential(nn.Sequential(linear()))),
    "relu_in_place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True)),
    "prelu": nn.PReLU,
    "tanh": nn.Tanh,
    "dropout_of_rate_0": lambda: nn.Dropout(0.0),
    "dropout_in_evaluation": lambda: nn.Dropout(0.5).eval(),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "group_norm": lambda: nn.GroupNorm(4, WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch_norm_average": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "batch_norm_plain": lambda: nn.BatchNorm1d(WIDTH, affine=False),
    "batch_norm_untracked": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "batch_norm_frozen": lambda: frozen(nn.BatchNorm1d(WIDTH)),
    "batch_norm_in_evaluation": lambda: nn.BatchNorm1d(WIDTH).eval(),
    "batch_norm_by_flag": lambda: without_mode(nn.BatchNorm1d(WIDTH)),
    "batch_norm_of_images": lambda: images(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU()),
    "instance_norm": lambda: images(nn.InstanceNorm2d(4, affine=True)),
    "instance_norm_tracked": lambda: images(nn.InstanceNorm2d(4, track_running_stats=True)),
    "convolution": lambda: images(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "spectral_norm_by_hook": lambda: spectral_norm_by_hook(linear()),
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "weight_norm_by_hook": lambda: weight_norm(linear()),
    "frozen": lambda: frozen(linear()),
    "half_frozen": lambda: frozen(nn.Sequential(linear(), nn.ReLU(), linear()), 2),
    "hook_on_output": lambda: hooked(linear(), "register_forward_hook", lambda module, given, made: made * 1.5),
    "hook_on_input": lambda: hooked(linear(), "register_forward_pre_hook", lambda module, given: (given[0] * 0.5,)),
    "hook_on_gradient": lambda: hooked(
        linear(),
        "register_full_backward_hook",
        lambda module, given, made: [one if one is None else one * 0.5 for one in given],
    ),
}
for _name, _factory in LAYERS.items():
    enter(_name, _factory, "")


def count_calls(module: Any, *_: Any) -> None:
    module.calls = getattr(module, "calls", 0) + 1


enter("hook_that_counts", lambda: hooked(linear(), "register_forward_hook", count_calls), "counts tested")
enter("hook_that_counts_backward", lambda: hooked(linear(), "register_full_backward_hook", count_calls), "counts")


def shared_module() -> nn.Module:
    layer = linear()
    return nn.Sequential(layer, nn.Tanh(), layer)


def shared_norm() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    return nn.Sequential(norm, linear(), norm)


def tied_weights() -> nn.Module:
    layers = nn.Sequential(linear(), nn.Tanh(), linear())
    layers[2].weight = layers[0].weight
    return layers


def hook_on_parameter() -> nn.Module:
    layer = linear()
    layer.weight.register_hook(lambda gradient: gradient * 0.5)
    return layer


for _made in (shared_module, shared_norm, tied_weights, hook_on_parameter):
    enter(_made.__name__, _made)


class ExtraState(nn.Module):
    """Counts in a number that is in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def get_extra_state(self) -> Any:
        return {"passes": self.passes}

    def set_extra_state(self, state: Any) -> None:
        self.passes = state["passes"]

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return x * (1 + self.passes / 50)


enter("extra_state", ExtraState, "counts")


class AddsMean(nn.BatchNorm1d):
    """A BatchNorm with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.running_mean * 0.1


enter("batch_norm_subclass", lambda: AddsMean(WIDTH))


@piece(lin=linear, norm=lambda: nn.BatchNorm1d(WIDTH))
def norm_in_both_modes(self, x):
    training = self.norm.training
    self.norm.eval()
    x = self.norm(self.lin(x)) + self.norm.train(training)(x)
    return x


@piece(lin=linear, norm=lambda: nn.BatchNorm1d(WIDTH))
def norm_by_function(self, x):
    return self.norm(x) + functional.batch_norm(self.lin(x), self.norm.running_mean, self.norm.running_var)


@piece(lin=linear, mean=lambda: zeros(WIDTH), variance=lambda: ones(WIDTH))
def statistics_by_function(self, x):
    scaled = self.lin(x) * self.variance
    return scaled + functional.batch_norm(x, self.mean, self.variance, training=self.training)


@piece(lin=linear, scale=lambda: ones(WIDTH))
def scale_written_by_data(self, x):
    x = self.lin(x) * self.scale
    if self.training:
        self.scale.data.lerp_(x.detach().abs().mean(0), 0.1)
    return x


# ---------------------------------------------------------------- buffers


@piece("tested", n=zeros)
def buffer_written_always(self, x):
    self.n += 1
    return x * (1 + self.n / 50)


@piece("tested", n=zeros)
def buffer_assigned_always(self, x):
    self.n = self.n + x.detach().mean().abs()
    return x * (1 + self.n / 50)


@piece(n=lambda: nn.Buffer(torch.zeros((), dtype=torch.int64)))
def buffer_changes_dtype(self, x):
    if self.training:
        self.n = self.n * 0.9 + 1
    return x / (1 + self.n / 100)


@piece(seen=lambda: zeros(0))
def buffer_grows(self, x):
    if self.training:
        self.seen = torch.cat([self.seen, x.detach().mean().view(1)])
    return x + self.seen.sum() / 10


@piece(scale=None)
def buffer_none_at_first(self, x):
    if self.scale is None:
        self.scale = x.detach().abs().mean() + 1
    return x / self.scale


@piece("tested")
def buffer_registered_in_forward(self, x):
    if not hasattr(self, "scale"):
        self.register_buffer("scale", x.detach().abs().mean() + 1)
    return x / self.scale


@piece(mean=lambda: zeros(WIDTH))
def moving_mean(self, x):
    if self.training:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - self.mean


@piece(scale=lambda: ones(WIDTH))
def moving_scale(self, x):
    if self.training:
        self.scale.lerp_(x.detach().abs().mean(0), 0.1)
    return x / self.scale


@piece(table=lambda: ones(2, WIDTH), at=lambda: nn.Buffer(torch.zeros((), dtype=torch.int64)))
def table_by_index(self, x):
    if self.training:
        self.table[self.at % 2] = x.detach().abs().mean(0) + 0.5
        self.at += 1
    return x * self.table[0] / self.table[1]


@piece(mean=lambda: zeros(WIDTH))
def moving_mean_by_data(self, x):
    if self.training:
        self.mean.data = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    return x - self.mean


@piece(table=lambda: zeros(4, WIDTH))
def buffer_by_views(self, x):
    if self.training:
        self.table[1:3] += x.detach().mean(0) / 10
        self.table[0].fill_(0.5)
    return x + self.table.mean(0)


@piece(codes=lambda: nn.Buffer(torch.randn(5, WIDTH)), counts=lambda: ones(5))
def codebook(self, x):
    nearest = torch.cdist(x.detach(), self.codes).argmin(1)
    if self.training:
        chosen = functional.one_hot(nearest, 5).to(x.dtype)
        self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.codes.lerp_((chosen.T @ x.detach()) / (chosen.sum(0)[:, None] + 1), 0.1)
    return x + (self.codes[nearest] - x).detach() * 0.3


@piece(lin=linear, n=zeros)
def parent_writes_childs_buffer(self, x):
    if not hasattr(self.lin, "seen"):
        self.lin.register_buffer("seen", torch.zeros(WIDTH, dtype=x.dtype))
    if self.training:
        self.lin.seen.lerp_(x.detach().mean(0), 0.2)
    return self.lin(x - self.lin.seen)


class SharesBuffer(nn.Module):
    """Two modules with the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = PIECES["moving_mean"](), PIECES["moving_mean"]()
        self.second.mean = self.first.mean

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


enter("buffer_shared", SharesBuffer)


def buffer_shared_by_data() -> nn.Module:
    layers = nn.Sequential(PIECES["scale_written_by_data"](), nn.Tanh(), PIECES["scale_written_by_data"]())
    layers[2].scale = layers[0].scale
    return layers


def statistics_shared() -> nn.Module:
    """One layer trains, the other only reads."""
    layers = nn.Sequential(nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH).eval())
    layers[2].running_mean, layers[2].running_var = layers[0].running_mean, layers[0].running_var
    return layers


enter("buffer_shared_by_data", buffer_shared_by_data)
enter("statistics_shared", statistics_shared)


@piece(lin=linear, scale=lambda: nn.Buffer(torch.ones(1).expand(WIDTH)))
def buffer_expanded(self, x):
    return self.lin(x) * self.scale


class ViewOfBuffer(nn.Module):
    """A buffer that is a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.ones(WIDTH))
        self.first = nn.Buffer(self.scale.view(4, 4)[:, :1])

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.lerp_(x.detach().abs().mean(0), 0.1)
        return x / (self.first.mean() + 1)


enter("view_of_a_buffer", ViewOfBuffer)


# ---------------------------------------------------------------- parameters


@piece(scale=lambda: weight(WIDTH))
def layer_scale(self, x):
    return x + x * self.scale


@piece(lin=linear, unused=linear, empty=lambda: nn.Parameter(torch.zeros(0, 3)))
def parameter_unused(self, x):
    return self.lin(x)


@piece(lin=linear, rare=linear)
def parameter_used_by_value(self, x):
    return self.rare(x) if x.detach()[0, 0] > 0 else self.lin(x)


@piece("changes", lin=linear, teacher=lambda: frozen(linear()))
def mean_teacher(self, x):
    if self.training:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.lin.weight, 0.1)
    return self.lin(x) + self.teacher(x)


@piece("changes", lin=linear)
def weight_clamped(self, x):
    with torch.no_grad():
        self.lin.weight.clamp_(-0.2, 0.2)
    return self.lin(x)


# ---------------------------------------------------------------- Python values


@piece("counts tested", calls=0)
def counter_used(self, x):
    self.calls += 1
    return x * (1 + self.calls / 50)


@piece("counts tested poisoned", last=lambda: deque(maxlen=3))
def deque_of_floats(self, x):
    self.last.append(x.detach().mean().item())
    return x - sum(self.last) / 10


@piece("counts tested", seen=set)
def set_of_sizes(self, x):
    self.seen.add(len(x))
    return x * len(self.seen)


class Tally:
    def __init__(self) -> None:
        self.total = 0


@piece("counts tested objects", tally=Tally)
def object_that_counts(self, x):
    self.tally.total += 1
    return x * (1 + self.tally.total / 100)


@piece("counts tested poisoned", mean=0.0)
def tensor_as_attribute(self, x):
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
    return x - self.mean


@piece("counts tested", lin=linear, activation=0)
def activation_stored(self, x):
    self.activation = x.detach()
    return self.lin(x)


@piece("counts tested objects", generator=lambda: torch.Generator().manual_seed(3))
def noise_of_a_generator(self, x):
    return x + torch.rand(x.shape, generator=self.generator, dtype=x.dtype) / 10


@piece("counts tested objects", generator=lambda: random.Random(3))
def noise_of_python(self, x):
    return x * (1 + self.generator.random() / 10)


@piece("counts tested", first=linear, second=linear)
def activation_handed_on(self, x):
    y = self.first(x)
    self.second.activation = y
    return self.second(y.tanh()) + self.second.activation


@piece("counts tested", warm=True, mean=lambda: zeros(WIDTH))
def flag_of_first_pass(self, x):
    if self.warm:
        self.warm = False
        self.mean.copy_(x.detach().mean(0))
    return x - self.mean


# ---------------------------------------------------------------- modes and functions


@piece(lin=linear)
def mode_asked(self, x):
    return self.lin(x) * (2.0 if self.training else 0.5)


@piece(lin=linear)
def in_place_on_a_view(self, x):
    x = self.lin(x)
    x[:, :4] += 1
    x[:, 4:8].mul_(0.5)
    return x


@piece()
def in_place_on_the_input(self, x):
    return x.mul_(1.25)


@piece(lin=linear, last=linear)
def checkpointed(self, x):
    return self.last(checkpoint(lambda y: self.lin(y).tanh(), x, use_reentrant=False))


@piece(lin=linear, norm=lambda: nn.BatchNorm1d(WIDTH))
def norm_asked(self, x):
    return self.norm(self.lin(x - self.norm.running_mean)) + self.norm.num_batches_tracked * 0.01
