"""Tests the progress bar on a terminal, by what an emulated screen shows after all control codes."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from hybridpar.observe.live import MOST_COLUMNS, LiveProgress

CONTROL = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|\r|\n|[^\x1b\r\n]+")


class Screen:
    """The control codes that rich's live display sends: carriage return, line feed, cursor up, erase line."""

    def __init__(self, width: int) -> None:
        self.lines = [""]
        self.row = self.column = 0
        self.width = width
        self.widest = 0

    def play(self, text: str) -> list[str]:
        for match in CONTROL.finditer(text):
            argument, code = match.groups()
            if match.group() == "\r":
                self.column = 0
            elif match.group() == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif code == "A":
                self.row -= int(argument or 1)
            elif code == "K":
                self.lines[self.row] = ""
            elif code is None:
                line = self.lines[self.row].ljust(self.column)
                self.column += len(match.group())
                self.lines[self.row] = line[: self.column - len(match.group())] + match.group() + line[self.column :]
                self.widest = max(self.widest, self.column)
            else:
                assert code in "mhl", f"unexpected control code {match.group()!r}"
        return [line.rstrip() for line in self.lines]


def terminal(width: int, encoding: str = "utf-8") -> tuple[Console, io.TextIOWrapper]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True, newline="")
    return Console(file=stream, force_terminal=True, width=width, height=40, _environ={"TERM": "xterm"}), stream


def sent(stream: io.TextIOWrapper) -> str:
    return stream.buffer.getvalue().decode(stream.encoding)


def test_eighty_columns_to_the_letter(info, make_step, make_epoch, clock):
    console, stream = terminal(80)
    short = replace(info, run_dir="runs/one", steps_total=2000, steps_per_epoch=1000)
    with LiveProgress(console, clock=clock) as progress:
        progress.start(short)
        for step in range(1, 1001):
            clock.now += 0.5
            progress.step(make_step(step, loss=0.25, skipped=step == 7))
        progress.epoch(make_epoch(0, step=1000))
        progress.message("checkpoint saved at step 1000")
        progress.warn("install hybridpar[plots]")
        progress.step(make_step(1001, epoch=1, loss=0.25))
    screen = Screen(80)
    assert screen.play(sent(stream)) == [
        "model    resnet18, 11,181,642 parameters",
        "data     cifar10",
        "workers  2 on cpu",
        "batch    64 samples per step",
        "steps    2,000 (2 epochs of 1,000)",
        "run dir  runs/one",
        "allocator: glibc [top_pad]",
        "epoch 1/2 done  train loss 0.7500  test loss 0.5000  test accuracy 87.50%  12 s",
        "checkpoint saved at step 1000",
        "warning: install hybridpar[plots]",
        "epoch 2/2  step 1,001/2,000 ━━━━━━━━━━━━━━━━━─────────────────  50%  ETA 8:19",
        "loss 0.2500  accuracy 87.50%  3,200 images/s  1.00 GB sent  1 skipped",
        "",
    ]
    assert screen.widest <= 80


@pytest.mark.parametrize("width", [20, 40, 80, 100, 200])
def test_no_line_of_the_bar_is_wider_than_the_terminal_or_a_hundred_columns(info, make_step, clock, width):
    console, stream = terminal(width)
    long = replace(info, epochs=300, steps_total=1_500_000, run_dir="r", notes=(), model="m", parameters=1, data="d")
    with LiveProgress(console, clock=clock) as progress:
        progress.start(long)
        for step in range(1, 20):
            clock.now += 1
            progress.step(make_step(1_400_000 + step, epoch=298, skipped=True, bytes_sent=10**12))
    screen = Screen(width)
    lines = screen.play(sent(stream))
    assert all(len(line) <= min(width, MOST_COLUMNS) for line in lines[-3:])


def test_a_terminal_that_went_away_does_not_end_the_run(info, make_step, make_epoch, clock):
    class Gone(io.StringIO):
        broken = False

        def write(self, text: str) -> int:
            if self.broken:
                raise OSError(5, "Input/output error")
            return super().write(text)

    stream = Gone()
    console = Console(file=stream, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with LiveProgress(console, clock=clock) as progress:
        progress.start(info)
        stream.broken = True
        clock.now += 1
        progress.step(make_step(1))
        progress.epoch(make_epoch(0))


def test_what_is_prepared_stands_in_one_line_until_something_else_does(info):
    console, stream = terminal(40)
    screen = Screen(40)
    with LiveProgress(console) as progress:
        progress.prepare("planning: timing a step of the model (--plan none skips planning)")
        assert screen.play(sent(stream)) == ["planning: timing a step of the model (…"]
        progress.prepare("planning: predicting")
        assert Screen(40).play(sent(stream)) == ["planning: predicting ..."]
        progress.start(info)
    assert screen.widest < 40
    assert not [line for line in Screen(40).play(sent(stream)) if "planning" in line]
