"""What a module keeps, in stages and where their forward passes run twice: as in a plain loop, or refused by name."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hybridpar import TrainConfig, Trainer
from hybridpar.errors import TraceError, UsageError


class Written(nn.Module):
    """Its output depends on how often it ran, which it counts in a buffer that it writes into."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n.add_(1)
        return x * (1 + self.n / 10)


class Assigned(Written):
    """Its buffer is another tensor after each pass, and is what backward multiplies with."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n = self.n + 1
        return x * self.n


class Scaled(nn.Module):
    """It divides by a buffer that each pass writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.lerp_(x.detach().abs().mean(0) + 0.5, 0.1)
        return x / self.scale


class Counted(nn.Module):
    """It counts in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls / 10)


class Hidden(Written):
    """It writes through `.data`, of which autograd sees nothing, into what backward multiplies with."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n.data.add_(1)
        return x * self.n


class Averaged(nn.Module):
    """It averages in a tensor that is no buffer; what it stores for others to look at depends on one pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if not bool(torch.isfinite(x.detach()).all()):
            raise FloatingPointError
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x * (1 + self.mean)


class Drawing(nn.Module):
    """It draws from a generator that the model has."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=self.generator)


class Rolling(nn.Module):
    """It draws from Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        assert bool(torch.isfinite(x.detach()).all())
        return x + random.random()


class Clamped(Scaled):
    """It writes into its weight, which the backward pass of an earlier micro-batch needs, and into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        y: Tensor = self.linear(super().forward(x))
        return y


IMAGES, LABELS = torch.randn(6, 12, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 5


def make(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(12, 16), nn.ReLU(), kind(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 5))
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plain_loop(model: nn.Module) -> nn.Module:
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        for images, labels in zip(IMAGES.chunk(3), LABELS.chunk(3), strict=True):
            (cross_entropy(model(images), labels) / 3).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def trained(model: nn.Module, *, schedule: str, recompute: tuple[int, ...] = (), norm: str = "pooled") -> nn.Module:
    options = {"schedule": schedule, "recompute": recompute, "batch_norm": norm}
    config = TrainConfig(plan="none", stages=2, micro_batches=3, **options)
    with Trainer(model, optimizer=sgd, config=config, example=IMAGES[:2]) as trainer:
        for _ in range(3):
            trainer.step((IMAGES, LABELS))
    return model


def assert_trained_alike(found: nn.Module, expected: nn.Module) -> None:
    state = found.state_dict()
    for name, value in expected.state_dict().items():
        if "running" not in name and "tracked" not in name:  # statistics are pooled over micro-batches
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", [(), (0, 1)], ids=["once", "twice"])
@pytest.mark.parametrize("kind", [Written, Hidden, Assigned, Scaled, Counted, Averaged])
def test_a_state_is_as_in_a_plain_loop(kind: type[nn.Module], recompute: tuple[int, ...], schedule: str) -> None:
    assert_trained_alike(trained(make(kind), schedule=schedule, recompute=recompute), plain_loop(make(kind)))


def test_what_is_not_put_back_is_refused_where_passes_run_twice() -> None:
    assert_trained_alike(trained(make(Drawing), schedule="1f1b"), plain_loop(make(Drawing)))
    with pytest.raises(UsageError, match=r"2 \(Drawing\), whose forward changes its attribute 'generator'"):
        trained(make(Drawing), schedule="1f1b", recompute=(0, 1))


def test_random_numbers_of_python_are_refused_where_passes_run_twice() -> None:
    trained(make(Rolling), schedule="1f1b")
    with pytest.raises(UsageError, match="--recompute 0 with a model that draws random numbers of Python"):
        trained(make(Rolling), schedule="1f1b", recompute=(0, 1))


def test_a_parameter_that_forward_writes_into_is_refused_by_its_name() -> None:
    with pytest.raises(TraceError, match=r"'2\.linear\.weight', of 2\.linear"):
        trained(make(Clamped), schedule="gpipe")
