"""Tests the progress lines of a run, letter by letter, as people and scripts read them."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from hybridpar.observe.live import LiveProgress, open_progress
from hybridpar.observe.progress import PlainProgress
from hybridpar.observe.text import describe_run

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


def test_a_pause_is_announced_and_not_in_the_time_left(info, make_step, clock):
    stream = io.StringIO()
    progress = PlainProgress(stream, clock=clock)
    progress.start(info)
    for step in range(1, 7):
        clock.now += 3
        progress.step(make_step(step))
        if step == 5:
            with progress.pause("trying batch sizes"):
                assert stream.getvalue().endswith("trying batch sizes ...\n")
                clock.now += 1000
            progress.figures.steps_total = 16
            assert progress.figures.seconds_left == pytest.approx(33)
    assert stream.getvalue().endswith("step 6/16  loss 0.7735  lr 0.05  3,200 images/s  6.00 MB sent  ETA 30 s\n")


def test_fast_steps_print_a_line_in_ten_seconds(info, make_step, clock):
    stream = io.StringIO()
    progress = PlainProgress(stream, clock=clock)
    progress.start(info)
    header = len(stream.getvalue().splitlines())
    for step in range(1, 1001):
        clock.now += 0.05
        progress.step(make_step(step))
    assert 4 <= len(stream.getvalue().splitlines()) - header <= 5


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


@pytest.mark.parametrize(
    ("replicas", "notes", "said"),
    [
        (1, (), "64 samples per step"),
        (2, (), "64 samples per step, 32 on each of 2 replicas"),
        (3, (), "64 samples per step, 21 or 22 on each of 3 replicas"),
        (2, ("shares   1 : 3 of every batch",), "64 samples per step"),
    ],
)
def test_the_start_says_what_each_replica_gets_of_a_batch(info, replicas, notes, said):
    assert dict(describe_run(replace(info, replicas=replicas, notes=notes)))["batch"] == said
