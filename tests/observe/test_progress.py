"""Tests the display of a run: plain lines as people and scripts read them, and the bar of a terminal."""

import contextlib
import io
import math
import sys

import pytest
from rich.console import Console

from hybridpar.observe.progress import Progress, progress_bar

GOLDEN = """\
model    resnet18
allocator: glibc [top_pad]
epoch 1/2  step 4/20  ETA 48.0 s  loss 1.8165  3,200 images/s  4.0 MB sent
warning: the loader is slow
epoch 1/2  step 8/20  ETA 36.0 s  loss 1.5986  3,200 images/s  8.0 MB sent  1 skipped
epoch 1/2 done  test accuracy 87.50%  test loss 0.5000  train loss 0.7500  30.2 s
epoch 2/2  step 14/20  ETA 18.0 s  loss 1.2216  accuracy 87.50%  3,200 images/s  14.0 MB sent  1 skipped
epoch 2/2  step 18/20  ETA 6.0 s  loss 1.0175  accuracy 87.50%  3,200 images/s  18.0 MB sent  1 skipped
checkpoint saved at step 20
epoch 2/2 done  train loss 0.7500  12.3 s
"""


def test_plain_lines_to_the_letter(make_step, make_epoch, clock, capsys):
    progress = Progress(Console(), clock)
    progress.start(["model    resnet18", "allocator: glibc [top_pad]"], epochs=2, steps=20)
    for step in range(1, 21):
        clock.now += 3
        failed = step == 5
        loss = math.nan if failed else 2 / step
        progress.step(make_step(step, epoch=(step - 1) // 10, skipped=failed, loss=loss))
        if step == 6:
            progress.warn("the loader is slow")
        if step == 10:
            progress.epoch(make_epoch(0, seconds=30.2))
    progress.message("checkpoint saved at step 20")
    progress.epoch(make_epoch(1, test_accuracy=None, test_loss=None))
    assert capsys.readouterr().out == GOLDEN


def test_the_time_left_is_counted_anew_after_a_pause(make_step, clock, capsys):
    progress = Progress(Console(), clock)
    progress.start(["model    resnet18", "allocator: glibc [top_pad]"], epochs=2, steps=20)
    for step in range(1, 11):
        clock.now += 3
        progress.step(make_step(step))
        if step == 5:
            with progress.pause("trying batch sizes"):
                assert capsys.readouterr().out.endswith("trying batch sizes ...\n")
                clock.now += 1000
            progress.steps_total = 16
    first, second = capsys.readouterr().out.splitlines()
    assert "step 6/16  loss" in first
    assert "step 10/16  ETA 18.0 s" in second


def test_an_output_that_went_away_does_not_end_the_run(make_step, make_epoch, clock, monkeypatch):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Broken())
    for is_terminal in (False, True):
        progress = Progress(Console(file=Broken(), force_terminal=is_terminal, _environ={"TERM": "xterm"}), clock)
        progress.prepare("planning")
        progress.start(["model    resnet18", "allocator: glibc [top_pad]"], epochs=2, steps=20)
        clock.now += 60
        progress.step(make_step(1))
        progress.epoch(make_epoch(0))
        progress.close()


def test_a_stream_that_cannot_encode_a_name_does_not_end_the_run(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    Progress(Console()).message("data bilder-für-größen")
    assert stream.buffer.getvalue() == b"data bilder-f?r-gr??en\n"


def test_a_dumb_terminal_has_lines_and_another_worker_nothing(make_step, clock, capsys):
    for progress in (Progress(Console(force_terminal=True, _environ={"TERM": "dumb"}), clock), Progress(clock=clock)):
        progress.prepare("planning")
        progress.step(make_step(1))
        progress.close()
    assert capsys.readouterr().out == "planning ...\nepoch 1/0  step 1/0  loss 2.0000  3,200 images/s  1.0 MB sent\n"


@pytest.mark.parametrize("width", [20, 80, 200])
def test_a_terminal_has_messages_above_one_line_with_a_bar(make_step, make_epoch, clock, width):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, _environ={"TERM": "xterm"}, color_system=None)
    with contextlib.closing(Progress(console, clock)) as progress:
        progress.prepare("planning: timing a step of the model")
        progress.start(["model    resnet18", "allocator: glibc [top_pad]"], epochs=2, steps=20)
        for step in range(1, 11):
            clock.now += 0.5
            progress.step(make_step(step, loss=0.25))
        progress.epoch(make_epoch(0, step=10))
        progress.warn("install hybridpar[report]")
        assert len(stream.getvalue().split("\x1b[2K")[-1].splitlines()[-1]) <= width
    text = stream.getvalue()
    assert "warning: install hybridpar[report]\n" in text
    assert "epoch 1/2 done" in text
    if width == 200:
        bar = "#####....."
        assert f"{bar} epoch 1/2  step 10/20  ETA 5.0 s  loss 0.2500  3,200 images/s  10.0 MB sent" in text


def test_a_bar_shows_nothing_where_there_is_no_terminal(capsys):
    with progress_bar("images", 10) as show:
        show(advance=5)
    assert capsys.readouterr().err == ""
