"""The baseline beside the demo: it trains what the run trained, and says whichever is faster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import beside_ddp


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
    baseline = f"{baseline_ms:.0f} ms under DistributedDataParallel"
    assert line == f"a step of resnet18 on 2 workers: 20 ms in this run, {baseline} ({said})"


def test_the_net_of_the_run_is_trained_on_as_many_workers(run_directory, monkeypatch, capfd):
    monkeypatch.setattr(beside_ddp, "WARM_UP", 1)
    monkeypatch.setattr(sys, "argv", ["beside_ddp.py", str(run_directory)])
    beside_ddp.main()
    assert capfd.readouterr().out.startswith("a step of resnet18 on 2 workers: 20 ms in this run, ")
