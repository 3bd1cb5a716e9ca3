"""Tests `hybridpar bench` for gradient synchronisation: steps on all workers, advice, table, wrong requests."""

from __future__ import annotations

import csv
import dataclasses
import io
from contextlib import ExitStack
from dataclasses import asdict

import pytest
from rich.console import Console

from hybridpar.cli import main
from hybridpar.commands.bench.request import BenchSync
from hybridpar.commands.bench.sync import FLOOR, FULL, StepTimes, advice, measure_steps, print_times
from hybridpar.commands.bench.table import write_rows
from hybridpar.errors import UsageError
from tests.ranks import run_ranks

SMALL = BenchSync(
    model="tests.small_nets:plain", image_size=8, batch_size=8, classes=4, steps=2, compress=("fp16", "onebit:least=1")
)


def _measure(world, request):
    with ExitStack() as stack:
        return measure_steps(request, stack)


def test_steps_are_measured_on_all_workers() -> None:
    first, second = run_ranks(_measure, 2, SMALL)
    assert second is None
    transport, rate, times = first
    assert transport == "shared memory"
    assert rate > 0
    assert [one.codec for one in times] == [FLOOR, FULL, "fp16", "onebit:least=1"]
    floor, full, half, bits = times
    assert (floor.sent_bytes, floor.exposed_ms, full.speedup) == (0, None, 1)
    assert 0 < bits.sent_bytes < half.sent_bytes < full.sent_bytes
    assert all(0 < one.least_ms <= one.step_ms for one in times)
    assert half.wire_ms == pytest.approx(half.sent_bytes / rate * 1e3)


def _refuse(world, request):
    with pytest.raises(UsageError, match="unknown codec 'onbit'"), ExitStack() as stack:
        measure_steps(request, stack)
    return True


def test_an_unknown_codec_ends_all_workers() -> None:
    assert run_ranks(_refuse, 2, dataclasses.replace(SMALL, compress=("onbit",))) == [True, True]


def _times(**speedups: float) -> list[StepTimes]:
    named = {FLOOR: speedups.pop("floor"), FULL: 1.0, **speedups}
    return [StepTimes(name, 100 / gain, 90 / gain, gain, 1.0, 10, 1.0) for name, gain in named.items()]


def test_advice_names_the_fastest_codec() -> None:
    said = advice(_times(floor=3.0, onebit=2.5, fp16=1.6))
    assert said.startswith("Try --compress onebit, 2.50 times as fast")
    assert "3.00 times" in said
    assert said.count(". ") == 0


@pytest.mark.parametrize("speedups", [{"onebit": 0.8, "fp16": 1.04}, {}])
def test_advice_says_when_nothing_pays(speedups: dict[str, float]) -> None:
    said = advice(_times(floor=1.2, **speedups))
    assert said.startswith("Train without --compress")
    assert "1.20 times" in said


def test_figures_are_shown_and_written(tmp_path) -> None:
    times = _times(floor=1.2, onebit=0.8)
    console = Console(record=True, width=80, file=io.StringIO())
    print_times(BenchSync(), "gloo", 1e8, times, console)
    shown = console.export_text()
    assert "100 MB/s per worker" in " ".join(shown.split())
    assert "125.0" in shown
    write_rows(tmp_path / "steps.csv", [asdict(one) for one in times])
    with (tmp_path / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["codec"] for row in rows] == [FLOOR, FULL, "onebit"]
    assert float(rows[2]["speedup"]) == 0.8


def test_a_table_without_rows_is_not_written(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"no rows for .*steps\.csv"):
        write_rows(tmp_path / "steps.csv", [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sync", "--workers", "1"], "--workers 1"),
        (["sync", "--steps", "0"], "--steps 0"),
        (["sync", "--batch-size", "3"], "--batch-size 3"),
        (["codecs", "--compress", "onbit"], "unknown codec 'onbit'"),
    ],
)
def test_wrong_requests_exit_with_2(arguments, said, capsys) -> None:
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err
