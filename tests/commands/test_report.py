"""Tests `hybridpar report`: what it writes and refuses; and its page in a browser, where there is one.

The browser tests need playwright and Chromium, and are skipped without them.
"""

from __future__ import annotations

import shutil

import pytest

from hybridpar.cli import main
from hybridpar.observe import write_timeline
from tests.observe.timelines import a_timeline
from tests.run.run_directories import a_run


def test_a_page_is_written_and_written_again(tmp_path, capsys):
    run, page = a_run(tmp_path / "a", 3), tmp_path / "page.html"
    for _ in range(2):
        assert main(["report", str(run), "-o", str(page)]) == 0
        assert f"report written to {page}" in capsys.readouterr().out
    assert 30_000 < page.stat().st_size < 100_000


def test_what_the_page_cannot_show_is_said(tmp_path, capsys):
    run = a_run(tmp_path / "a", 0)
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert "a: No step is recorded yet." in capsys.readouterr().out


def test_a_wrong_request_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = a_run(tmp_path / "a", 1)
    (tmp_path / "mine.txt").write_text("mine")
    for words, said in (
        ([], "no run is named"),
        (["none"], "not the directory of a run"),
        ([str(run), str(run)], "named twice"),
        ([str(run), "-o", "mine.txt"], "is no report"),
        ([str(run), "-o", "none/page.html"], "no folder"),
    ):
        assert main(["report", *words]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"


# ------------------------------------------------------------------------------------------------------------- browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def page(tmp_path):
    """The page of a run with everything that a page can show."""
    write_timeline(tmp_path / "trace.json", a_timeline())
    told = {
        **{"predicted_step_ms": 25.0, "predicted_exposed_sync_ms": 5.0, "memory_bytes": 10**9},
        "staleness": {"mean": 1.0, "most": 3, "histogram": {"0": 10, "3": 30}},
    }
    options = {"stages": 2, "timeline": tmp_path / "trace.json"}
    run = a_run(tmp_path / "<b>run", summary=told, staged=True, codec="onebit", options=options)
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    return tmp_path / "page.html"


@pytest.fixture
def window(page):
    """A page in a browser; in the end it has not complained, nor asked for anything but itself."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("there is no Chromium")
    problems, asked = [], []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": 1200, "height": 900})
        window.on("console", lambda message: problems.append(message.text))
        window.on("pageerror", lambda error: problems.append(str(error)))
        window.on("request", lambda request: asked.append(request.url))
        window.goto(page.as_uri())
        window.wait_for_selector(".chart.loss path.mean")
        yield window
        browser.close()
    assert problems == []
    assert {address.partition(":")[0] for address in asked} <= {"file", "data"}


def test_every_section_is_there(window):
    assert window.inner_text("h1") == "<b>run"
    assert window.title().startswith("<b>run")
    titles = [
        *("Curves", "Where the time of a step went", "Predicted beside measured", "Plan", "A step on its lanes"),
        *("Gradients", "Staleness", "Memory", "Environment and options"),
    ]
    assert window.locator("section > h2").all_inner_texts() == titles
    assert window.locator("nav a").count() == len(titles)
    assert window.locator(".chart").count() == 6
    assert window.locator(".lanes svg").count() == 2
    assert window.locator("svg[role=img]:not([aria-label])").count() == 0
    assert window.locator(".bars div").count() == 4
    window.locator(".lanes rect.F").first.hover()
    assert window.locator(".readout").inner_text().startswith("F0 stage 0: 10 ms")
    codecs = window.locator("#gradients-0 tr:visible")
    assert codecs.count() == 11
    window.get_by_role("button", name="Show all 14").click()
    assert codecs.count() == 15
