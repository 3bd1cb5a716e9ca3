"""Tests the progress lines of a run, letter by letter, as people and scripts read them."""

import io
import math

import pytest
from rich.console import Console

from hybridpar.observe.live import LiveProgress, open_progress
from hybridpar.observe.progress import PlainProgress, Progress
from hybridpar.observe.running import WARM_UP_STEPS, RunningFigures
from hybridpar.observe.text import epoch_line

GOLDEN = """\
model    resnet18, 11,181,642 parameters
data     cifar10
workers  2 on cpu
batch    64 samples per step
steps    20 (2 epochs of 10)
run dir  {run_dir}
allocator: glibc [top_pad]
epoch 1/2  step 4/20  loss 1.0110  lr 0.05  3,200 images/s  4.00 MB sent  ETA 48 s
warning: the loader is slow
epoch 1/2  step 8/20  loss 0.6693  lr 0.05  3,200 images/s  8.00 MB sent  1 skipped  ETA 36 s
epoch 1/2 done  train loss 0.7500  test loss 0.5000  test accuracy 87.50%  30 s
epoch 2/2  step 14/20  loss 0.4005  lr 0.05  3,200 images/s  14.0 MB sent  1 skipped  ETA 18 s
epoch 2/2  step 18/20  loss 0.3115  lr 0.05  3,200 images/s  18.0 MB sent  1 skipped  ETA 6.0 s
checkpoint saved at step 20
epoch 2/2 done  train loss 0.7500  12 s
"""


def test_plain_lines_to_the_letter(info, make_step, make_epoch, clock):
    stream = io.StringIO()
    with PlainProgress(stream, clock=clock) as progress:
        progress.start(info)
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
    assert stream.getvalue() == GOLDEN.format(run_dir=info.run_dir)
    assert stream.getvalue().isascii()


def test_fast_steps_print_a_line_in_ten_seconds(info, make_step, clock):
    stream = io.StringIO()
    progress = PlainProgress(stream, clock=clock)
    progress.start(info)
    header = len(stream.getvalue().splitlines())
    for step in range(1, 1001):
        clock.now += 0.05
        progress.step(make_step(step))
    assert 4 <= len(stream.getvalue().splitlines()) - header <= 5


def test_a_resumed_run_says_where_it_goes_on(info):
    stream = io.StringIO()
    PlainProgress(stream).start(info, done=1234)
    assert stream.getvalue().endswith("resumed after step 1,234\n")


def test_a_reader_that_went_away_does_not_end_the_run(info, make_epoch):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress = PlainProgress(Broken())
    progress.start(info)
    progress.epoch(make_epoch(0))


def test_a_stream_that_cannot_encode_a_name_does_not_end_the_run():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainProgress(stream).message("data bilder-für-größen")
    assert stream.buffer.getvalue() == b"data bilder-f?r-gr??en\n"


def test_the_base_class_shows_nothing(info, make_step, make_epoch, capsys):
    with Progress() as progress:
        progress.start(info)
        progress.step(make_step(1))
        progress.epoch(make_epoch(0))
        progress.warn("unseen")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("terminal", "variables", "form"),
    [
        (True, {"TERM": "xterm"}, LiveProgress),
        (False, {"TERM": "xterm"}, PlainProgress),
        (True, {"TERM": "dumb"}, PlainProgress),
    ],
)
def test_the_form_suits_the_output(terminal, variables, form):
    console = Console(file=io.StringIO(), force_terminal=terminal, _environ=variables)
    assert type(open_progress(console)) is form


@pytest.mark.parametrize("color", ["", "1"])
def test_a_pipe_gets_plain_lines_on_standard_output(capsys, monkeypatch, color):
    monkeypatch.setenv("FORCE_COLOR", color)
    open_progress().message("to the [bold] pipe")
    assert capsys.readouterr().out == "to the [bold] pipe\n"


def test_time_left_ignores_warm_up_and_counts_what_is_between_steps(make_step):
    figures = RunningFigures(steps_total=100, done=40)
    now = 0.0
    for step in range(41, 41 + WARM_UP_STEPS):
        now += 50.0  # compiling
        figures.add_step(make_step(step), now)
        assert figures.seconds_left is None
    for step in range(44, 51):
        now += 2.0  # although step_ms says 20: the rest went to evaluation
        figures.add_step(make_step(step), now)
    assert figures.seconds_left == pytest.approx(50 * 2.0)
    assert figures.fraction == 0.5


def test_loss_is_smoothed_without_bias_and_without_nan(make_step):
    figures = RunningFigures(steps_total=10)
    assert math.isnan(figures.loss)
    figures.add_step(make_step(1, loss=math.nan, skipped=True), 0.0)
    assert math.isnan(figures.loss)
    figures.add_step(make_step(2, loss=4.0), 0.0)
    assert figures.loss == pytest.approx(4.0)
    figures.add_step(make_step(3, loss=2.0), 0.0)
    assert figures.loss == pytest.approx((0.95 * 4 + 2) / 1.95)
    assert figures.skipped == 1


def test_a_run_longer_than_planned_has_nothing_left(make_step):
    figures = RunningFigures(steps_total=5)
    for step in range(1, 9):
        figures.add_step(make_step(step), float(step))
    assert figures.fraction == 1.0
    assert figures.seconds_left == 0.0


def test_a_log_has_a_line_for_everything_that_is_prepared():
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.prepare("loading the data")
    progress.prepare("planning: timing a step of the model")
    assert stream.getvalue() == "loading the data ...\nplanning: timing a step of the model ...\n"


def test_an_epoch_without_a_step_has_no_loss(make_epoch):
    assert "nan" not in epoch_line(make_epoch(0, train_loss=math.nan), 1)
