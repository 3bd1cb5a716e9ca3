"""Tests what must hold for every registered schedule; a new one is proved here without being named.

Files in tests/golden/schedules/ are compared by their names. What only one schedule promises has a test in schedules/.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridpar.errors import ScheduleError, UsageError
from hybridpar.schedule.actions import read_schedule
from hybridpar.schedule.costs import Costs
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import lower
from hybridpar.schedule.schedules import SCHEDULES, ScheduleRequest, make
from hybridpar.schedule.simulate import simulate
from tests.schedule.proof import prove
from tests.schedule.requests import assert_backward_passes_ascend, request

GOLDEN = Path(__file__).parents[1] / "golden/schedules"


def asked_for(golden: Path) -> tuple[str, ScheduleRequest]:
    """What a file is named after: NAME-STAGES-LANES-MICRO_BATCHES, or NAME-STAGES-LANES-v-MICRO_BATCHES."""
    name, stages, lanes, *kind, count = golden.stem.split("-")
    kind = kind or ["linear" if stages == lanes else "loop"]
    return name, request(int(stages), int(lanes), *kind, count=int(count))


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_goldens(path):
    """A file is what `to_csv` wrote, looked at by eye."""
    name, wanted = asked_for(path)
    assert make(name, wanted) == read_schedule(path.read_text(), name)


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_torch_reads_every_cell(path):
    from torch.distributed.pipelining.schedules import _Action

    for cell in path.read_text().replace("\n", ",").split(","):
        if cell:
            assert str(_Action.from_str(cell)) == cell


def test_no_schedule_needs_torch():
    code = "import sys, hybridpar.schedule.schedules, hybridpar.schedule.check; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_listing_and_unknown_names():
    assert set(SCHEDULES) >= {"accumulate", "gpipe", "1f1b", "interleaved", "looped_bfs", "greedy"}
    with pytest.raises(UsageError, match="unknown schedule 'gpip'") as caught:
        make("gpip", request(2, 2))
    assert "gpipe" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "wanted", "instead"),
    [
        ("accumulate", request(2, 2), "1f1b"),
        ("gpipe", request(4, 2, "loop"), "looped_bfs"),
        ("1f1b", request(4, 2, "loop"), "interleaved"),
        ("interleaved", request(4, 2, "v"), "looped_bfs"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_what_does(name, wanted, instead):
    with pytest.raises(ScheduleError) as caught:
        make(name, wanted)
    assert instead in caught.value.fix
    prove(make(instead, wanted), wanted.layout)


@pytest.mark.parametrize(
    ("count", "costs", "match"),
    [(0, None, "0 micro-batches"), (4, Costs((1.0,), (2.0,)), r"costs of 1 stage\(s\) for a schedule of 2")],
)
def test_requests_that_say_too_little_are_refused(count, costs, match):
    with pytest.raises(ScheduleError, match=match):
        ScheduleRequest(Layout.dealt(2, 2), count, costs)


SHAPES = [("linear", lanes, lanes) for lanes in range(1, 9)] + [
    ("loop", 2, 4),
    ("loop", 2, 8),
    ("loop", 3, 6),
    ("loop", 4, 8),
    ("v", 2, 4),
    ("v", 4, 8),
]


@pytest.mark.parametrize(("kind", "lanes", "stages"), SHAPES)
def test_every_schedule_is_proved(kind, lanes, stages):
    layout = Layout.dealt(stages, lanes, kind)
    proved = 0
    for name in sorted(set(SCHEDULES) - {"greedy"}):
        for count in (1, 2, 3, 5, 8, 13, 32):
            try:
                schedule = make(name, ScheduleRequest(layout, count))
            except ScheduleError:
                assert kind != "linear" or name == "accumulate"
                continue
            assert schedule.name == name, "the name in the Schedule that is returned is the registered name"
            prove(schedule, layout)
            assert_backward_passes_ascend(schedule)
            proved += 1
    assert proved >= 7


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 8, 17])
def test_what_is_held(stages, count):
    layout = Layout.dealt(stages, stages)
    names = ("gpipe", "looped_bfs", "1f1b")
    held = {name: prove(make(name, ScheduleRequest(layout, count)), layout).in_flight for name in names}
    assert held["gpipe"] == held["looped_bfs"] == (count,) * stages
    assert held["1f1b"] == tuple(min(count, stages - stage) for stage in range(stages))


@pytest.mark.parametrize(("stages", "count"), [(1, 4), (2, 1), (4, 8), (8, 8)])
def test_time_of_equal_stages(stages, count):
    """(M + S - 1)(f + b): Huang et al. 2019, section 2.3; and 1F1B takes the same."""
    wanted = request(stages, stages, count=count, forward_ms=(3.0,) * stages, backward_ms=(5.0,) * stages)
    for name in ("gpipe", "1f1b"):
        result = simulate(lower(make(name, wanted), wanted.layout), wanted.costs)
        assert result.step_ms == pytest.approx((count + stages - 1) * 8.0)
        assert result.bubble == pytest.approx((stages - 1) / (count + stages - 1))
