"""Tests the views of a timeline: text that fits the screen, and pictures."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from hybridpar.errors import UsageError
from hybridpar.observe.timeline import Timeline, TimelineRow
from hybridpar.observe.timeline_picture import draw_timeline
from hybridpar.observe.timeline_text import print_timeline
from hybridpar.schedule.actions import parse_action
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.spans import Span, StepSpans
from tests.observe.timelines import a_timeline

SPANS = (
    Span(0, "compute", 0, parse_action("0F0"), 0, 10),
    Span(0, "compute", 0, parse_action("0B0"), 20, 40),
    Span(0, "sync", 0, parse_action("0SYNC0"), 30, 50),
    Span(0, "compute", 0, parse_action("0STEP"), 50, 55),
)
TINY = Timeline((TimelineRow(0, 7, StepSpans(0.0, SPANS)),), Layout.repeated([(0, 0)]))

GOLDEN = """\
step 7

                    step ms  forward  backward    idle  sums  exposed
worker 0  measured     55.0     10.0      20.0  25.0 %  20.0     10.0

55.0 ms, bubble 25 %
                   0                                                     55.0 ms
worker 0 computes  F0---------...........B0====================...........oooooo
         sync 0                                     ssssssssssssssssssssss

F-- forward   B== backward   s gradient sums   o optimizer   . idle
"""


def printed(timeline, width=80):
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    print_timeline(timeline, console)
    return "\n".join(line.rstrip() for line in console.export_text().split("\n"))


def test_the_text_to_the_letter():
    assert printed(TINY) == GOLDEN


# ----------------------------------------------------------------------------------------------------------- pictures


def texts(path):
    """What is written in an SVG picture: matplotlib keeps it in comments beside the outlines."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_a_picture_says_who_what_and_how_long(tmp_path):
    draw_timeline(a_timeline(), tmp_path / "a.svg")
    said = texts(tmp_path / "a.svg")
    assert [text for text in said if text.startswith("worker")] == [
        *("worker 0", "worker 2", "worker 0", "worker 1", "worker 2", "worker 3")
    ]
    assert sum(text.startswith("predicted:") for text in said) == 1
    assert sum(text.startswith("measured:") for text in said) == 1
    assert {"forward", "backward", "transfer", "gradient sum", "bubble", "exposed sums", "optimizer"} <= set(said)
    # Numbers of four micro-batches, forward and backward, on two predicted and four measured lanes.
    assert [said.count(str(number)) for number in range(1, 4)] == [12] * 3


def test_a_picture_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"\.svg"):
        draw_timeline(TINY, tmp_path / "a.jpeg2000")
    with pytest.raises(UsageError, match=r"cannot write .*: No such file or directory"):
        draw_timeline(TINY, tmp_path / "nowhere" / "a.svg")
    assert not list(tmp_path.iterdir())
