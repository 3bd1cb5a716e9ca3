"""Codecs in the sync of gradients: replicas stay equal, and what is not sent is neither lost nor sent twice."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.compress import kernels
from hybridpar.errors import SyncError, UsageError
from tests.ranks import run_ranks


class Net(nn.Module):
    """Two layers that are large enough to be compressed, and one that only some workers use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Linear(16 * 36, 64)
        self.spare = nn.Linear(64, 64)
        self.last = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x))).flatten(1)))
        if torch.is_grad_enabled() and float(x.detach().sum()) > 1e9:
            x = self.spare(x)
        return self.last(x)  # type: ignore[no-any-return]


class Staged(nn.Sequential):
    """The same without the branch, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 64), nn.ReLU(),
            nn.Linear(64, 5),
        )  # fmt: skip


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * replica + step)
    return torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def make(world: World, codec: str, **options: Any) -> Trainer:
    torch.manual_seed(0)
    # Small buckets: several of them, cut anew after the first step.
    config = TrainConfig(**{"compress": codec, "lr": 0.05, "sync": "allreduce:bucket=0.02", **options})
    if config.stages > 1:
        return Trainer(Staged(), config=config, world=world, example=torch.randn(4, 3, 8, 8))
    return Trainer(Net(), config=config, world=world)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def kept(trainer: Trainer) -> dict[str, Tensor]:
    """Every residual of this worker."""
    found: dict[str, Tensor] = {}

    def walk(path: str, entry: Any) -> None:
        if isinstance(entry, Tensor):
            found[path] = entry
        elif isinstance(entry, dict):
            for key, value in entry.items():
                walk(f"{path}/{key}", value)

    walk("", trainer.engine.state_dict())
    return {path: tensor for path, tensor in found.items() if "residuals" in path}


def reloaded(world: World, codec: str, path: str | None, directory: str) -> tuple[str, list[str], Any]:
    """A checkpoint after a step, or where there is one, warnings and the state after two steps that go on from it."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hybridpar.sync.compression").addHandler(handler)
    with make(world, codec) as trainer:
        if path is not None:
            trainer.load(path)
        for step in range(1 if path is None else 2):
            trainer.step(batch(world.rank, step))
        saved = path or str(trainer.save(directory))
        steps = [entry.get("steps") for entry in trainer.engine.codecs[0].state_dict()["parameters"].values()]
        return saved, told, (steps, state_of(trainer))


@pytest.mark.parametrize(("codec", "workers"), [("onebit:warmup=1", 2), ("onebit:warmup=1", 3), ("twobit", 2)])
def test_codecs_begin_anew_where_what_they_kept_does_not_fit(codec: str, workers: int, tmp_path: Any) -> None:
    path = run_ranks(reloaded, 2, "onebit:warmup=1", None, str(tmp_path))[0][0]
    found = run_ranks(reloaded, workers, codec, path, str(tmp_path))
    goes_on = (codec, workers) == ("onebit:warmup=1", 2)
    for rank, (_, warnings, (steps, state)) in enumerate(found):
        assert len(warnings) == (rank == 0 and not goes_on)
        assert all("what codecs had not sent is dropped" in one for one in warnings)
        assert max(one for one in steps if one is not None) == (3 if goes_on else 2)
        assert all(torch.equal(tensor, found[0][2][1][name]) for name, tensor in state.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_codec_for_other_types_than_float32_is_refused(dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"plan": "none", "lr": 0.1}
    net = Net().to(dtype)
    with pytest.raises(UsageError, match=f"'second.weight' of type {dtype} with --compress onebit"):
        Trainer(net, config=TrainConfig(compress="onebit", **options))
    Trainer(net, config=TrainConfig(compress="*weight -> none; * -> onebit", **options)).close()


def stored(world: World) -> list[Tensor]:
    """Weights after two steps, stored by rows and by columns."""
    found = []
    for by_columns in (False, True):
        torch.manual_seed(0)
        net = Net()
        weight = net.second.weight.detach()
        net.second.weight = nn.Parameter(weight.t().contiguous().t() if by_columns else weight)
        with Trainer(net, config=TrainConfig(compress="powersgd:rank=2", lr=0.05), world=world) as trainer:
            for step in range(2):
                trainer.step(batch(world.rank, step))
        found.append(net.second.weight.detach())
    return found


def test_a_matrix_stored_by_columns_is_the_same_matrix() -> None:
    for rows, columns in run_ranks(stored, 2):
        torch.testing.assert_close(rows, columns)


def kernels_on_one(world: World, codec: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(kernels, "table", lambda _device=None: None)
        try:
            make(world, codec)
        except SyncError as error:
            return str(error)
    return ""


def test_kernels_on_some_workers_only_are_refused_where_they_round_otherwise() -> None:
    if kernels.table(torch.device("cpu")) is None:
        pytest.skip("no kernels on this machine")
    assert all("with kernels, without kernels" in text for text in run_ranks(kernels_on_one, 2, "powersgd"))
    assert run_ranks(kernels_on_one, 2, "onebit") == ["", ""]
