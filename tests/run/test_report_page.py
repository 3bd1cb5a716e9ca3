"""Tests what the report page says of runs: whole ones, several, unfinished and damaged."""

from __future__ import annotations

import os
import re

from plotly.graph_objects import Figure

from hybridpar.observe.timeline_file import write_timeline
from hybridpar.run.report_page import page_parts, read_runs
from tests.observe.timelines import a_timeline
from tests.run.run_directories import a_run


def text_of(*directories):
    return "\n".join(part for part in page_parts(read_runs(directories)) if isinstance(part, str))


def figures_of(*directories):
    return [part for part in page_parts(read_runs(directories)) if isinstance(part, Figure)]


def rows_of(text):
    """The rows of all tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in rows]


def test_a_run_shows_its_result_its_prediction_and_where_its_time_went(tmp_path):
    figures = {"predicted_step_ms": 25.0, "predicted_exposed_sync_ms": 5.0, "memory_bytes": 2 * 10**9}
    run = a_run(tmp_path / "a", summary=figures, staged=True)
    text = text_of(run)
    rows = rows_of(text)
    assert ["state", "finished"] in rows
    assert ["test accuracy", "86.47%"] in rows
    assert ["memory", "2.00 GB"] in rows
    assert ["--data", "digits"] in rows
    assert ["directory", str(run)] in rows
    assert re.search(r"predicted +25\.00 ms +measured +21\.00 ms +-16% +step, without data", text)
    assert re.search(r"5\.00 ms +measured +3\.00 ms +-40% +exposed sync", text)
    curves, parts = figures_of(run)
    assert curves.layout.annotations[0].text == "Loss"
    assert [bar.name for bar in parts.data] == ["compute", "exposed sync", "waiting for data", "other"]


def test_a_warning_about_the_prediction_is_shown(tmp_path):
    run = a_run(tmp_path / "a", summary={"prediction_warning": "the machine was <busy>"})
    assert "<strong>the machine was &lt;busy&gt;</strong>" in text_of(run)


def test_a_recorded_timeline_is_drawn_and_a_missing_one_is_named(tmp_path):
    trace = tmp_path / "trace.json"
    run = a_run(tmp_path / "a", summary={}, staged=True, options={"stages": 2, "timeline": trace})
    assert "There is no timeline to show" in text_of(run)
    write_timeline(trace, a_timeline())
    assert len(figures_of(run)) == 3
    assert ["clocks", "one for all workers"] in rows_of(text_of(run))


def test_several_runs_are_compared_by_results_and_by_options_that_differ(tmp_path):
    first = a_run(tmp_path / "first", summary={}, options={"lr": 0.1})
    second = a_run(tmp_path / "second", summary={"memory_bytes": 10**9}, codec="onebit", options={"lr": 0.05})
    text = text_of(first, second)
    rows = rows_of(text.partition("<h2>")[0])
    assert rows[0] == ["", "first", "second"]
    assert ["test accuracy", "86.47%", "86.47%"] in rows
    assert ["memory", "-", "1.00 GB"] in rows
    assert ["--lr", "0.1", "0.05"] in rows
    assert ["--compress", "none", "onebit"] in rows
    assert not {"--data", "--run-dir", "model"} & {row[0] for row in rows}
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["first", "second"]
    curves, parts = figures_of(first, second)
    assert [trace.name for trace in curves.data if trace.showlegend] == ["first", "second"]
    assert parts.data[0].y == ("first", "second")


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    first, second = (a_run(tmp_path / name / "run", 3) for name in "ab")
    assert [run.name for run in read_runs([first, second])] == [str(first), str(second)]


def test_a_run_that_goes_on_shows_its_figures_so_far(tmp_path):
    run = a_run(tmp_path / "a", 12, staged=True)
    (known,) = read_runs([run])
    assert known.notes == ()
    text = text_of(run)
    assert ["state", "running"] in rows_of(text)
    assert "running after 12 steps" in text
    assert "2 workers" in text
    assert re.search(r"predicted +25\.00 ms", text)
    for file in run.iterdir():
        os.utime(file, (0, 0))
    text = text_of(run)
    assert ["state", "stopped"] in rows_of(text)
    assert "figures are of its steps so far" in text


def test_the_summary_of_a_run_that_was_resumed_since_is_not_taken_for_its_end(tmp_path):
    rows = rows_of(text_of(a_run(tmp_path / "a", 20, summary={"steps": 10, "test_accuracy": 0.125})))
    assert ["state", "running"] in rows
    assert ["test accuracy", "63.21%"] in rows


def test_damaged_files_are_named_and_left_out(tmp_path):
    run = a_run(tmp_path / "a", staged=True)
    (run / "plan.json").write_text('{"version": 0}')
    (run / "summary.json").write_text("[")
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 41, "loss": "0.1"}\n{"step": 42, "los')
    (known,) = read_runs([run])
    assert "plan.json" in known.notes[0]
    curves, _ = figures_of(run)
    assert max(curves.data[0].x) == 40


def test_a_run_without_steps_says_so(tmp_path):
    run = a_run(tmp_path / "a", 0)
    assert "<strong>No step is recorded yet.</strong>" in text_of(run)
    assert figures_of(run) == []
