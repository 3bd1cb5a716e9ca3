"""Why: tuning takes minutes to hours, so what was found must survive whatever ends it, and nothing is done twice."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from hybridpar.errors import UsageError
from hybridpar.tvm_kernels.database import Database, KernelKey, append_records, read_database
from hybridpar.tvm_kernels.device import cpu_fingerprint
from hybridpar.tvm_kernels.search import KEPT, Progress, search_all
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.table import as_json, draw_rows, rows_of, summary_lines, table_of
from hybridpar.tvm_kernels.tuner import Tuned, TuningStopped
from tests.tvm_kernels.standin import record_of

SHAPES = [f"{batch}x8x9x9 k3x3 s1x1 p1x1 d1x1" for batch in (2, 4)]
KEYS = [
    KernelKey(direction, ConvShape.parse(shape), Layout.CHANNELS_LAST, 1, cpu_fingerprint())
    for shape in SHAPES
    for direction in Direction
]


class Tuner:
    """Finds candidates at once, and remembers what it was asked."""

    def __init__(self, stop_at: int | None = None, empty: bool = False) -> None:
        self.asked: list[tuple[ConvShape, Direction]] = []
        self.known: list[list[dict[str, int]]] = []
        self.budgets: list[float] = []
        self.stop_at, self.empty = stop_at, empty

    def __call__(self, shape, direction, layout, threads, budget_s, seed, on_progress, *, known, trials):
        assert (layout, threads, seed) == (Layout.CHANNELS_LAST, 1, 0)
        self.asked.append((shape, direction))
        self.known.append(known)
        self.budgets.append(budget_s)
        found = [Tuned({"tile": size}, 1.0 + size, 3.0, 0.5, 1e-7, final=size < 4) for size in range(5)]
        for one in found:
            on_progress(one, found[0])
        if len(self.asked) == self.stop_at:
            raise TuningStopped(found[:1])
        return [] if self.empty else found


def test_everything_is_searched_and_the_best_are_kept(tmp_path):
    tuner, told = Tuner(), list[Progress]()
    report = search_all(KEYS, tmp_path / "k.jsonl", 600.0, tuner=tuner, on_progress=told.append)
    assert (report.tuned, report.skipped, report.left, report.stopped) == (6, 0, 0, False)
    assert tuner.asked == [(key.shape, key.direction) for key in KEYS]
    read = read_database(tmp_path / "k.jsonl")
    assert set(read) == set(KEYS)
    assert len(read) == KEPT * len(KEYS)
    for key in KEYS:
        best = read.best(key)
        assert best is not None
        assert (best.ms, best.stock_ms, best.parameters) == (1.0, 3.0, {"tile": 0})
    assert [one.done for one in told if one.best is None] == list(range(6))
    assert max(tuner.budgets) < 1.2 * min(tuner.budgets) + 600


def test_what_was_found_before_is_skipped_and_shows_where_to_begin(tmp_path):
    file = tmp_path / "k.jsonl"
    search_all(KEYS[:3], file, 600.0, tuner=Tuner())
    tuner = Tuner()
    report = search_all(KEYS, file, 600.0, tuner=tuner)
    assert (report.tuned, report.skipped) == (3, 3)
    assert tuner.asked == [(key.shape, key.direction) for key in KEYS[3:]]
    assert all(known == [{"tile": 0}] for known in tuner.known), "the same convolution of another batch is near"
    again = Tuner()
    assert search_all(KEYS, file, 600.0, tuner=again, again=True).tuned == 6
    assert len(again.asked) == 6


def test_records_of_other_versions_are_searched_anew(tmp_path):
    old = record_of(SHAPES[0], Direction.FORWARD, Layout.CHANNELS_LAST, versions={"tvm": "0.1"})
    append_records(tmp_path / "k.jsonl", [old])
    tuner = Tuner()
    assert search_all(KEYS[:1], tmp_path / "k.jsonl", 600.0, tuner=tuner).tuned == 1
    assert tuner.known == [[{"tile": 2}]]


def test_a_user_who_stops_keeps_what_there_is(tmp_path):
    file = tmp_path / "k.jsonl"
    report = search_all(KEYS, file, 600.0, tuner=Tuner(stop_at=3))
    assert (report.stopped, report.tuned, report.left) == (True, 3, 3)
    assert set(read_database(file)) == set(KEYS[:3])
    assert search_all(KEYS, file, 600.0, tuner=Tuner()).skipped == 3


def test_no_kernel_is_no_error(tmp_path):
    report = search_all(KEYS, tmp_path / "k.jsonl", 600.0, tuner=Tuner(empty=True))
    assert (report.tuned, report.empty) == (0, 6)


def test_a_budget_for_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="too short to try one candidate"):
        search_all(KEYS, tmp_path / "k.jsonl", 0.5, tuner=Tuner())
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ the table


def database() -> Database:
    one, two = SHAPES
    return Database(
        "",
        [
            record_of(one, Direction.FORWARD, Layout.CHANNELS_LAST, ms=1.0, stock_ms=4.0),
            record_of(two, Direction.FORWARD, Layout.CHANNELS_LAST, ms=2.0, stock_ms=1.0),
            record_of(one, Direction.WEIGHT_GRADIENT, Layout.CONTIGUOUS, ms=None, stock_ms=None),
            record_of(one, Direction.INPUT_GRADIENT, Layout.CHANNELS_LAST, versions={"tvm": "0.1"}, error=None),
        ],
    )


def test_a_row_says_what_runs():
    rows = {(row.shape, row.direction): row for row in rows_of(database())}
    assert len(rows) == 3, "what was not measured has no row"
    assert rows[SHAPES[0], "forward"].ratio == 4.0
    assert [rows[shape, "forward"].runs for shape in SHAPES] == ["tuned", "stock"]
    assert not rows[SHAPES[0], "input_gradient"].current
    assert summary_lines(list(rows.values()))[0] == "forward: 1 of 2 tuned, 2.00x torch as chosen (geometric mean)"


def test_rows_can_be_printed_and_read(tmp_path):
    rows = rows_of(database())
    console = Console(width=160, record=True, file=(tmp_path / "out").open("w"))
    console.print(table_of(rows))
    text = console.export_text()
    for part in ("stock_ms", "tuned_ms", "floor_ms", "ratio", "error", "4.00x", "1.0e-07", "other versions"):
        assert part in text
    assert json.loads(json.dumps(as_json(rows)))[0]["tuned_ms"] == 1.0
    only = KernelKey(Direction.FORWARD, ConvShape.parse(SHAPES[1]), Layout.CHANNELS_LAST, 1, cpu_fingerprint())
    assert [row.shape for row in rows_of(database(), {only})] == [SHAPES[1]]


def test_rows_can_be_drawn(tmp_path):
    draw_rows(rows_of(database()), tmp_path / "k.png")
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")
    draw_rows([], tmp_path / "none.svg")
    with pytest.raises(UsageError, match="cannot write"):
        draw_rows([], tmp_path / "no" / "k.svg")
