"""What a module keeps, in stages and where their forward passes run twice: as in a plain loop, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hybridpar import TrainConfig, Trainer
from hybridpar.errors import UsageError


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


class Counted(nn.Module):
    """It counts in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls / 10)


class Normed(nn.Module):
    """Its weight is divided by a norm that buffers estimate in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
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


def trained(model: nn.Module, *, schedule: str, recompute: tuple[int, ...] = ()) -> nn.Module:
    config = TrainConfig(plan="none", stages=2, micro_batches=3, schedule=schedule, recompute=recompute)
    with Trainer(model, optimizer=sgd, config=config, example=IMAGES[:2]) as trainer:
        for _ in range(3):
            trainer.step((IMAGES, LABELS))
    return model


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", [(), (0, 1)], ids=["once", "twice"])
@pytest.mark.parametrize("kind", [Written, Assigned, Normed])
def test_buffers_are_as_in_a_plain_loop(kind: type[nn.Module], recompute: tuple[int, ...], schedule: str) -> None:
    expected = plain_loop(make(kind)).state_dict()
    found = trained(make(kind), schedule=schedule, recompute=recompute).state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_a_python_number_counts_the_passes_of_training_alone() -> None:
    expected, found = plain_loop(make(Counted)), trained(make(Counted), schedule="1f1b")
    assert found.get_submodule("2").calls == expected.get_submodule("2").calls == 9
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_a_python_number_is_refused_where_passes_run_twice() -> None:
    with pytest.raises(UsageError, match="2 \\(Counted\\), whose forward changes its attribute 'calls'"):
        trained(make(Counted), schedule="1f1b", recompute=(0, 1))
