"""Tests the benchmark of the thesis, without its GPUs: the benchmark itself runs for hours on machines with several."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torchvision

from benchmarks.rig.rows import read_rows
from benchmarks.thesis import __main__ as command
from benchmarks.thesis.ours import OURS
from benchmarks.thesis.peers import DDP, ONE_DEVICE
from benchmarks.thesis.task import Task
from benchmarks.thesis.worker import measure
from tests.data.test_library_sets import Colours


def test_one_worker_measures_a_data_set_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Colours)
    name, root = "cifar10", tmp_path / "data"
    root.mkdir()
    np.save(root / "colours.npy", np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), dtype=np.uint8))
    monkeypatch.setenv("WORLD_SIZE", "1")
    task = Task(
        model="examples.user_model:small_net",
        data=name,
        data_root=str(root),
        batch=16,
        epochs=21,
        most_steps=2,
        lr=0.05,
        stem="imagenet",
    )
    table = tmp_path / "table.csv"
    measure(asdict(task), [3], [ONE_DEVICE, DDP, OURS], "cpu", 2, str(table))
    rows = read_rows(table)
    assert [(entry.method, entry.baseline, entry.extra["seed"]) for entry in rows] == [
        (ONE_DEVICE, ONE_DEVICE, 3),
        (OURS, ONE_DEVICE, 3),
    ]
    ours = rows[1].extra
    assert ours["layout"]["stages"] * ours["layout"]["replicas"] in (1, 2)
    assert len(ours["probe_ms"]) == 4  # whole, and two stages with 2, 4 and 8 micro-batches
    assert ours["skipped"] == {DDP: "DistributedDataParallel needs two workers"}
    assert 0 <= ours["accuracy"] <= 1
    assert ours["steps_per_epoch"] == 2


def test_a_missing_data_set_is_named_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "measure_in_ranks", lambda *_, **__: pytest.fail("nothing to measure"))
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(command.torch.cuda, "get_device_name", lambda index: "a GPU")
    options = command.Options(data_root=tmp_path, output=tmp_path / "table.csv")
    assert command.main(options) == 3
    said = capsys.readouterr().err
    for data in options.data:
        assert f"{data} is not measured" in said
    assert not options.table.exists()
