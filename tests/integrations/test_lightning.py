"""`HybridparStrategy` with Lightning's trainer where it is installed, and with one of the same calls everywhere.

The stand-in makes the calls of Lightning 2.6 that the strategy overrides, in Lightning's order: a checkpoint is loaded
before the model is wrapped, and saved by a call on all processes.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from tests.compress.test_ddp import batch, net, weights
from tests.ranks import run_ranks

STRATEGY = "hybridpar.integrations.lightning"


class StandInStrategy:
    def __init__(self, accelerator: Any = None, ddp_comm_hook: Any = None, **kwargs: Any) -> None:
        self.model: Any = None
        self._ddp_kwargs = kwargs
        self.optimizers: list[Any] = []

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def configure_ddp(self) -> None:
        self.model = DistributedDataParallel(self.model, **self._ddp_kwargs)

    def setup_optimizers(self, trainer: Any) -> None:
        self.optimizers = [trainer.lightning_module.configure_optimizers()]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if dist.get_rank() == 0:
            torch.save(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return torch.load(checkpoint_path, weights_only=True)  # type: ignore[no-any-return]

    def teardown(self) -> None:
        self.model = self.model.module


class StandInTrainer:
    def __init__(self, strategy: Any, max_steps: int) -> None:
        self.strategy, self.max_steps, self.lightning_module, self.done = strategy, max_steps, Any, 0

    def fit(self, module: Any, data: Any, ckpt_path: str | None = None) -> None:
        self.strategy.model = self.lightning_module = module
        if ckpt_path is not None:
            checkpoint = self.strategy.load_checkpoint(ckpt_path)
            module.load_state_dict(checkpoint["state_dict"])
            self.done = checkpoint["global_step"]
        self.strategy.configure_ddp()
        self.strategy.setup_optimizers(self)
        (optimizer,) = self.strategy.optimizers
        while self.done < self.max_steps:
            optimizer.zero_grad()
            F.cross_entropy(self.strategy.model(data[self.done][0]), data[self.done][1]).backward()
            optimizer.step()
            self.done += 1
        self.strategy.teardown()

    def save_checkpoint(self, path: str, weights_only: bool = False) -> None:
        checkpoint = {"state_dict": self.lightning_module.state_dict(), "global_step": self.done}
        self.strategy.save_checkpoint(checkpoint | ({} if weights_only else {"optimizer_states": []}), path)
        dist.barrier()


class Plain(nn.Module):
    """What the stand-in trains."""

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__()
        self.net, self.momentum = net(), momentum

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=self.momentum)


@contextlib.contextmanager
def library(real: bool) -> Iterator[Any]:
    """The module of the strategy, over Lightning or the stand-in."""
    before = dict(sys.modules)
    sys.modules.pop(STRATEGY, None)
    if not real:
        for name in ("lightning", "lightning.pytorch", "lightning.pytorch.strategies"):
            sys.modules[name] = ModuleType(name)
        sys.modules["lightning.pytorch.strategies"].DDPStrategy = StandInStrategy  # type: ignore[attr-defined]
    try:
        yield importlib.import_module(STRATEGY)
    finally:
        for name in set(sys.modules) - set(before):
            if name == STRATEGY or not real:
                del sys.modules[name]
        sys.modules.update(before)


def lightning_trainer(world: World, strategy: type, max_steps: int, given: dict[str, Any], **options: Any) -> Any:
    """A trainer of Lightning over the ranks of the test."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Environment(LightningEnvironment):  # type: ignore[misc]
        """Processes that are there already, as under torchrun."""

        creates_processes_externally = True

        def world_size(self) -> int:
            return world.size

        def global_rank(self) -> int:
            return world.rank

        def local_rank(self) -> int:
            return world.rank

        def set_world_size(self, size: int) -> None: ...

        def set_global_rank(self, rank: int) -> None: ...

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    place = {"accelerator": "cpu", "devices": world.size, "max_steps": max_steps}
    environment: Any = Environment()
    return Trainer(strategy=strategy(cluster_environment=environment, **given), **place, **quiet, **options)


def make_trainer(real: bool, world: World, max_steps: int, **options: Any) -> tuple[Any, Any]:
    """A trainer, and a model for it."""
    with library(real) as found:
        if not real:
            return StandInTrainer(found.HybridparStrategy(**options), max_steps), Plain()
        from lightning.pytorch import LightningModule

        class Module(Plain, LightningModule):  # type: ignore[misc]
            def training_step(self, data: Any, index: int) -> Tensor:
                images, labels = batch(world.rank, self.global_step)  # a resumed loader begins at the first batch
                return F.cross_entropy(self(images), labels)

        return lightning_trainer(
            world, found.HybridparStrategy, max_steps, options, use_distributed_sampler=False
        ), Module()


def resumed(world: World, real: bool, folder: str) -> dict[str, bool]:
    data: Any = [batch(world.rank, step) for step in range(3)]
    if real:
        data = torch.utils.data.DataLoader(data)
    path = f"{folder}/first.ckpt"
    trainer, whole = make_trainer(real, world, 3, compress="onebit")
    trainer.fit(whole, data)
    trainer, first = make_trainer(real, world, 1, compress="onebit")
    trainer.fit(first, data)
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    saved = [torch.load(one, weights_only=True) for one in (path, f"{folder}/weights.ckpt")]
    trainer, again = make_trainer(real, world, 3, compress="auto")  # as the run began
    trainer.fit(again, data, ckpt_path=path)
    plain, module = make_trainer(real, world, 3)
    plain.fit(module, data)
    states = saved[0]["hybridpar_compression"]
    return {
        "resumed to the bit": torch.equal(weights(again.net), weights(whole.net)),
        "it goes on": not torch.equal(weights(again.net), weights(first.net)),
        "a codec changes something": not torch.equal(weights(module.net), weights(whole.net)),
        "states of both": [one["rank"] for one in states] == [0, 1],
        "keys are the model's": all(name.startswith("net.") for name in saved[0]["state_dict"]),
        "weights alone": not any("hybridpar" in name for name in saved[1]),
        "processes agree": torch.equal(*(torch.tensor(one) for one in world.gather(weights(again.net).tolist()))),
    }


@pytest.mark.parametrize("real", [False, True], ids=["stand-in", "lightning"])
def test_fit_and_resume(real: bool, tmp_path: Path) -> None:
    if real:
        pytest.importorskip("lightning")
    for found in run_ranks(resumed, 2, real, str(tmp_path)):
        assert not [what for what, holds in found.items() if not holds]


def refused(world: World, real: bool) -> str:
    trainer, _ = make_trainer(real, world, 1, compress="onebit_sgd")
    with pytest.raises(UsageError, match="keeps the momentum itself") as caught:
        trainer.fit(Plain(momentum=0.9), [])
    return str(caught.value)


def test_momentum_that_a_codec_keeps_is_refused() -> None:
    assert len(run_ranks(refused, 2, False)) == 2


def test_options_are_those_of_the_strategy_and_of_ddp() -> None:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 3}
    with library(real=False) as found:
        assert found.HybridparStrategy(**options)._ddp_kwargs == options


def test_without_lightning_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.strategies", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, STRATEGY, raising=False)
    with pytest.raises(UsageError, match=r"pip install 'hybridpar\[integrations\]'"):
        importlib.import_module(STRATEGY)
