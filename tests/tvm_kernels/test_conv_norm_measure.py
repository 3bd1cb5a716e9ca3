"""Tests the measurement of a convolution with the norm behind it: what is measured, when, and what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder
from hybridpar.tvm_kernels import norm_kernels, record, search
from hybridpar.tvm_kernels.choice import Choices
from hybridpar.tvm_kernels.database import Database, append_records, read_database
from hybridpar.tvm_kernels.kernel import TunedKernel, make_kernels
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.measure import Bench, Timing
from hybridpar.tvm_kernels.operation import KernelKey, operation_of
from hybridpar.tvm_kernels.operations.depthwise_batch_norm import DepthwiseBatchNormAct, conv_norm_key, moments_error
from hybridpar.tvm_kernels.search import Progress, search_all
from hybridpar.tvm_kernels.shapes import ConvNormShape, ConvShape, Direction, Layout
from hybridpar.tvm_kernels.tuner import Tuned, tune
from tests.tvm_kernels.standin import conv_norm_record, norm_record, record_of

TILE = {"lanes": 16, "tile_rows": 1, "tile_columns": 2, "strip": 4, "columns_outer": 0, "unroll": 0, "stream": 0}
SHAPES = [ConvNormShape(ConvShape.parse(f"2x{channels}x8x8 k3x3 s1x1 p1x1 d1x1"), "relu") for channels in (16, 32, 48)]
KEYS = [conv_norm_key(shape, 1, cpu_fingerprint()) for shape in SHAPES]


class MeasureBoth:
    """Measures at once, and remembers what it was asked."""

    def __init__(self, stop_at: int | None = None, fail: Exception | None = None) -> None:
        self.asked: list[KernelKey] = []
        self.seconds: list[float] = []
        self.stop_at, self.fail = stop_at, fail

    def __call__(
        self, key: KernelKey, seconds: float, *_: object, parts: list[tuple[dict[str, int], Any]], **__: object
    ) -> list[Tuned]:
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(key)
        self.seconds.append(seconds)
        if self.fail is not None:
            raise self.fail
        return [Tuned({**parts[0][0], "stream": 1}, 2.0, 2.5, None, 1e-7, final=True)]


# -------------------------------------------------------------------------------------------------------- a measurement


def parts_of(shape: ConvNormShape) -> list[tuple[dict[str, int], Any]]:
    """Parameters and kernels of both parts."""
    own = record_of(shape.convolution, Direction.FORWARD, Layout.CHANNELS_LAST, parameters=TILE)
    return list(zip((TILE, {}), make_kernels([own, norm_record(shape.norm)]), strict=True))


@pytest.mark.usefixtures("kernels")
def test_a_pair_is_measured_as_it_would_run(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[bool] = []
    compute = norm_kernels.forward

    def forward(*args: object) -> object:
        given.append(args[9] is not None)
        return compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(norm_kernels, "forward", forward)
    found = tune(KEYS[0], 0.0, parts=parts_of(SHAPES[0]), builder=builder)
    assert {one.parameters["stream"] for one in found} == {0, 1}
    assert [one.final for one in found] == [True, False]
    assert min(found[0].ms, found[0].stock_ms) > 0
    assert 0 < found[0].error < 2e-6
    assert given.count(True) == given.count(False), "both sides ran as often"
    monkeypatch.setattr(DepthwiseBatchNormAct, "limits", {"depthwise_batch_norm_act": 0.0})
    monkeypatch.setattr(record, "_TIMES_STOCK", 0.0)
    odd = ConvNormShape(ConvShape.parse("2x20x8x8 k3x3 s1x1 p1x1 d1x1"), "relu")
    assert tune(conv_norm_key(odd, 1, cpu_fingerprint()), 0.0, parts=parts_of(odd), builder=builder) == []
    assert "a kernel of depthwise_batch_norm_act 2x20x8x8 k3x3 s1x1 p1x1 d1x1 relu" in caplog.text


def test_results_go_to_the_caches_and_past_them_where_they_can() -> None:
    odd = conv_norm_key(ConvNormShape(ConvShape.parse("2x20x8x8 k3x3 s1x1 p1x1 d1x1"), "relu"), 1, cpu_fingerprint())
    operation = operation_of(odd)
    assert [one["stream"] for one, _ in operation.space(KEYS[0], [TILE])] == [0, 1]
    assert [one["stream"] for one, _ in operation.space(odd, [TILE | {"stream": 1}])] == [0]


def test_errors_are_relative_to_deviations() -> None:
    y = torch.tensor([1.0, 3.0]).view(1, 1, 1, 2)
    exact = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    assert moments_error(y, exact) == 0.0
    assert moments_error(y + 1e3, exact + torch.tensor([[1e3 + 0.5], [0.0]])) == pytest.approx(0.5)
    assert moments_error(y, exact * torch.tensor([[1.0], [1.25]])) == pytest.approx(0.25)
    assert moments_error(y, exact * torch.nan) == float("inf")


def test_a_saving_is_the_difference_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(ms=1.0, stock_ms=1.5, speedup=1.5, pairs=5)
    monkeypatch.setattr(Bench, "compare", lambda *_: timing)
    records = [
        one
        for shape in SHAPES
        for one in (
            record_of(shape.convolution, Direction.FORWARD, Layout.CHANNELS_LAST),
            norm_record(shape.norm),
            conv_norm_record(shape),
        )
    ]
    choices = Choices(Database("", records), lambda found: [TunedKernel((), 0, 4, 1) for _ in found])
    assert choices.measure_saving(dict.fromkeys(KEYS, 1)) == pytest.approx(1.5)


# --------------------------------------------------------------------------------------------------------------- a tune


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of the parts of all pairs, of which the last one's convolution did not win."""
    monkeypatch.setattr(search, "make_kernels", lambda records: ["a kernel"] * len(records))
    place = tmp_path / "k.jsonl"
    for shape, ms in zip(SHAPES, (1.0, 1.0, 3.0), strict=True):
        own = record_of(shape.convolution, Direction.FORWARD, Layout.CHANNELS_LAST, parameters=TILE, ms=ms)
        append_records(place, [own, norm_record(shape.norm)])
    return place


