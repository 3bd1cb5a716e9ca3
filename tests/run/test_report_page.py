"""Tests what the report page says of runs: whole ones, several, unfinished and damaged."""

from __future__ import annotations

import re

import pytest
from plotly.graph_objects import Figure

from hybridpar.errors import UsageError
from hybridpar.observe.timeline import write_timeline
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
    warning = "the machine was <busy>"
    figures = {"predicted_step_ms": 25.0, "predicted_exposed_sync_ms": 5.0, "memory_bytes": 2 * 10**9}
    run = a_run(tmp_path / "a", summary={**figures, "prediction_warning": warning}, staged=True)
    text = text_of(run)
    rows = rows_of(text)
    assert ["state", "finished"] in rows
    assert ["test accuracy", "86.47%"] in rows
    assert ["memory", "2.00 GB"] in rows
    assert ["directory", str(run)] in rows
    assert re.search(r"predicted +25\.00 ms +measured +21\.00 ms +-16% +step, without data", text)
    assert "<strong>the machine was &lt;busy&gt;</strong>" in text
    (curves,) = figures_of(run)
    assert curves.layout.annotations[0].text == "Loss"


def test_a_recorded_timeline_is_drawn_and_a_missing_one_is_named(tmp_path):
    trace = tmp_path / "trace.json"
    run = a_run(tmp_path / "a", summary={}, staged=True, options={"stages": 2, "timeline": trace})
    assert "There is no timeline to show" in text_of(run)
    write_timeline(trace, a_timeline())
    assert len(figures_of(run)) == 2
    assert "clocks: one for all workers" in text_of(run)


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
    (curves,) = figures_of(first, second)
    assert [trace.name for trace in curves.data if trace.showlegend] == ["first", "second"]


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    first, second = (a_run(tmp_path / name / "run", 3) for name in "ab")
    assert list(read_runs([first, second])) == [str(first), str(second)]
    with pytest.raises(UsageError, match="named twice"):
        read_runs([first, first])


def test_a_run_without_a_report_shows_its_figures_so_far(tmp_path):
    run = a_run(tmp_path / "a", 12)
    assert ["state", "no report"] in rows_of(text_of(run))
    assert "12 steps are recorded so far" in text_of(run)
    resumed = rows_of(text_of(a_run(tmp_path / "b", 20, summary={"steps": 10, "test_accuracy": 0.125})))
    assert ["state", "no report"] in resumed, "a summary of the first part is not taken for its end"
    assert ["test accuracy", "63.21%"] in resumed


def test_damaged_files_are_left_out(tmp_path):
    run = a_run(tmp_path / "a", staged=True)
    (run / "summary.json").write_text("[")
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 41, "loss": "0.1"}\n{"step": 42, "los')
    (curves,) = figures_of(run)
    assert max(curves.data[0].x) == 40


def test_a_run_without_steps_says_so(tmp_path):
    run = a_run(tmp_path / "a", 0)
    assert "0 steps are recorded so far" in text_of(run)
    assert figures_of(run) == []
