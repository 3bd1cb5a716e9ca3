"""Tests what the report page shows of runs: whole ones, several, unfinished, damaged, and of an older version."""

from __future__ import annotations

import os

from hybridpar.observe import write_timeline
from hybridpar.observe.page import page_json
from hybridpar.run.page_data import page_data
from tests.observe.timelines import a_timeline
from tests.run.run_directories import a_run


def shown(*directories):
    data = page_data(directories)
    page_json(data)  # all of it is JSON
    return data


def sections(run):
    return {section["key"]: section["blocks"] for section in run["sections"]}


def test_a_run_with_stages_shows_its_prediction_its_plan_and_the_step_of_the_plan(tmp_path):
    told = {"predicted_step_ms": 25.0, "predicted_exposed_sync_ms": 5.0, "memory_bytes": 2 * 10**9}
    (run,) = shown(a_run(tmp_path / "a", summary=told, staged=True))["runs"]
    found = sections(run)
    assert run["state"] == "finished"
    assert ["Test accuracy", "86.47%", ""] in run["tiles"]
    assert [part[0] for part in found["step"][0]["parts"]] == ["compute", "exposed sync", "waiting for data", "other"]
    assert sum(part[2] for part in found["step"][0]["parts"]) == 100
    assert [row[0] for row in found["predicted"][0]["rows"]] == ["step, without data", "exposed sync"]
    assert [row[1] for row in found["plan"][1]["rows"]] == ["a1 to a2 (2)", "b1 to b2 (2)"]
    assert found["timeline"][0]["type"] == "lanes"
    assert len(found["timeline"][0]["panels"]) == 1
    assert ["most of any worker", "2.00 GB"] in found["memory"][0]["rows"]


def test_a_recorded_timeline_takes_the_place_of_the_plans(tmp_path):
    trace = tmp_path / "trace.json"
    run = a_run(tmp_path / "a", summary={}, staged=True, options={"stages": 2, "timeline": trace})
    assert "There is no timeline to show" in sections(shown(run)["runs"][0])["timeline"][0]["text"]
    write_timeline(trace, a_timeline())
    lanes, facts = sections(shown(run)["runs"][0])["timeline"]
    assert len(lanes["panels"]) == 2
    assert ["clocks", "one for all workers"] in facts["rows"]


def test_gradients_have_the_table_of_codecs_and_the_residual(tmp_path):
    (run,) = shown(a_run(tmp_path / "a", summary={"compression_ratio": 26.0}, codec="onebit"))["runs"]
    facts, table = sections(run)["gradients"]
    assert facts["rows"] == [["residual norm", "last 2, largest 2, measured in 10 of the steps"]]
    assert (len(table["rows"]), table["first"]) == (14, 10)
    assert table["rows"][0] == ["layer13.weight", "conv", "1,013", "onebit", "4.01 kB", "150 B", "26.8x", "4.625"]
    assert (table["head"][-1], table["rows"][1][-1]) == ("not sent yet (norm)", "")
    assert ["Compression", "26.0x", "less bytes of gradients"] in run["tiles"]


def test_several_runs_are_compared_by_results_and_by_options_that_differ(tmp_path):
    one = a_run(tmp_path / "one", summary={}, options={"lr": 0.1})
    other = a_run(tmp_path / "other", summary={"test_accuracy": 0.99}, codec="onebit", options={"lr": 0.05})
    data = shown(one, other)
    table = data["comparison"]
    rows = {row[0]: row[1:] for row in table["rows"]}
    assert table["head"] == ["", "one", "other"]
    assert rows["--lr"] == ["0.1", "0.05"]
    assert rows["--compress"] == ["none", "onebit"]
    assert "--data" not in rows
    assert not {"--run-dir", "model"} & rows.keys()
    assert table["best"][list(rows).index("Test accuracy")] == 2
    assert {line["run"] for line in data["charts"][0]["lines"]} == {0, 1}
    assert shown(one)["comparison"] is None


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    first, second = (a_run(tmp_path / name / "run", 3) for name in "ab")
    assert [run["name"] for run in shown(first, second)["runs"]] == [str(first), str(second)]


def test_a_run_that_goes_on_shows_its_figures_so_far(tmp_path):
    run = a_run(tmp_path / "a", 12, staged=True)
    (told,) = shown(run)["runs"]
    assert (told["state"], told["notes"]) == ("running", [])
    assert "2 workers" in told["about"]
    assert "12 steps" in told["about"]
    assert sections(told)["predicted"][0]["rows"][0][:2] == ["step, without data", 25.0]
    for file in run.iterdir():
        os.utime(file, (0, 0))
    (told,) = shown(run)["runs"]
    assert told["state"] == "stopped"
    assert "left no summary" in told["notes"][0]


def test_the_summary_of_a_run_that_was_resumed_since_is_not_taken_for_its_end(tmp_path):
    run = a_run(tmp_path / "a", 20, summary={"steps": 10, "test_accuracy": 0.125})
    (told,) = shown(run)["runs"]
    assert told["state"] == "running"
    assert told["tiles"][0][1] == "63.21%"


def test_damaged_files_are_named_and_left_out(tmp_path):
    run = a_run(tmp_path / "a", staged=True, codec="onebit")
    (run / "plan.json").write_text('{"version": 0}')
    (run / "compress.csv").write_text("layer\nx\n")
    (run / "summary.json").write_text("[")
    (told,) = shown(run)["runs"]
    assert "plan.json" in told["notes"][0]
    assert "compress.csv cannot be read" in sections(told)["gradients"][-1]["text"]
    assert "plan" not in sections(told)
