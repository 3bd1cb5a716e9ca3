"""Emulated workers of the outer loop against real ones, and what is made of their runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.outer.accuracy import RESULTS, Run, steps_to_target, table_of, wanted
from benchmarks.outer.emulated import run_emulated
from benchmarks.rig.records import read_records
from hybridpar.comm.world import World
from hybridpar.planner.outer_steps import TABLE
from hybridpar.sync.statistics import copy_of
from hybridpar.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.training import config, make_net, share

OPTIONS: list[dict[str, Any]] = [
    {"sync": "outer:3", "compress": "onebit"},
    {"sync": "outer:4,opt=nesterov,fragments=2,delay=1"},
]


def _train(world: World, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float], list[int]]:
    with Trainer(make_net(True), config=config(**options), world=world, total_steps=8) as trainer:
        outcomes = [trainer.step(share(world, step)).outcome for step in range(8)]
        return copy_of(trainer.model.state_dict()), [one.loss for one in outcomes], [one.bytes_sent for one in outcomes]


def _in_turn(world: World, turn: Any, options: dict[str, Any]) -> Any:
    with turn:
        return _train(world, options)


@pytest.mark.parametrize("options", OPTIONS, ids=["onebit", "streamed"])
def test_two_emulated_workers_do_what_two_processes_do(options):
    real = run_ranks(_train, 2, options, shared_memory=False)
    torch.manual_seed(0)  # `make_net` seeds the generator that threads share, so nets are made one after the other
    found = run_emulated(_in_turn, 2, options)
    for (state, losses, sent), (other, their_losses, their_sent) in zip(found, real, strict=True):
        assert losses == pytest.approx(their_losses, rel=1e-5)
        assert sent == their_sent
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-6)


def test_a_worker_that_fails_fails_all():
    def work(world: World, turn: Any) -> None:
        if world.rank == 1:
            raise ValueError("no images")
        world.gather(None)

    with pytest.raises(ValueError, match="no images"):
        run_emulated(work, 3)


def _run(method: str = "mean", by_epoch: str = "[90.0, 98.0]", accuracy: float = 98.0, **more: Any) -> Run:
    given = {"every": 16, "workers": 2, "codec": "onebit", "fold": 0, "seed": 1, "epochs": 2, "steps": 46, **more}
    return Run(method=method, by_epoch=by_epoch, accuracy=accuracy, **given)


def test_steps_to_an_accuracy_lie_on_the_line_through_the_ends_of_epochs():
    assert steps_to_target(_run()) == pytest.approx(23 * (1 + 7 / 8))
    assert steps_to_target(_run(by_epoch="[90.0, 96.9]")) is None


def test_a_row_is_of_pairs_and_says_where_it_breaks():
    base = [_run("sync", every=1, codec="none", seed=seed) for seed in (1, 2)]
    slower = [_run(seed=1), _run(seed=2, by_epoch="[0.0, 97.0]", accuracy=97.0)]
    (row,) = table_of([*base, *slower])
    ratio = 2 / (1 + 7 / 8)
    assert (row.every, row.workers, row.codec, row.length, row.runs) == (16, 2, "onebit", 46, 2)
    mean = (1 + ratio) / 2
    assert (row.lost, row.mean) == (0.5, pytest.approx(mean, abs=1e-3))
    assert row.high == pytest.approx(mean + ratio - 1, abs=1e-3), "two standard errors more"
    (row,) = table_of([*base, slower[0], _run(seed=2, by_epoch="[0.0, 50.0]", accuracy=50.0)])
    assert (row.mean, row.high, row.holds) == (None, None, False)


def test_no_run_is_wanted_twice_in_a_set():
    for what in ("target", "slow", "grid", "lengths", "qsr"):
        keys = [run.key for run in wanted(what)]
        assert keys
        assert len(set(keys)) == len(keys)


def test_the_planners_table_is_what_the_rows_say():
    assert list(TABLE) == table_of(read_records(Run, RESULTS / "accuracy.csv"))
