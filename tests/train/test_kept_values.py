"""Values that a model keeps and that are no ordinary tensors: right under every layout, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from hybridpar.formats.checkpoint_files import load_model_state
from hybridpar.models.deferred import DeferredModel
from hybridpar.models.state_dicts import copy_of
from hybridpar.optim.ema import ModelAverage
from tests.ranks import run_ranks

X, Y = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
LAYOUTS: list[tuple[int, dict[str, Any]]] = [(1, {}), (1, {"stages": 2}), (2, {}), (2, {"stages": 2})]


class Limits(nn.Module):
    """Has an extra state: a limit, and how often it was used."""

    def __init__(self, high: float = 3.0) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"high": high, "used": 0, "by": {b"a": [torch.ones(1)]}}

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = dict(state)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.state["used"] += 1
        return x.clamp(max=self.state["high"])


class Filter(nn.Module):
    """A filter in the frequency domain, whose gradient may be a conjugated view, and a buffer that is assigned anew."""

    conjugated = False

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, 4, 3, dtype=torch.complex64) * 0.1)
        self.register_buffer("means", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.means = torch.cat((self.means, x.detach().mean()[None]))
        spectrum = torch.fft.rfft2(x, norm="ortho") * (self.filter.conj() if self.conjugated else self.filter)
        return torch.fft.irfft2(spectrum, s=(4, 4), norm="ortho")


def make_net(kind: str = "filter", high: float = 3.0) -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "limits":
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 96), Limits(high), nn.Linear(96, 96), nn.ReLU(), Limits(high))
    return nn.Sequential(nn.Conv2d(3, 3, 1), Filter(), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))


def trainer_of(net: nn.Module | DeferredModel, world: World | None = None, **options: Any) -> Trainer:
    options = {"plan": "none", "micro_batches": 2, "lr": 0.1, "model_ema": "0.9", **options}
    return Trainer(net, config=TrainConfig(**options), example=X[:2], world=world)


def share(world: World, trainer: Trainer) -> tuple[Tensor, Tensor]:
    replicas = trainer.plan.layout.replicas
    return X.chunk(replicas)[world.rank % replicas], Y.chunk(replicas)[world.rank % replicas]


def extra_state(world: World, directory: str, options: dict[str, Any], deferred: bool) -> tuple[Any, ...]:
    high = 0.5 + world.rank  # worker 0's counts
    net: Any = DeferredModel(lambda: make_net("limits", high)) if deferred else make_net("limits", high)
    with trainer_of(net, world, **options) as trainer:
        trainer.step(share(world, trainer))
        path = trainer.save(directory)
        limits = [one for one in trainer.model.modules() if isinstance(one, Limits)]
        saved = [dict(one.state) for one in limits]
        trainer.step(share(world, trainer))
        with trainer.averaged():
            averaged = [dict(one.state) for one in limits]
        for one in limits:
            one.state = {}
        trainer.load(path)
        return str(path), saved, averaged, [dict(one.state) for one in limits]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("workers", "options"), LAYOUTS)
def test_extra_states_are_saved_averaged_and_of_worker_0(workers, options, deferred, tmp_path):
    for path, saved, averaged, loaded in run_ranks(extra_state, workers, str(tmp_path), options, deferred):
        assert [(one["high"], one["used"]) for one in saved] == [(0.5, 2)] * 2
        assert [one["used"] for one in averaged] == [4, 4]
        assert loaded == saved
        plain = make_net("limits")
        plain.load_state_dict(load_model_state(Path(path)))
        assert [plain[2].state, plain[5].state] == saved


def test_an_extra_state_that_no_checkpoint_can_hold_is_refused():
    net = make_net("limits")
    net[2].state["hook"] = object()
    with pytest.raises(UsageError, match=r"2\._extra_state is a dict that a checkpoint cannot hold"):
        trainer_of(net)
    with pytest.raises(UsageError, match="Limits has an extra state"):
        trainer_of(Limits(), stages=2)


def train_filter(world: World, directory: str, optimizer: str, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    net = make_net()
    net[1].conjugated = optimizer == "sgd"  # torch's Adam cannot step by such
    options = {"optimizer": optimizer, "weight_decay": 0.0, "clip_grad": 0.2, **options}
    with trainer_of(net, world, **options) as trainer:
        x, y = share(world, trainer)
        for step in range(4):
            assert trainer.step((x * math.nan if step == 1 else x, y)).skipped == (step == 1)
            if step == 2:
                path = trainer.save(directory)
        states = []
        for _ in range(2):
            trainer.collect()
            states.append(copy_of(net.state_dict()))
            with trainer.averaged():
                states.append(copy_of(net.state_dict()))
            trainer.load(path)
            trainer.step((x, y))
        return states


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("workers", "options"), [*LAYOUTS, (2, {"shard_optimizer": True}), (2, {"sync": "allreduce:bucket=1e-05"})]
)
def test_complex_parameters_train_as_in_a_plain_loop(workers, options, optimizer, tmp_path):
    replicas = 1 if options.get("stages") else workers
    found = run_ranks(train_filter, workers, str(tmp_path), optimizer, {"micro_batches": 2 // replicas, **options})
    net = make_net()
    net[1].conjugated = optimizer == "sgd"
    kind: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    made, average = kind(net.parameters(), lr=0.1, weight_decay=0.0, **momentum), ModelAverage(net, 0.9)
    for step in range(3):
        made.zero_grad()
        for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
            (cross_entropy(net(x), y) / 2).backward()
        norm = torch.stack([one.grad.abs().square().sum() for one in net.parameters()]).sum().sqrt()
        for one in net.parameters():
            one.grad *= (0.2 / norm).clamp(max=1.0)
        made.step()
        average.update(step + 1)
    assert not torch.equal(average.state_dict()["1.filter"], net[1].filter)
    names = net.state_dict() if replicas == 1 else dict(net.named_parameters())  # means are of a worker's own samples
    for states in found:
        for state, expected in zip(states, (net.state_dict(), average.state_dict()) * 2, strict=True):
            for name in names:
                torch.testing.assert_close(state[name], expected[name], msg=name)


@pytest.mark.parametrize("options", [{"compress": "onebit"}, {"clip_grad": "1,mode=value"}])
def test_complex_parameters_are_refused_where_numbers_are_real(options):
    with pytest.raises(UsageError, match=r"the complex parameter '1\.filter' with --c"):
        trainer_of(make_net(), **options)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("wrap", [lambda net: torch.compile(net, backend="eager"), nn.DataParallel])
def test_a_wrapper_is_refused_by_name(wrap, inside, stages):
    net = make_net()
    wrapped = nn.Sequential(*net[:-1], wrap(net[-1])) if inside else wrap(net)
    with pytest.raises(UsageError, match=rf"{'4' if inside else 'the model'} is wrapped in "):
        trainer_of(wrapped, stages=stages)


@pytest.mark.parametrize("stages", [1, 2])
def test_parameters_that_join_an_optimizer_are_refused(stages):
    net = make_net()
    made = torch.optim.SGD(net[4].parameters(), lr=0.1)
    config = TrainConfig(plan="none", stages=stages)
    with Trainer(net, lambda model: made, config=config, total_steps=4, example=X) as trainer:
        trainer.step((X, Y))
        with pytest.raises(UsageError, match="more parameters while training"):
            made.add_param_group({"params": net[0].weight, "lr": 0.01})
        trainer.step((X, Y))
        made.param_groups.append({**made.param_groups[0], "params": [net[0].weight]})
        with pytest.raises(UsageError, match="more parameters while training"):
            trainer.step((X, Y))
        made.param_groups.pop()
        trainer.step((X, Y))
    made.add_param_group({"params": net[0].weight, "lr": 0.01})


@pytest.mark.parametrize("stages", [1, 2])
def test_an_optimizer_takes_parameters_after_a_failure(stages, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("made up")

    net = make_net()
    made = torch.optim.SGD(net[4].parameters(), lr=0.1)
    monkeypatch.setattr(f"hybridpar.train.engine.{'check_compression' if stages == 1 else 'part_of'}", fail)
    with pytest.raises(RuntimeError, match="made up"):
        Trainer(net, lambda model: made, config=TrainConfig(plan="none", stages=stages), total_steps=4, example=X)
    made.add_param_group({"params": net[0].weight, "lr": 0.01})


class Late(nn.Module):
    """Registers a buffer in its third pass."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == 3:
            self.register_buffer("mean", x.detach().mean())
        return x


def late_buffer(world: World) -> str:
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), Late(), nn.Linear(8, 3))
    with trainer_of(net, world, micro_batches=1) as trainer:
        with pytest.raises(UsageError) as caught:  # noqa: PT012 - it may be late
            for _ in range(4):
                trainer.step(share(world, trainer))
    return str(caught.value)


def test_a_first_buffer_that_a_later_step_registers_is_refused_on_all_workers():
    for refused in run_ranks(late_buffer, 2):
        assert "has registered a buffer 'mean'" in refused
