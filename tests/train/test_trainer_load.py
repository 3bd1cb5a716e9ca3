"""`Trainer.load` in the middle of a training, of an earlier and of a later step, on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.train.trainer import Trainer
from tests.pipeline.oracle import Residuals, seeded
from tests.ranks import run_ranks
from tests.train.test_engine import make_trainer
from tests.train.training import config, make_net, share

STEPS = 5

EMA = {"model_ema": "0.8,warmup"}

#: Options of the trainer.
ENGINES: dict[str, dict[str, Any]] = {
    "replicas": {},
    "replicas, adamw": {"optimizer": "adamw", "lr": 0.01, "micro_batches": 2},
    "local BatchNorm": {"batch_norm": "local", **EMA},
    "codec": {"compress": "onebit", **EMA},
    "codec with a warm-up": {"compress": "onebit_sgd:warmup=2", "optimizer": "sgd:momentum=0"},
    "delay": {"sync": "allreduce:late=delay", "compress": "onebit", **EMA},
    "half": {"sync": "allreduce:late=half", "compress": "onebit"},
    "local": {"sync": "local:2", "micro_batches": 2, **EMA},
    "outer, streamed": {"sync": "outer:4,opt=nesterov,momentum=0.5,fragments=2,delay=1", "compress": "onebit"},
    "stages on workers": {"stages": 2, **EMA},
    "stages on replicas": {"stages": 2, "replicas": 2, "compress": "onebit"},
    "stages, delay": {"stages": 2, "replicas": 2, "compress": "onebit", "sync": "allreduce:late=delay", "dropout": 0.2},
    "stages, half": {"stages": 2, "replicas": 2, "compress": "onebit", "sync": "allreduce:late=half", "dropout": 0.2},
}


def open_trainer(world: World, options: dict[str, Any]) -> Trainer:
    if "stages" in options:
        dropout = options.get("dropout", 0.0)
        given = {key: value for key, value in options.items() if key != "dropout"}
        return make_trainer(**given, world=world, make=lambda: seeded(lambda: Residuals(dropout=dropout)))
    return Trainer(make_net(norm=True), config=config(**options), world=world, total_steps=20)


def batch_of(trainer: Trainer, step: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if "stages" not in options:
        return share(trainer.world, step)
    draw, replicas = torch.Generator().manual_seed(step), options.get("replicas", 1)
    x, y = torch.randn(8, 3, 8, 8, generator=draw), torch.randint(0, 5, (8,), generator=draw)
    return x.chunk(replicas)[trainer.world.rank % replicas], y.chunk(replicas)[trainer.world.rank % replicas]


def go_on(trainer: Trainer, options: dict[str, Any], save: Path | None = None) -> dict[str, Tensor]:
    """Train until the last step, and save before every step."""
    while trainer.steps_done < STEPS:
        if save is not None:
            trainer.save(save)
        trainer.step(batch_of(trainer, trainer.steps_done, options))
    if "stages" in options:
        trainer.engine.synchronize_buffers()
    state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    if "model_ema" in options:
        with trainer.averaged():
            state |= {f"average of {name}": tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    return state


def differing(state: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in expected.items() if not torch.equal(state[name], tensor)]


def back_and_forth(world: World, options: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    """Parameters that end up otherwise than in the whole run, by where training went on from where."""
    found = {}
    again = folder / "again" if "batch_norm" in options else None  # where saving makes workers meet
    with open_trainer(world, options) as trainer:
        whole = go_on(trainer, options, folder)
        for step in (1, 0, 4):
            trainer.load(folder / f"step-{step}")
            found[f"end to {step}"] = differing(go_on(trainer, options, again), whole)
    with open_trainer(world, options) as trainer:
        trainer.step(batch_of(trainer, 17, options))
        trainer.load(folder / "step-3")
        found["another first step to 3"] = differing(go_on(trainer, options, again), whole)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_training_goes_on_as_it_did_from_any_step(engine: str, tmp_path: Path) -> None:
    for found in run_ranks(back_and_forth, 2, ENGINES[engine], tmp_path, shared_memory=False):
        assert found == {end: [] for end in found}


def after_another_training(world: World, options: dict[str, Any], folder: Path) -> list[str]:
    """Parameters that end up otherwise where a checkpoint of one worker is loaded after some steps of two."""
    ends = []
    for steps in (0, 4):
        with open_trainer(world, options) as trainer:
            for step in range(steps):
                trainer.step(batch_of(trainer, 17 + step, options))
            trainer.load(folder)
            ends.append(go_on(trainer, options))
    return differing(*ends)


@pytest.mark.parametrize("engine", ["codec", "delay", "half", "local", "outer, streamed", "stages on replicas"])
def test_nothing_is_left_of_the_steps_before_where_the_layout_is_another(engine: str, tmp_path: Path) -> None:
    options = ENGINES[engine]
    with open_trainer(World(), {**options, "replicas": 1} if "stages" in options else options) as alone:
        alone.step(batch_of(alone, 0, {**options, "replicas": 1}))
        alone.save(tmp_path)
    assert run_ranks(after_another_training, 2, options, tmp_path, shared_memory=False) == [[], []]
