"""Tests `hybridpar show`: traces, plans, run directories, and the refusal of other files."""

from __future__ import annotations

import contextlib
import io

import pytest

from hybridpar.cli import main
from hybridpar.commands.show import Show, run_show
from hybridpar.errors import UsageError
from hybridpar.observe.timeline import write_timeline
from hybridpar.plan import Pipeline, StepFigures
from tests.observe.timelines import a_timeline
from tests.run import run_directories


def shown(path, draw=None):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert run_show(Show(file=path, draw=draw), []) == 0
    return text.getvalue()


def a_plan(**sections):
    return run_directories.a_plan().model_copy(update=sections)


def test_a_trace_is_printed_and_drawn(tmp_path):
    write_timeline(tmp_path / "trace.json", a_timeline())
    text = shown(tmp_path / "trace.json", tmp_path / "page.html")
    assert "2 stages x 2 replicas" in text
    assert "predicted:" in text
    assert "measured, step 5" in (tmp_path / "page.html").read_text()


def test_a_plan_is_printed_with_what_it_predicts(tmp_path):
    predicted = StepFigures(step_ms=25.0, bubble=0.2, bytes_sent_per_step=2_500_000, peak_saved_bytes=10**7)
    recomputing = Pipeline(schedule="1f1b", micro_batches=4, recompute=(0,))
    a_plan(pipeline=recomputing, predicted=predicted).save(tmp_path / "plan.json")
    text = shown(tmp_path / "plan.json", tmp_path / "page.html")
    assert "net: 2 stages" in text
    assert "plan      2 stages, 1 replica, 4 micro-batches, 1f1b, stages 0 computed again" in text
    assert "predicted  25.00 ms  step, without data" in text
    assert "predicted  25.00 ms  compute" in text
    assert "predicted    2.5 MB  sent per step" in text
    page = (tmp_path / "page.html").read_text()
    assert "predicted:" in page
    assert "the step takes 25.0 ms with exchange and update" in page


def test_a_plan_without_a_schedule_is_printed_but_not_drawn(tmp_path):
    a_plan(pipeline=None, predicted=None).save(tmp_path / "plan.json")
    assert "2 stages" in shown(tmp_path / "plan.json")
    with pytest.raises(UsageError, match="no schedule to draw"):
        shown(tmp_path / "plan.json", tmp_path / "page.html")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read") as caught:
        shown(tmp_path / "missing.json")
    assert "Name a run directory, a plan" in caught.value.fix
    (tmp_path / "a.json").write_text('{"traceEvents": []}')
    with pytest.raises(UsageError, match="not a trace of hybridpar"):
        shown(tmp_path / "a.json")


def a_run(directory, **options):
    """A run of four steps with a checkpoint."""
    run_directories.a_run(directory, 4, **options)
    (directory / "checkpoints" / "step-4").mkdir(parents=True)
    (directory / "checkpoints" / "step-4" / "manifest.json").write_text("{}")
    return directory


def test_a_run_directory_is_shown_with_its_result_and_its_checkpoints(tmp_path):
    best = {"step": 4, "test_accuracy": 0.5, "metric": "test_accuracy", "checkpoint": "checkpoints/step-4"}
    text = shown(a_run(tmp_path / "run", summary={"best": best, "test_accuracy": 0.5, "best_test_accuracy": 0.5}))
    assert "finished" in text
    assert "checkpoints/step-4, by test_accuracy" in text
    assert "checkpoint  " in text


def test_a_run_without_a_report_says_so(tmp_path):
    text = shown(a_run(tmp_path / "run"))
    assert "resnet18 on digits, without a report" in text
    assert "4 steps are recorded" in text
    assert "checkpoints/step-4" in text.replace("\n", "")


def test_a_directory_of_something_else_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not the directory of a run"):
        shown(tmp_path)


def test_the_command(tmp_path, capsys):
    a_plan().save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    assert "2 stages" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "plan.json"), "--draw", str(tmp_path / "a.gif")]) == 2
    assert "a.html" in capsys.readouterr().err
    (tmp_path / "mine.html").write_text("mine")
    assert main(["show", str(tmp_path / "plan.json"), "--draw", str(tmp_path / "mine.html")]) == 2
    assert "is no page of hybridpar" in capsys.readouterr().err
    assert (tmp_path / "mine.html").read_text() == "mine"
