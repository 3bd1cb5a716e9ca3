"""Tests the benchmark of the thesis, without its GPUs: methods, rounds, and what its command prints.

The benchmark itself runs for hours on machines that the tests do not have.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.rig.table import check_csv
from benchmarks.thesis import __main__ as command
from benchmarks.thesis import cells
from benchmarks.thesis.cells import DDP, METHODS, ONE, OURS, Job, Place, Setting
from benchmarks.thesis.ours import Ours, StageLayout
from benchmarks.thesis.peers import Peer
from benchmarks.thesis.task import Task
from benchmarks.thesis.worker import work
from hybridpar.comm.world import World
from hybridpar.config import DataConfig
from hybridpar.data import load_dataset
from tests.data.test_sets import cifar  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[2]
SETTING = Setting(
    model="tests.small_nets:plain",
    data="synthetic",
    data_root="data",
    batch=16,
    epochs=21,
    most_steps=2,
    lr=0.05,
    stem="imagenet",
    image_size=8,
)
PLACE = Place(device="cpu", workers=2, name="some CPU", commit="abc1234", code="0123456789ab")


def make_task(world: World, *, seed: int = 0, samples: int = 40) -> Task:
    data = load_dataset(DataConfig(data="synthetic", image_size=8, synthetic_samples=samples))
    steps = cells.whole_steps(samples, SETTING.batch, 4)
    return Task(setting=SETTING, data=data, seed=seed, steps=steps, workers=world.size, device=world.device)


# ------------------------------------------------------------------------ what is measured


def test_every_method_runs_or_says_why_not() -> None:
    def can(device: str, workers: int) -> set[str]:
        return {method for method in METHODS if cells.why_not(method, device, workers) is None}

    assert can("cpu", 1) == {ONE, cells.ONE_COMPILED, OURS}
    assert can("cpu", 2) == {ONE, DDP, cells.DDP_COMPILED, OURS}
    assert can("cuda", 1) == {ONE, cells.ONE_GRAPH, cells.ONE_COMPILED, OURS}
    assert can("cuda", 4) == {ONE, cells.DATA_PARALLEL, DDP, cells.DDP_GRAPH, cells.DDP_COMPILED, OURS}
    wanted, reasons = cells.runnable(METHODS, PLACE)
    assert set(wanted) | set(reasons) == set(METHODS)
    assert reasons[cells.DATA_PARALLEL] == "nn.DataParallel needs two GPUs"


# ------------------------------------------------------------------------ rounds


# ------------------------------------------------------------------------ methods


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_peer_and_hybridpar_train_the_same() -> None:
    world = World()
    task = make_task(world)
    assert task.steps == 2
    peer, ours = Peer(ONE, task, world), Ours(task, world, StageLayout(stages=1, replicas=1, micro_batches=1))
    before = weights(peer._model).clone()
    assert torch.equal(before, weights(ours.trainer.model))
    for epoch in range(3):
        peer.epoch(epoch)
        ours.epoch(epoch)
    assert ours.trainer.steps_done == 6
    assert not torch.allclose(before, weights(peer._model))
    assert torch.allclose(weights(peer._model), weights(ours.trainer.model), rtol=1e-4, atol=1e-6)
    assert peer.accuracy() == ours.accuracy()
    assert not ours.captured
    ours.close()


# ------------------------------------------------------------------------ the command


@pytest.mark.parametrize("cifar", ["cifar10"], indirect=True)
def test_one_worker_measures_cifar_from_its_published_format(
    cifar: tuple[str, Path, Path, dict[str, object]],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, root, *_ = cifar
    monkeypatch.setenv("WORLD_SIZE", "1")
    setting = replace(SETTING, data=name, data_root=str(root))
    table = tmp_path / "table.csv"
    methods = [ONE, DDP, OURS]
    place = replace(PLACE, workers=1)
    job = Job(
        setting=setting,
        place=place,
        methods=methods,
        missing=cells.still_missing([], setting, place, methods, [0, 1]),
        output=str(table),
        cuda_graph=True,
        probe_steps=1,
        most_stages=2,
    )
    work(job)
    rows = check_csv(table)
    assert [(entry.method, entry.baseline, entry.extra["seed"]) for entry in rows] == [
        (ONE, ONE, 0),
        (OURS, ONE, 0),
        (ONE, ONE, 1),
        (OURS, ONE, 1),
    ]
    ours = rows[1].extra
    assert ours["layout"]["stages"] * ours["layout"]["replicas"] in (1, 2)
    assert len(ours["probe_ms"]) == 4  # whole, and two stages with 2, 4 and 8 micro-batches
    assert ours["skipped"] == {DDP: "DistributedDataParallel needs two workers"}
    assert 0 <= ours["accuracy"] <= 1
    assert ours["steps_per_epoch"] == 2
    assert cells.still_missing(rows, setting, place, methods, [0, 1]) == []


def test_a_missing_data_set_says_what_to_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "launch", lambda *_, **__: pytest.fail("nothing to measure"))
    arguments = ["--small", "--data", *cells.DATA, "--data-root", str(tmp_path), "--output", str(tmp_path / "t.csv")]
    assert command.run(arguments) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    for line, data in zip(lines, cells.DATA, strict=True):
        source, folder = cells.SOURCES[data]
        assert line.startswith(f"{data} is not measured")
        assert source in line
        assert str(tmp_path / folder) in line
    assert not (tmp_path / "t.csv").exists()


def test_the_committed_tables_are_valid_and_claim_nothing_for_a_cpu() -> None:
    tables = sorted((ROOT / "benchmarks/thesis/results").glob("*.csv"))
    assert tables
    for table in tables:
        for entry in check_csv(table):
            assert entry.claim == cells.CLAIM
            assert entry.extra["cuda"] or entry.target is None
