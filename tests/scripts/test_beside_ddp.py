"""The baseline beside the demo: it trains what the run trained, and says whichever is faster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import beside_ddp
from tests.ranks import start_processes


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    images = {"class_names": ["a", "b", "c"], "sample_shape": [3, 16, 16]}
    (tmp_path / "run.json").write_text(json.dumps({"images": images, "options": {"device": "cpu"}}))
    summary = {"model": "resnet18", "workers": 2, "batch_size": 5, "step_ms_median": 21.0, "data_ms": 1.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


@pytest.mark.parametrize(
    ("baseline_ms", "said"), [(30.0, "1.50 times as fast"), (16.0, "1.25 times as slow"), (20.0, "1.00 times as fast")]
)
def test_whichever_is_faster_is_said(run_directory, baseline_ms, said):
    line = beside_ddp.compared(beside_ddp.read_run(run_directory), baseline_ms)
    baseline = f"under DistributedDataParallel {baseline_ms:.0f} ms"
    assert line == f"a step: 20 ms, {baseline}: this run is {said}"


@pytest.mark.parametrize(("step_ms", "steps"), [(21.0, 20), (301.0, 10), (9001.0, 5)])
def test_a_slow_machine_times_fewer_steps(run_directory, step_ms, steps):
    path = run_directory / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step_ms_median": step_ms}))
    assert beside_ddp.read_run(run_directory)["timed"] == steps


def forked(function, args, nprocs):
    """In the place of torch's spawn, whose processes import torch anew."""
    with start_processes(in_place, nprocs, function, args) as answers:
        assert {answers.get(timeout=90) for _ in range(nprocs)} == set(range(nprocs))


def in_place(rank, directory, function, args, answers):
    function(rank, *args)
    answers.put(rank)


def test_the_net_of_the_run_is_trained_on_as_many_workers(run_directory, monkeypatch, capfd):
    monkeypatch.setattr(beside_ddp, "spawn", forked)
    monkeypatch.setattr(beside_ddp, "WARM_UP", 0)
    monkeypatch.setattr(beside_ddp, "MOST_TIMED", 5)
    monkeypatch.setattr(sys, "argv", ["beside_ddp.py", str(run_directory)])
    beside_ddp.main()
    assert capfd.readouterr().out.startswith("a step: 20 ms, under DistributedDataParallel ")
