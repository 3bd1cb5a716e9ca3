"""With stages, too, there is one optimizer and one model: the factory sees the whole, and the whole comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.errors import SyncError, UsageError
from hybridpar.models.deferred import DeferredModel
from tests.ranks import run_ranks
from tests.train.training import plain_loop

Factory = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, width), nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.c(self.b(self.a(x).relu()).relu()))
        return out

    def no_weight_decay(self) -> set[str]:
        return {"b.weight"}


def make(frozen: str = "", width: int = 16) -> Net:
    torch.manual_seed(0)
    net = Net(width)
    for name, one in net.named_parameters():
        one.requires_grad_(name[0] not in frozen)
    return net


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5


def plain(net: Net, factory: Factory, steps: int = 3) -> dict[str, Tensor]:
    """What a loop of stock PyTorch makes of a model."""
    return dict(plain_loop(net, factory(net), [batch()] * steps, parts=2).state_dict())


def trainer_of(net: nn.Module | DeferredModel, factory: Factory | None, stages: int = 2, **more: Any) -> Trainer:
    world = more.pop("world", None) or World()
    config = TrainConfig(plan="none", stages=stages, micro_batches=2, **more)
    return Trainer(net, factory, config=config, example=batch()[0][:4], world=world)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


# ---------------------------------------------------------------- one optimizer


def trained_only(net: nn.Module) -> Optimizer:
    return SGD([one for one in net.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def by_name(net: Any) -> Optimizer:
    exempt = net.no_weight_decay()
    named = dict(net.named_parameters())
    groups = [
        {"params": [one for name, one in named.items() if name not in exempt], "weight_decay": 0.5},
        {"params": [one for name, one in named.items() if name in exempt], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=0.01)


def by_place(net: nn.Module) -> Optimizer:
    every = list(net.parameters())
    return SGD([{"params": every[:-3]}, {"params": every[-3:], "lr": 0.01}], lr=0.1)


def by_attribute(net: Any) -> Optimizer:
    return SGD([{"params": net.head.parameters(), "lr": 0.3}, {"params": net.a.parameters()}], lr=0.1)


def with_names(net: nn.Module) -> Optimizer:
    return SGD(net.named_parameters(), lr=0.1, momentum=0.9)


def with_state(net: nn.Module) -> Optimizer:
    return Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.5)


FACTORIES = (trained_only, by_name, by_place, by_attribute, with_names, with_state)


def by_each_worker(world: World, frozen: str, stages: int) -> list[dict[str, Tensor]]:
    found = []
    for factory in FACTORIES:
        net, calls = make(frozen), list[nn.Module]()

        def counted(given: nn.Module, calls: list[nn.Module] = calls, factory: Factory = factory) -> Optimizer:
            calls.append(given)
            return factory(given)

        with trainer_of(net, counted, stages, world=world) as trainer:
            for _ in range(3):
                trainer.step(batch())
            groups = [group for one in trainer.engine.optimizers for group in one.param_groups]
        assert calls == [net]
        assert all(len(group.get("param_names", group["params"])) == len(group["params"]) > 0 for group in groups)
        found.append(dict(net.state_dict()))
    return found


@pytest.mark.parametrize(("workers", "stages"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("frozen", ["", "ab", "c"])
def test_a_factory_is_called_once_with_the_whole_model_and_stages_divide_the_optimizer(frozen, workers, stages) -> None:
    for found in run_ranks(by_each_worker, workers, frozen, stages):
        for mine, factory in zip(found, FACTORIES, strict=True):
            assert_equal(mine, plain(make(frozen), factory))


def test_an_optimizer_that_looks_at_all_parameters_is_not_divided() -> None:
    pytest.importorskip("timm")
    with pytest.raises(UsageError, match="a pipeline with Lamb, which clips by the norm of all gradients"):
        trainer_of(make(), None, optimizer="timm/lamb")


@pytest.mark.parametrize("name", ["madgrad", "radam", "lookahead", "scheduled"])
def test_a_part_of_an_optimizer_of_any_kind(name: str) -> None:
    timm = pytest.importorskip("timm.optim")

    def scheduled(net: nn.Module) -> Optimizer:
        made = SGD(net.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(made, 100)
        return made

    others: dict[str, Factory] = {
        "lookahead": lambda net: timm.Lookahead(AdamW(net.parameters(), lr=0.01), k=2),
        "scheduled": scheduled,
    }
    factory = others.get(name, lambda net: timm.create_optimizer_v2(net.parameters(), name, lr=0.01))
    net = make()
    with trainer_of(net, factory) as trainer:
        for _ in range(4):
            trainer.step(batch())
    assert_equal(dict(net.state_dict()), plain(make(), factory, 4))


# --------------------------------------------------------- the model comes back


def after_training(world: World, way: str) -> tuple[list[dict[str, Tensor]], list[str], str]:
    """What a worker sees inside, what it holds afterwards, what of that is on the meta device, and an error."""
    net, inside, told = make(), [], ""
    try:
        with trainer_of(net, trained_only, world=world, stages=2, replicas=world.size // 2) as trainer:
            for _ in range(3):
                trainer.step(batch())
            if way == "collect":
                trainer.collect()
                inside.append({name: one.clone() for name, one in net.state_dict().items()})
            trainer.wait()
            if way == "error" or (way == "error of another" and world.rank == 1):
                raise KeyError("stop")
    except (KeyError, SyncError) as error:
        told = type(error).__name__
        if way == "error of another":
            world.close()  # as the end of its process does
    on_meta = [name for name, one in net.named_parameters() if one.is_meta]
    return [*inside, {name: one for name, one in net.state_dict().items() if not one.is_meta}], on_meta, told


@pytest.mark.parametrize(("way", "size"), [("close", 2), ("collect", 2), ("close", 4)])
def test_the_model_is_whole_on_every_worker(way: str, size: int) -> None:
    expected = plain(make(), trained_only)
    for states, on_meta, told in run_ranks(after_training, size, way):
        assert (on_meta, told) == ([], "")
        for state in states:
            assert_equal(state, expected)


def test_after_an_error_a_worker_holds_what_it_trains() -> None:
    expected = plain(make(), trained_only)
    first, second = run_ranks(after_training, 2, "error")
    assert (first[2], second[2]) == ("KeyError", "KeyError")
    assert sorted(first[1] + second[1]) == sorted(expected)
    for (held,), on_meta, _ in (first, second):
        assert on_meta
        assert_equal(held, {name: one for name, one in expected.items() if name not in on_meta})


def test_a_worker_whose_peer_ended_by_an_error() -> None:
    first, second = run_ranks(after_training, 2, "error of another")
    assert (first[2], second[2]) == ("SyncError", "KeyError")
    assert first[1]
    assert sorted(first[1] + second[1]) == sorted(dict(make().named_parameters()))


def closed_by_hand(world: World) -> list[str]:
    net = make()
    trainer = trainer_of(net, trained_only, world=world)
    try:
        trainer.step(batch())
        raise KeyError("stop")
    except KeyError:
        trainer.close()
    trainer.close()
    with pytest.raises(NotImplementedError, match="meta"):
        torch.save({name: one.cpu() for name, one in net.state_dict().items()}, "")
    return [name for name, one in net.named_parameters() if one.is_meta]


def test_a_close_that_handles_an_error_waits_for_nobody() -> None:
    first, second = run_ranks(closed_by_hand, 2)
    assert sorted(first + second) == sorted(dict(make().named_parameters()))
