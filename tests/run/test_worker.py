"""A worker divides the machine with those that share its cores, however many launchers started them."""

from __future__ import annotations

import os

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.run import worker
from tests.runs import restored_modes


class Job(World):
    """A job of four workers: the last two share the cores of this machine, each started by a launcher of its own."""

    def gather(self, item: object) -> list[object]:
        return ["other machine", None, item, item]


@pytest.mark.parametrize(("rank", "place"), [(2, 0), (3, 1)])
def test_workers_of_several_launchers_divide_the_cores_of_their_machine(monkeypatch, rank, place):
    asked = []
    monkeypatch.setenv("HYBRIDPAR_TUNED", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(worker, "share_cores", lambda workers: asked.append(workers) or 3)
    monkeypatch.setattr(worker, "affinity", lambda *given: asked.append(given[:2]))
    before = torch.get_num_threads()
    try:
        with restored_modes():
            worker.tune_worker(TrainConfig(), Job(rank, 4))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert asked == [2, (place, 2)]
    monkeypatch.delenv("HYBRIDPAR_TUNED")
    with restored_modes():
        worker.tune_worker(TrainConfig(), Job(rank, 4))
    assert len(asked) == 2, "nothing is set unless it was asked for"
    assert torch.get_num_threads() == before
    assert os.environ["LOCAL_WORLD_SIZE"] == "1"
