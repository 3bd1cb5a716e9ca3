"""Workers that hold their own stages only: losses, evaluation and checkpoints are those of workers that hold all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._pytree import tree_leaves

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.formats.checkpoint_files import resolve_checkpoint
from hybridpar.models.deferred import DeferredModel, named_tensors
from hybridpar.models.weights import load_weights
from hybridpar.train.checkpoint import load_checkpoint
from tests.ranks import run_ranks


class Asking(nn.Sequential):
    """The first layers ask the head for its type and shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x.to(self[-1].weight.dtype) * (self[-1].weight.size(0) / 5))
        return result


def build() -> nn.Module:
    wide = (nn.Linear(96, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1))
    return Asking(nn.Flatten(), nn.Linear(48, 96), *wide, nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 5))


def batch(seed: int, samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 4, 4, generator=generator), torch.randint(0, 5, (samples,), generator=generator)


def train(
    world: World, holds_all: bool, directory: str, load: str | None = None, weights: str | None = None
) -> tuple[Any, ...]:
    torch.manual_seed(1)
    model = build() if holds_all else DeferredModel(build)
    if weights is not None:
        load_weights(model, weights)
    config = TrainConfig(stages=world.size, micro_batches=2, batch_size=8, model_ema="0.9998", plan="none")
    with Trainer(model, config=config, world=world, example=batch(0, 4)[0], total_steps=6) as trainer:
        extra = trainer.load(load) if load is not None else {}
        losses = [trainer.step(batch(step)).outcome.loss for step in range(trainer.steps_done, trainer.steps_done + 3)]
        held = {name for name, where, key in named_tensors(trainer.model) if not where[key].is_meta}
        shares = [batch(100, 8), batch(101, 3)]
        shares = shares[world.rank :: world.size] if holds_all else shares
        tested = trainer.evaluate(shares)
        with trainer.averaged():
            averaged = trainer.evaluate(shares)
        trainer.save(directory, {"more": torch.arange(3)})
    return losses, tested, averaged, held, extra


def contents(directory: Path, *, training: bool = False) -> list[Any]:
    """The values of the newest checkpoint."""
    data = load_checkpoint(directory)
    assert data.average is not None
    parts = [sorted(data.model.items()), sorted(data.average.items()), data.training if training else {}]
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(parts)]


def read_by_index(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """The tensors of several files, as other tools read them."""
    files = json.loads((folder / f"{stem}.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in files.items()}


def test_workers_that_hold_their_stages_only(tmp_path: Path) -> None:
    whole, parts, after, other = (tmp_path / name for name in ("whole", "parts", "after", "other"))
    weights = str(tmp_path / "start.safetensors")
    save_file(build().state_dict(), weights)
    expected = run_ranks(train, 2, True, str(whole), None, weights)
    found = run_ranks(train, 2, False, str(parts), None, weights)
    names = {name for name, _, _ in named_tensors(build())}
    assert [one[:3] for one in found] == [one[:3] for one in expected]
    assert found[0][3] | found[1][3] == names
    assert not found[0][3] & found[1][3]
    assert all(one[3] == names for one in expected)
    assert contents(parts, training=True) == contents(whole, training=True)
    for stem in ("model", "model_ema"):
        state = load_file(resolve_checkpoint(whole) / f"{stem}.safetensors")
        by_index = read_by_index(resolve_checkpoint(parts), stem)
        assert by_index.keys() == state.keys()
        assert all(torch.equal(by_index[name], value) for name, value in state.items())
    # Each layout goes on from what the other has saved.
    further = run_ranks(train, 2, True, str(after), str(parts))
    assert [one[:3] for one in run_ranks(train, 3, False, str(other), str(whole))] == [further[0][:3]] * 3
    assert contents(other) == contents(after)
    assert further[0][4]["more"].tolist() == [0, 1, 2]


def go_on(world: World, directory: str, options: dict[str, Any]) -> list[Any]:
    """Steps before and after a checkpoint, with the whole model held and with own stages: what they came to."""
    results = []
    config = TrainConfig(stages=2, micro_batches=2, batch_size=16, plan="none", **options)
    replicas = world.size // 2
    for number, make in enumerate((build, lambda: DeferredModel(build))):
        losses: list[Any] = []
        for steps in (range(3), range(3, 5)):
            torch.manual_seed(1)
            with Trainer(make(), config=config, world=world, example=batch(0, 4)[0], total_steps=6) as trainer:
                if steps.start:
                    trainer.load(Path(directory, str(number)))
                shares = [batch(10 * step + world.rank % replicas) for step in steps]
                losses += [trainer.step(share).outcome.loss for share in shares]
                trainer.wait()
                held = trainer.engine.held_state()
                trainer.save(Path(directory, str(number)))
        results.append((losses, {name: one.clone() for name, one in held.items()}))
    return results


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (4, {"compress": "onebit", "optimizer": "adamw", "lr": 0.01}),
        (4, {"compress": "powersgd:rank=2", "amp": "bf16", "batch_norm": "local"}),
        (4, {"shard_optimizer": True, "model_ema": "0.9998", "optimizer": "adamw", "batch_norm": "sync"}),
        (2, {"amp": "fp16", "clip_grad": 1.0}),
    ],
    ids=lambda value: None if isinstance(value, int) else "-".join(value),
)
def test_codecs_casts_and_replicas_with_own_stages(tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    for whole, own in run_ranks(go_on, size, str(tmp_path), options, shared_memory="compress" not in options):
        assert own[0] == pytest.approx(whole[0], rel=1e-5)
        assert len(own[1]) < len(whole[1])
        for name, tensor in own[1].items():
            torch.testing.assert_close(tensor, whole[1][name], rtol=1e-5, atol=1e-5)