def pairs_in(path: Path) -> list[KernelKey]:
    return [key for key in read_database(path) if key in KEYS]


def test_pairs_of_winning_parts_are_measured_largest_first_and_skipped_the_next_time(path: Path) -> None:
    measure, told = MeasureBoth(), list[Progress]()
    keys = dict.fromkeys(KEYS, 1)
    report = search_all(keys, path, 10.0, tuner=measure, on_progress=told.append)
    assert measure.asked == [KEYS[1], KEYS[0]]
    assert (report.tuned, report.skipped, report.left) == (2, 0, 0)
    assert [(one.done, one.total, one.key) for one in told] == [(0, 2, KEYS[1]), (1, 2, KEYS[0])]
    assert max(measure.seconds) <= 1.5
    found = read_database(path).best(KEYS[0])
    assert found is not None
    assert found.wins
    assert found.current
    assert found.parameters == TILE | {"stream": 1}  # type: ignore[attr-defined]
    report = search_all(keys, path, 10.0, tuner=measure)
    assert (report.tuned, report.skipped) == (0, 2)
    assert search_all(keys, path, 10.0, again=True, tuner=measure).tuned == 2
    often = {KEYS[0]: 3, KEYS[1]: 1}
    search_all(often, path, 10.0, again=True, tuner=measure)
    assert measure.asked[-2:] == KEYS[:2], "how often it runs counts too"


def test_a_pair_is_measured_anew_where_a_part_was(path: Path) -> None:
    own = record_of(SHAPES[0].convolution, Direction.FORWARD, Layout.CHANNELS_LAST, parameters=TILE, tuned_at=5.0)
    append_records(path, [own, conv_norm_record(SHAPES[0], parameters=TILE, tuned_at=4.0)])
    measure = MeasureBoth()
    search_all({KEYS[0]: 1}, path, 10.0, tuner=measure)
    search_all({KEYS[0]: 1}, path, 10.0, tuner=measure)
    assert measure.asked == [KEYS[0]]


def test_no_measurement_is_begun_when_the_time_is_up(path: Path) -> None:
    report = search_all(dict.fromkeys(KEYS, 1), path, 0.0, tuner=MeasureBoth())
    assert (report.tuned, report.left) == (0, 2)


def test_who_stops_keeps_what_there_is(path: Path) -> None:
    report = search_all(dict.fromkeys(KEYS, 1), path, 10.0, tuner=MeasureBoth(stop_at=1))
    assert (report.tuned, report.left, report.stopped) == (1, 1, True)
    assert len(pairs_in(path)) == 1


def test_a_pair_without_a_kernel_is_left_apart(path: Path) -> None:
    report = search_all(dict.fromkeys(KEYS, 1), path, 10.0, tuner=MeasureBoth(fail=KernelsUnavailable("no compiler")))
    assert (report.tuned, report.empty, report.left) == (0, 2, 0)
    assert not pairs_in(path)


def test_a_pair_whose_measurements_do_not_agree_is_not_recorded(path: Path) -> None:
    def measure(*_: object, **__: object) -> list[Tuned]:
        return [Tuned(TILE, 1.0, 1.4, None, 1e-7, final=True, stock_error=1e-7, noise=0.5)]

    report = search_all(dict.fromkeys(KEYS, 1), path, 10.0, tuner=measure)
    assert (report.tuned, report.unsteady) == (0, 2)
    assert not pairs_in(path)
