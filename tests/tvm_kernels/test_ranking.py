"""Tests the benchmark of the cost model's ranking: its figures, and how an interrupted benchmark goes on."""

from __future__ import annotations

import csv

import pytest

from benchmarks.kernels import ranking
from benchmarks.kernels.ranking import COLUMNS, chosen, read, summarize
from benchmarks.rig.records import append_dicts


def rows(predicted, measured, drawn=None, layout="contiguous"):
    setting = ("a cpu", "1", "a shape", "forward", layout)
    drawn = drawn or [1] * len(predicted)
    return [
        dict(zip(COLUMNS, (*setting, str(place), str(by_chance), str(cycles), str(time)), strict=True))
        for place, (cycles, time, by_chance) in enumerate(zip(predicted, measured, drawn, strict=True))
    ]


def test_right_and_wrong_orders_are_told_apart():
    right, middle = summarize(rows([1, 2, 3, 4, 5], [1.0, 1.1, 1.5, 1.6, 9.0]))
    assert right["correlation"] == middle["correlation"] == "1.000"
    assert (right["regret_1"], right["regret_8"]) == ("0.000", "0.000")
    wrong, _ = summarize(rows([5, 4, 3, 2, 1], [1.0, 1.1, 1.5, 1.6, 3.0]))
    assert wrong["correlation"] == "-1.000"
    assert (wrong["regret_1"], wrong["regret_4"], wrong["regret_8"]) == ("2.000", "0.100", "0.000")


def test_correlation_is_spearmans():
    # 1 - 6 * (0 + 1 + 1 + 0 + 0) / (5 * 24): two neighbours changed places, and how far apart times are is no matter.
    found, _ = summarize(rows([1, 2, 3, 4, 5], [1.0, 1.5, 1.2, 7.0, 100.0]))
    assert found["correlation"] == "0.900"
    ties, _ = summarize(rows([1, 1, 2, 2], [1.0, 1.0, 2.0, 2.0]))
    assert ties["correlation"] == "1.000"


def test_what_the_model_liked_does_not_flatter_its_correlation():
    found, _ = summarize(rows([1, 2, 10, 20, 30], [1.0, 1.1, 5.0, 4.0, 3.0], drawn=[0, 0, 1, 1, 1]))
    assert found["correlation"] == "-1.000"
    assert found["regret_1"] == "0.000"
    assert found["candidates"] == "5"


def test_medians_are_of_one_layout():
    own = [*rows([1, 2, 3], [1.0, 2.0, 3.0]), *rows([3, 2, 1], [1.0, 2.0, 3.0], layout="channels_last")]
    medians = {row["layout"]: row["correlation"] for row in summarize(own) if row["shape"] == "median"}
    assert medians == {"contiguous": "1.000", "channels_last": "-1.000"}


def test_the_best_and_some_others_are_measured():
    space = [{"strip": place} for place in range(50)]
    cycles = [float(place * 7 % 50) for place in range(50)]
    picked = chosen(space, cycles, liked=3, drawn=10, seed="x")
    assert [cost for _, cost, _ in picked[:3]] == [0.0, 1.0, 2.0]
    assert sum(at_random for *_, at_random in picked) == 10
    assert picked == chosen(space, cycles, liked=3, drawn=10, seed="x")
    assert len({one["strip"] for one, _, _ in picked}) == len(picked)
    assert len(chosen(space[:2], cycles[:2], 3, 10, "x")) == 2


def test_a_row_that_was_cut_off_is_measured_again(tmp_path):
    whole = rows([1, 2], [1.0, 2.0])
    for row in whole:
        append_dicts(tmp_path / "r.csv", [row])
    assert read(tmp_path / "r.csv") == whole
    text = (tmp_path / "r.csv").read_text()
    (tmp_path / "r.csv").write_text(text[:-3])  # within a number, which would be another one
    assert read(tmp_path / "r.csv") == whole[:1]
    append_dicts(tmp_path / "r.csv", whole[1:2])
    assert read(tmp_path / "r.csv") == whole
    assert read(tmp_path / "none.csv") == []


class NoBuilder:
    """Where nothing needs to be built."""

    def __init__(self) -> None:
        self.asked = 0

    def submit(self, request):
        self.asked += 1


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch):
    times = iter([1.0, 2.0, 4.0])
    monkeypatch.setattr(ranking.Settings, "_kernel", lambda *_: object())
    monkeypatch.setattr(ranking.Settings, "_relative", lambda *_: next(times))
    monkeypatch.setattr(ranking, "Layout", [ranking.Layout.CONTIGUOUS])
    monkeypatch.setattr(ranking, "Direction", [ranking.Direction.FORWARD])
    file, shape, builder = tmp_path / "r.csv", "1x8x7x9 k3x3 s1x1 p1x1 d1x1", NoBuilder()
    ranking.Settings(1, 2, 0, file).run([shape], builder)
    assert [row["relative"] for row in read(file)] == ["1.0000", "2.0000"]
    ranking.Settings(1, 2, 0, file).run([shape], builder)
    assert builder.asked == 3, "two candidates and what they are compared with"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-1]) + "\n")
    ranking.Settings(1, 2, 0, file).run([shape], builder)
    assert [row["relative"] for row in read(file)] == ["1.0000", "4.0000"]
    with file.open() as table:
        assert tuple(next(csv.reader(table))) == COLUMNS


@pytest.mark.parametrize("loaded", [1.6, 9.0])
def test_a_busy_machine_is_refused(loaded, monkeypatch):
    monkeypatch.setattr(ranking.os, "getloadavg", lambda: (loaded, 0.0, 0.0))
    monkeypatch.setattr("sys.argv", ["ranking"])
    with pytest.raises(ranking.UsageError, match="load average"):
        ranking.main()
