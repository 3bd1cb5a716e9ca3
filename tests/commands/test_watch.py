"""Tests `hybridpar watch`: it says where the page is, serves it, ends by Ctrl-C; and new steps appear in a browser."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import urllib.request

from hybridpar.cli import main
from hybridpar.observe.metrics import MetricsWriter
from tests.commands.test_report import browser, shown, until  # noqa: F401
from tests.run.run_directories import a_run, step_record


@contextlib.contextmanager
def watching(run):
    """The process, and the address of its page."""
    with subprocess.Popen(
        [sys.executable, "-m", "hybridpar", "watch", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, re.search(r"http://127\.0\.0\.1:\d+/\S+", process.stdout.readline())[0]
        finally:
            process.kill()


def test_the_page_is_served_until_ctrl_c(tmp_path):
    with watching(a_run(tmp_path / "a", 5)) as (process, address):
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert b"hybridpar report" in answer.read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "no longer served" in out


def test_a_wrong_request_is_refused(tmp_path, capsys):
    for words, said in (([], "no run is named"), ([str(tmp_path)], "not the directory of a run")):
        assert main(["watch", *words]) == 2
        assert said in capsys.readouterr().err


def test_new_steps_appear_in_the_page_and_what_the_reader_chose_stays(tmp_path, browser):  # noqa: F811
    run = a_run(tmp_path / "a", 20)
    with watching(run) as (process, address):
        window = browser.new_page()
        problems = []
        window.on("pageerror", lambda error: problems.append(str(error)))
        window.goto(address)
        window.get_by_role("button", name=re.compile("Show all")).last.click()
        window.get_by_role("button", name="Zoom in").click()
        until(window, lambda: shown(window)[1] < 20)
        seen = shown(window)
        with MetricsWriter(run, resume_step=20) as writer:
            for step in range(21, 31):
                writer.write_step(step_record(step))
        until(window, lambda: "30 steps" in window.locator("header p").text_content())
        assert shown(window) == seen
        assert window.get_by_role("button", name="Show the first").count() == 1
        assert window.inner_text(".live").startswith("Live")
        process.send_signal(signal.SIGINT)
        until(window, lambda: "does not answer" in window.inner_text(".live"))
        assert problems == []
        window.close()
