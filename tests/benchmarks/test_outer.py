"""Emulated workers of the outer loop against real ones, and what is made of their runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.outer.accuracy import RESULTS, Run, table_of
from benchmarks.rig.emulated import run_emulated
from benchmarks.rig.records import read_records
from hybridpar.comm.world import World
from hybridpar.models.state_dicts import copy_of
from hybridpar.planner.codecs import OUTER_STEPS
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
        return (
            copy_of(trainer.model.state_dict()),
            [outcome.loss for outcome in outcomes],
            [outcome.bytes_sent for outcome in outcomes],
        )


def _in_turn(world: World, turn: Any, options: dict[str, Any]) -> Any:
    with turn:
        return _train(world, options)


@pytest.mark.parametrize("options", OPTIONS, ids=["onebit", "streamed"])
def test_two_emulated_workers_do_what_two_processes_do(options):
    real = run_ranks(_train, 2, options, shared_memory=False)
    torch.manual_seed(0)  # `make_net` seeds the generator that threads share, so nets are made one after the other
    emulated = run_emulated(_in_turn, 2, options)
    for (state, losses, sent), (other, their_losses, their_sent) in zip(emulated, real, strict=True):
        assert losses == pytest.approx(their_losses, rel=1e-5)
        assert sent == their_sent
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-6)


def test_the_planners_table_is_what_the_rows_say():
    assert list(OUTER_STEPS) == table_of(read_records(Run, RESULTS))
