"""Tests the metrics file: one JSON object for each step, also after crashes, resumes and full disks."""

import json
import math
from contextlib import closing
from pathlib import Path

import pytest

from hybridpar.errors import RunDirectoryError
from hybridpar.observe.metrics import METRICS_FILE, MetricsWriter, read_metrics
from hybridpar.observe.records import STEP_FIGURES


def rows(run_dir: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (run_dir / METRICS_FILE).read_text().splitlines()]


def test_one_object_per_step_with_the_promised_keys(tmp_path, make_step, make_epoch):
    with closing(MetricsWriter(tmp_path / "new" / "run")) as writer:
        writer.write(make_step(1, grad_norm=1.5, loss=1 / 3, step_ms=20.00049, bytes_sent=2**50))
        writer.write(make_epoch(0, test_accuracy=None))
    step, epoch = rows(tmp_path / "new" / "run")
    assert list(step) == [row.name for row in STEP_FIGURES]
    assert (step["loss"], step["step_ms"], step["bytes_sent"]) == (1 / 3, 20.0, 2**50)
    steps = read_metrics(tmp_path / "new" / "run").steps
    assert (steps["loss"][0], steps["bytes_sent"][0]) == (1 / 3, 2**50)
    assert step["skipped"] is False
    figures = {"test_accuracy": None, "test_loss": 0.5, "train_loss": 0.75, "seconds": 12.3}
    average = {"ema_test_accuracy": None, "ema_test_loss": None}
    assert epoch == {"event": "epoch", "epoch": 0, "step": 10, **figures, **average}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_json_does_not_know_is_null(tmp_path, make_step, make_epoch, bad):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(make_step(1, loss=bad, grad_norm=bad, step_ms=bad, lr=bad))
        writer.write(make_epoch(0, train_loss=bad, test_loss=bad))
    step, epoch = rows(tmp_path)
    assert [step[key] for key in ("loss", "grad_norm", "step_ms", "lr", "images_per_second")] == [None] * 5
    assert epoch["train_loss"] is epoch["test_loss"] is None
    table = read_metrics(tmp_path)
    assert math.isnan(table.steps["loss"][0])
    assert math.isnan(table.epochs[0].train_loss)


def test_a_resumed_run_has_each_step_once(tmp_path, make_step, make_epoch):
    with closing(MetricsWriter(tmp_path)) as writer:
        for step in range(1, 13):
            writer.write(make_step(step, loss=1.0))
            if step == 10:
                writer.write(make_epoch(0))
    with closing(MetricsWriter(tmp_path, resume_step=10)) as writer:
        for step in range(11, 14):
            writer.write(make_step(step, loss=7.0))
    steps = [row for row in rows(tmp_path) if "event" not in row]
    assert [row["step"] for row in steps] == list(range(1, 14))
    assert [row["loss"] for row in steps] == [1.0] * 10 + [7.0] * 3
    assert [row["step"] for row in rows(tmp_path) if "event" in row] == [10]


@pytest.mark.parametrize(("lost", "left"), [(20, [1, 2]), (1, [1, 2])])
def test_a_line_cut_by_a_crash_does_not_spoil_the_next(tmp_path, make_step, lost, left):
    """Also a whole line that lacks its newline only."""
    with closing(MetricsWriter(tmp_path)) as writer:
        for step in (1, 2, 3):
            writer.write(make_step(step))
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-lost])
    assert read_metrics(tmp_path).steps["step"].tolist() == left
    with closing(MetricsWriter(tmp_path, resume_step=3)) as writer:
        writer.write(make_step(4))
    assert [row["step"] for row in rows(tmp_path)] == [*left, 4]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_is_said_once(tmp_path, make_step):
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    with pytest.raises(RunDirectoryError) as caught:
        writer.write(make_step(1))
    assert METRICS_FILE in caught.value.what
    assert "disk is full" in caught.value.why
    writer.write(make_step(2))  # an orderly end must not meet the error again
    writer.close()


def test_lines_of_later_versions_and_foreign_lines_are_passed_over(tmp_path):
    lines = ['{"step": 1, "loss": 2.0, "new": [1]}', '{"step": 2, "event": "future"}', "[1]", "7", '{"loss": 1}', "{"]
    (tmp_path / METRICS_FILE).write_text("\n".join(lines) + "\n")
    table = read_metrics(tmp_path)
    assert table.steps["step"].tolist() == [1]
    assert math.isnan(table.steps["lr"][0])
    assert table.epochs == ()


def test_of_two_lines_for_a_step_or_epoch_the_later_counts(tmp_path, make_step, make_epoch):
    with closing(MetricsWriter(tmp_path)) as writer:
        for step, loss in ((1, 5.0), (2, 5.0), (1, 6.0), (3, 5.0)):
            writer.write(make_step(step, loss=loss))
        writer.write(make_epoch(0, test_accuracy=0.1))
        writer.write(make_epoch(0, test_accuracy=0.2))
    table = read_metrics(tmp_path)
    assert table.steps["step"].tolist() == [1, 2, 3]
    assert table.steps["loss"].tolist() == [6.0, 5.0, 5.0]
    assert [epoch.test_accuracy for epoch in table.epochs] == [0.2]
