"""Tests `hybridpar report`: what its page shows of whole, unfinished and damaged runs, and what it refuses.

One test needs playwright and Chromium, and is skipped without them.
"""

from __future__ import annotations

import re
import shutil
import sys

import pytest
from plotly.graph_objects import Figure

from hybridpar.cli import main
from hybridpar.commands.runs import page_parts, read_runs
from hybridpar.errors import UsageError
from tests.run.run_directories import a_run


def test_a_page_is_written_and_written_again(tmp_path, capsys):
    run, page = a_run(tmp_path / "a", 3), tmp_path / "page.html"
    for _ in range(2):
        assert main(["report", str(run), "-o", str(page)]) == 0
        assert f"report written to {page}" in capsys.readouterr().out
    assert 4_000_000 < page.stat().st_size < 6_000_000
    text = page.read_text()
    assert '"name":"a"' in text
    assert "http://" not in text.rpartition("<h1>")[2]


def test_a_wrong_request_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = a_run(tmp_path / "a", 1)
    for name in ("mine.txt", "mine.html"):
        (tmp_path / name).write_text("mine")
    for words, message in (
        ([], "no run is named"),
        (["none"], "not the directory of a run"),
        ([str(run), "-o", "mine.txt"], "Use mine.html"),
        ([str(run), "-o", "none/page.html"], "no directory"),
        ([str(run), "-o", "mine.html"], "--output mine.html is there already, and is no page of hybridpar"),
    ):
        assert main(["report", *words]) == 2
        assert message in capsys.readouterr().err
    assert {(tmp_path / name).read_text() for name in ("mine.txt", "mine.html")} == {"mine"}


def test_without_plotly_one_error_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["report", str(a_run(tmp_path / "a", 1)), "-o", str(tmp_path / "page.html")]) == 2
    message = capsys.readouterr().err
    assert "page.html needs plotly, which is not installed" in message
    assert "pip install 'hybridpar[report]'" in message
    assert not (tmp_path / "page.html").exists()


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
    assert ["memory", "2.0 GB"] in rows
    assert ["directory", str(run)] in rows
    assert ["step, without data", "21.00 ms        predicted 25.00 ms, -16%"] in rows
    assert "<strong>the machine was &lt;busy&gt;</strong>" in text
    (curves,) = figures_of(run)
    assert curves.layout.annotations[0].text == "Loss"


def test_several_runs_are_compared_by_results_and_by_options_that_differ(tmp_path):
    first = a_run(tmp_path / "first", summary={}, options={"lr": 0.1})
    second = a_run(tmp_path / "second", summary={"memory_bytes": 10**9}, codec="onebit", options={"lr": 0.05})
    text = text_of(first, second)
    rows = rows_of(text.partition("<h2>")[0])
    assert rows[0] == ["", "first", "second"]
    assert ["test accuracy", "86.47%", "86.47%"] in rows
    assert ["memory", "-", "1.0 GB"] in rows
    assert ["--lr", "0.1", "0.05"] in rows
    assert ["--compress", "none", "onebit"] in rows
    assert not {"--data", "--run-dir", "model"} & {row[0] for row in rows}
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["first", "second"]
    (curves,) = figures_of(first, second)
    entries = [trace for trace in curves.data if trace.showlegend]
    assert [trace.name for trace in entries] == ["first", "second"]
    assert len({trace.line.color for trace in entries}) == 2


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


def test_the_page_opens_in_a_browser_draws_its_figures_and_leads_nowhere(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("there is no Chromium")
    runs = [a_run(tmp_path / "<b>run", summary={}), a_run(tmp_path / "plain", summary={})]
    assert main(["report", *map(str, runs), "-o", str(tmp_path / "page.html")]) == 0
    problems, asked = [], []
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        window = chromium.new_page(viewport={"width": 1200, "height": 900})
        window.on("console", lambda message: problems.append(message.text))
        window.on("pageerror", lambda error: problems.append(str(error)))
        window.on("request", lambda request: asked.append(request.url))
        window.goto((tmp_path / "page.html").as_uri())
        window.wait_for_function("document.querySelectorAll('.js-plotly-plot .legend').length == 1")
        (curves,) = window.locator(".js-plotly-plot").all()
        assert curves.locator("path.js-line").count() > 10
        assert window.locator("a[href^=http]").count() == window.locator("h2 b").count() == 0
        chromium.close()
    assert problems == []
    assert {address.partition(":")[0] for address in asked} <= {"file", "data", "blob"}
