"""Tests tuning of several shapes: how time is divided, what is skipped, and what stays after an interruption."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hybridpar.errors import UsageError
from hybridpar.tvm_kernels.database import Database, append_records, read_database
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.operation import KernelKey
from hybridpar.tvm_kernels.search import KEPT, Progress, search_all, weigh
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.table import rows_of, summary_lines
from hybridpar.tvm_kernels.tuner import Tuned, TuningStopped
from tests.tvm_kernels.standin import record_of

SHAPES = [f"{batch}x8x9x9 k3x3 s1x1 p1x1 d1x1" for batch in (2, 4)]
KEYS = [
    KernelKey(direction, ConvShape.parse(shape), Layout.CHANNELS_LAST, 1, cpu_fingerprint())
    for shape in SHAPES
    for direction in Direction
]


def weighed(counts: Mapping[KernelKey, int], seconds: float) -> dict[KernelKey, float]:
    """A stake that is the number of runs, so that order and shares are known."""
    return {key: float(count) for key, count in counts.items()}


class Tuner:
    """Finds candidates at once, and remembers what it was asked."""

    def __init__(self, stop_at: int | None = None, empty: bool = False) -> None:
        self.asked: list[KernelKey] = []
        self.known: list[list[dict[str, int]]] = []
        self.budgets: list[float] = []
        self.stop_at, self.empty = stop_at, empty

    def __call__(self, key, seconds, seed, on_progress, *, known, trials, **shared):
        assert set(shared) == {"builder", "only"}
        assert (key.layout, key.threads, seed) == (Layout.CHANNELS_LAST, 1, 0)
        self.asked.append(key)
        self.known.append(known)
        self.budgets.append(seconds)
        found = [Tuned({"tile": size}, 1.0 + size, 3.0, 1e-7, final=size < 4) for size in range(5)]
        for one in found:
            on_progress(one, found[0])
        if len(self.asked) == self.stop_at:
            raise TuningStopped(found[:1])
        return [] if self.empty else found


def test_everything_is_searched_and_the_best_are_kept(tmp_path):
    tuner, told = Tuner(), list[Progress]()
    report = search_all(KEYS, tmp_path / "k.jsonl", 600.0, tuner=tuner, weigher=weighed, on_progress=told.append)
    assert (report.tuned, report.skipped, report.left, report.stopped) == (6, 0, 0, False)
    assert tuner.asked == KEYS
    read = read_database(tmp_path / "k.jsonl")
    assert set(read) == set(KEYS)
    assert len(read) == KEPT * len(KEYS)
    for key in KEYS:
        best = read.best(key)
        assert best is not None
        assert (best.ms, best.stock_ms, best.parameters) == (1.0, 3.0, {"tile": 0})
    assert [one.done for one in told if one.best is None] == list(range(6))
    assert tuner.budgets == pytest.approx([100.0 * 6 / (6 - place) for place in range(6)], rel=0.05)


def test_the_budget_goes_where_the_time_goes(tmp_path):
    tuner = Tuner()
    counts = {key: 1 + 3 * place for place, key in enumerate(KEYS)}
    report = search_all(counts, tmp_path / "k.jsonl", 600.0, tuner=tuner, weigher=weighed)
    assert report.tuned == 6
    order = sorted(KEYS, key=lambda key: -counts[key])
    assert tuner.asked == order
    # The stand-in takes no time, so each share is of all that was there at the beginning.
    left = [counts[key] / sum(counts[other] for other in order[place:]) for place, key in enumerate(order)]
    assert tuner.budgets == pytest.approx([600.0 * share for share in left], rel=0.05)


def test_time_is_measured_as_far_as_there_is_time_and_predicted_beyond():
    asked = []

    def measure(key):
        asked.append(key)
        return 5.0

    counts = {key: 2 if key.shape.batch == 4 else 1 for key in KEYS}
    all_of_it = weigh(counts, 1e9, measure)
    assert set(asked) == set(KEYS)
    assert all_of_it == {key: 5.0 * count for key, count in counts.items()}
    assert list(all_of_it.values()) == sorted(all_of_it.values(), reverse=True)
    none = weigh(counts, 0.0, measure)
    assert len(asked) == len(KEYS)
    larger, smaller = (key for key in (KEYS[3], KEYS[0]))
    assert none[larger] / none[smaller] == pytest.approx(4.0, rel=0.1), "twice as large and run twice as often"


def test_a_search_begins_with_what_comes_with_the_package(tmp_path, monkeypatch):
    shipped = [
        record_of(SHAPES[0], Direction.FORWARD, Layout.CHANNELS_LAST, device="a like one", parameters={"tile": 5}),
        record_of(SHAPES[1], Direction.FORWARD, Layout.CHANNELS_LAST, parameters={"tile": 6}),
    ]
    monkeypatch.setattr("hybridpar.tvm_kernels.search.packaged_records", lambda: shipped)
    tuner = Tuner()
    assert search_all(KEYS[:1], tmp_path / "k.jsonl", 60.0, tuner=tuner, weigher=weighed).tuned == 1
    assert tuner.known[0] == [{"tile": 6}, {"tile": 5}], "of this device first"
    written = read_database(tmp_path / "k.jsonl")
    assert all(record.device == cpu_fingerprint() for record in written.records), "their times are not taken over"


def test_what_was_found_before_is_skipped_and_shows_where_to_begin(tmp_path):
    file = tmp_path / "k.jsonl"
    search_all(KEYS[:3], file, 600.0, tuner=Tuner(), weigher=weighed)
    tuner = Tuner()
    report = search_all(KEYS, file, 600.0, tuner=tuner, weigher=weighed)
    assert (report.tuned, report.skipped) == (3, 3)
    assert tuner.asked == KEYS[3:]
    assert all(known[0] == {"tile": 0} for known in tuner.known), "the same convolution of another batch is near"
    again = Tuner()
    assert search_all(KEYS, file, 600.0, tuner=again, weigher=weighed, again=True).tuned == 6
    assert len(again.asked) == 6


def test_records_of_other_versions_are_searched_anew(tmp_path):
    old = record_of(SHAPES[0], Direction.FORWARD, Layout.CHANNELS_LAST, versions={"tvm": "0.1"})
    append_records(tmp_path / "k.jsonl", [old])
    tuner = Tuner()
    assert search_all(KEYS[:1], tmp_path / "k.jsonl", 600.0, tuner=tuner, weigher=weighed).tuned == 1
    assert tuner.known[0][0] == {"tile": 2}


def test_a_user_who_stops_keeps_what_there_is(tmp_path):
    file = tmp_path / "k.jsonl"
    report = search_all(KEYS, file, 600.0, tuner=Tuner(stop_at=3), weigher=weighed)
    assert (report.stopped, report.tuned, report.left) == (True, 3, 3)
    assert set(read_database(file)) == set(KEYS[:3])
    assert search_all(KEYS, file, 600.0, tuner=Tuner(), weigher=weighed).skipped == 3


def test_what_no_second_measurement_confirmed_is_not_recorded(tmp_path, caplog):
    def unsteady(*given, **_):
        first = Tuned({"tile": 1}, 1.0, 1.8, 1e-7, final=True, noise=0.9)
        steady = Tuned({"tile": 2}, 2.0, 3.0, 1e-7, final=True, noise=0.1, stock_error=2e-7)
        glance = Tuned({"tile": 3}, 0.1, 3.0, 1e-7)
        return [first, glance] if given[0].direction is Direction.FORWARD else [first, steady, glance]

    report = search_all(KEYS[:2], tmp_path / "k.jsonl", 600.0, tuner=unsteady, weigher=weighed)
    assert (report.tuned, report.unsteady, report.empty, report.left) == (1, 1, 0, 0)
    (record,) = read_database(tmp_path / "k.jsonl").records
    assert (record.parameters, record.noise, record.stock_error) == ({"tile": 2}, 0.1, 2e-7)
    assert f"forward {SHAPES[0]}: measurements lay 90 % apart, so none is recorded" in caplog.text
    again = search_all(KEYS[:2], tmp_path / "k.jsonl", 600.0, tuner=unsteady, weigher=weighed)
    assert again.skipped == 1, "what was not recorded is searched again"


def test_no_kernel_is_no_error(tmp_path):
    report = search_all(KEYS, tmp_path / "k.jsonl", 600.0, tuner=Tuner(empty=True), weigher=weighed)
    assert (report.tuned, report.empty) == (0, 6)


def test_a_budget_for_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="too short to try one candidate"):
        search_all(KEYS, tmp_path / "k.jsonl", 0.5, tuner=Tuner(), weigher=weighed)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ the table


def database() -> Database:
    one, two = SHAPES
    return Database(
        "",
        [
            record_of(one, Direction.FORWARD, Layout.CHANNELS_LAST, ms=1.0, stock_ms=4.0),
            record_of(two, Direction.FORWARD, Layout.CHANNELS_LAST, ms=2.0, stock_ms=1.0),
            record_of(one, Direction.INPUT_GRADIENT, Layout.CHANNELS_LAST, versions={"tvm": "0.1"}, error=None),
        ],
    )


def test_a_row_says_what_runs():
    rows = {(row.shape, row.direction): row for row in rows_of(database())}
    assert len(rows) == 3
    assert rows[SHAPES[0], "forward"].ratio == 4.0
    assert [rows[shape, "forward"].runs for shape in SHAPES] == ["tuned", "stock"]
    assert not rows[SHAPES[0], "input_gradient"].current
    assert summary_lines(list(rows.values()))[0] == "forward: 1 of 2 tuned, 2.00x torch as chosen (geometric mean)"


def test_what_wins_in_its_own_layout_alone_flatters_nobody():
    """Images that are contiguous stay so; but torch could have been faster if they were not, and the table says so."""
    fields = {"ms": 2.0, "stock_ms": 1.0}
    chosen = record_of(SHAPES[0], Direction.FORWARD, Layout.CHANNELS_LAST, layout_ms=3.0, **fields)
    left = record_of(SHAPES[1], Direction.FORWARD, Layout.CHANNELS_LAST, layout_ms=1.5, **fields)
    assert (chosen.wins, left.wins) == (True, False)
    rows = rows_of(Database("", [chosen, left]))
    assert [(row.ratio, row.runs) for row in rows] == [(0.5, "tuned"), (0.5, "stock")]
    assert summary_lines(rows) == ["forward: 1 of 2 tuned, 0.71x torch as chosen (geometric mean)"]
