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


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Opens pages, and checks in the end that none complained or asked for anything but itself."""
    problems, asked, contexts = [], [], []

    def open_page(page, **options):
        contexts.append(browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options}))
        window = contexts[-1].new_page()
        window.on("console", lambda message: problems.append(message.text))
        window.on("pageerror", lambda error: problems.append(str(error)))
        window.on("request", lambda request: asked.append(request.url))
        window.goto(page.as_uri())
        window.wait_for_selector(".chart.loss path.mean")
        return window

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
    assert {address.partition(":")[0] for address in asked} <= {"file", "data"}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A run with everything that a page can show, beside none."""
    place = tmp_path_factory.mktemp("runs")
    write_timeline(place / "trace.json", a_timeline())
    told = {
        **{"predicted_step_ms": 25.0, "predicted_exposed_sync_ms": 5.0, "memory_bytes": 10**9},
        "staleness": {"mean": 1.0, "most": 3, "histogram": {"0": 10, "3": 30}},
    }
    options = {"stages": 2, "timeline": place / "trace.json"}
    run = a_run(place / "<b>run", summary=told, staged=True, codec="onebit", options=options)
    assert main(["report", str(run), "-o", str(place / "page.html")]) == 0
    return place / "page.html"


def until(window, holds):
    """Wait for what the page does in its next frames; its security policy lets no test wait inside of it."""
    for _ in range(500):
        if holds():
            return
        window.wait_for_timeout(20)
    raise AssertionError("the page did not do it in ten seconds")


def shown(window):
    """First and last step that the curves show."""
    plot = window.locator(".chart.loss .plot")
    return [float(plot.get_attribute(f"data-{end}")) for end in ("from", "to")]


def test_every_section_is_there(opened, page):
    window = opened(page)
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


def test_curves_are_zoomed_by_mouse_keys_and_buttons(opened, page):
    window = opened(page)
    plot = window.locator(".chart.loss .plot")
    assert shown(window) == [1, 40]
    box = plot.bounding_box()
    window.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
    window.mouse.down()
    window.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60)
    window.mouse.up()
    until(window, lambda: shown(window)[1] < 30)
    start, end = shown(window)
    assert 10 < start < 13
    assert 22 < end < 25
    assert window.locator(".chart.lr .plot").get_attribute("data-from") == str(start)
    plot.dblclick()
    until(window, lambda: shown(window)[1] == 40)
    plot.focus()
    window.mouse.move(5, 5)
    window.keyboard.press("+")
    until(window, lambda: shown(window)[1] < 40)
    window.keyboard.press("0")
    until(window, lambda: shown(window)[1] == 40)
    window.get_by_role("button", name="Zoom in").click()
    until(window, lambda: shown(window)[1] < 40)
    window.get_by_role("button", name="Show all steps").click()
    until(window, lambda: shown(window)[1] == 40)
    window.get_by_role("combobox").select_option("t")
    until(window, lambda: shown(window)[1] < 2)  # seconds
    window.get_by_role("checkbox").check()
    until(window, lambda: window.locator(".chart.loss .tick").first.text_content() != "0")
