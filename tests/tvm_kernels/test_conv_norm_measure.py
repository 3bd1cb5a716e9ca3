"""Why: a pair's record must be of what would run, of parts that won, and must cost a small part of a tune."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder
from hybridpar.tvm_kernels import conv_norm_measure, norm_kernels, record
from hybridpar.tvm_kernels.conv_norm_measure import (
    ConvNormBench,
    ConvNormTime,
    measure_conv_norm,
    measure_conv_norm_saving,
    moments_error,
    summing_candidates,
)
from hybridpar.tvm_kernels.conv_norm_records import CONV_NORM_OP, ConvNormKey, ConvNormShape
from hybridpar.tvm_kernels.conv_norm_search import ConvNormProgress, measure_conv_norms
from hybridpar.tvm_kernels.database import append_records, read_database
from hybridpar.tvm_kernels.device import cpu_fingerprint
from hybridpar.tvm_kernels.kernel import TunedKernel
from hybridpar.tvm_kernels.measure import Timing
from hybridpar.tvm_kernels.record import WrongKernelError
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from tests.tvm_kernels.standin import conv_norm_record, norm_record, record_of

TILE = {"lanes": 16, "tile_rows": 1, "tile_columns": 2, "strip": 4, "columns_outer": 0, "unroll": 0, "stream": 0}
SHAPES = [ConvNormShape(ConvShape.parse(f"2x{channels}x8x8 k3x3 s1x1 p1x1 d1x1"), "relu") for channels in (16, 32, 48)]
KEYS = [ConvNormKey(shape, 1, cpu_fingerprint()) for shape in SHAPES]


class MeasureBoth:
    """Measures at once, and remembers what it was asked."""

    def __init__(self, stop_at: int | None = None, fail: Exception | None = None) -> None:
        self.asked: list[ConvNormKey] = []
        self.seconds: list[float] = []
        self.stop_at, self.fail = stop_at, fail

    def __call__(
        self, key: ConvNormKey, alone: Mapping[str, int], builder: Builder, seconds: float, seed: int
    ) -> ConvNormTime:
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(key)
        self.seconds.append(seconds)
        if self.fail is not None:
            raise self.fail
        return ConvNormTime({**alone, "stream": 1}, 2.0, 2.5, 1e-7)


# -------------------------------------------------------------------------------------------------------- a measurement


@pytest.mark.usefixtures("kernels")
def test_a_pair_is_measured_as_it_would_run(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    compute = norm_kernels.forward

    def forward(*args: object) -> object:
        given.append(args[8] is not None)
        return compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(norm_kernels, "forward", forward)
    monkeypatch.setattr(conv_norm_measure, "_GLANCE", 0.0)
    found = measure_conv_norm(KEYS[0], TILE, builder, 0.0)
    assert dict(found.parameters) in [{**TILE, "stream": stream} for stream in (0, 1)]
    assert min(found.ms, found.apart_ms) > 0
    assert 0 < found.error < 2e-6
    assert given.count(True) == given.count(False), "both sides ran as often"
    monkeypatch.setitem(record._SUMS, CONV_NORM_OP, 0.0)
    monkeypatch.setattr(record, "_TIMES_STOCK", 0.0)
    odd = ConvNormKey(ConvNormShape(ConvShape.parse("2x20x8x8 k3x3 s1x1 p1x1 d1x1"), "relu"), 1, cpu_fingerprint())
    with pytest.raises(WrongKernelError, match=r"the moments of 2x20x8x8 .* relu is wrong"):
        measure_conv_norm(odd, TILE, builder, 0.0)


def test_results_go_to_the_caches_and_past_them_where_they_can() -> None:
    whole, odd = SHAPES[0].convolution, ConvShape.parse("2x20x8x8 k3x3 s1x1 p1x1 d1x1")
    assert [one["stream"] for one in summing_candidates(whole, TILE)] == [0, 1]
    assert [one["stream"] for one in summing_candidates(odd, TILE | {"stream": 1})] == [0]


def test_errors_are_relative_to_deviations() -> None:
    y = torch.tensor([1.0, 3.0]).view(1, 1, 1, 2)
    exact = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    assert moments_error(y, exact) == 0.0
    assert moments_error(y + 1e3, exact + torch.tensor([[1e3 + 0.5], [0.0]])) == pytest.approx(0.5)
    assert moments_error(y, exact * torch.tensor([[1.0], [1.25]])) == pytest.approx(0.25)
    assert moments_error(y, exact * torch.nan) == float("inf")


def test_a_saving_is_the_difference_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(ms=1.0, stock_ms=1.5, speedup=1.5, pairs=5, dropped=0, best_ms=1.0)
    monkeypatch.setattr(ConvNormBench, "compare", lambda *_: timing)
    kernel = TunedKernel((), 0, 4, 1)
    assert measure_conv_norm_saving([(shape, kernel, kernel) for shape in SHAPES]) == pytest.approx(1.5)


# --------------------------------------------------------------------------------------------------------------- a tune


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Records of the parts of all pairs, of which the last one's convolution did not win."""
    place = tmp_path / "k.jsonl"
    for shape, ms in zip(SHAPES, (1.0, 1.0, 3.0), strict=True):
        own = record_of(shape.convolution, Direction.FORWARD, Layout.CHANNELS_LAST, parameters=TILE, ms=ms)
        append_records(place, [own, norm_record(shape.norm)])
    return place


def test_pairs_of_winning_parts_are_measured_largest_first_and_skipped_the_next_time(path: Path) -> None:
    measure, told = MeasureBoth(), list[ConvNormProgress]()
    keys = dict.fromkeys(KEYS, 1)
    report = measure_conv_norms(keys, path, 10.0, measure=measure, on_progress=told.append)
    assert measure.asked == [KEYS[1], KEYS[0]]
    assert (report.tuned, report.skipped, report.left) == (2, 0, 0)
    assert [(one.done, one.total, one.key) for one in told] == [(0, 2, KEYS[1]), (1, 2, KEYS[0])]
    assert max(measure.seconds) <= 1.5
    found = read_database(path).best_conv_norm(KEYS[0])
    assert found is not None
    assert found.wins
    assert found.current
    assert found.parameters == TILE | {"stream": 1}
    report = measure_conv_norms(keys, path, 10.0, measure=measure)
    assert (report.tuned, report.skipped) == (0, 2)
    assert measure_conv_norms(keys, path, 10.0, again=True, measure=measure).tuned == 2
    often = {KEYS[0]: 3, KEYS[1]: 1}
    measure_conv_norms(often, path, 10.0, again=True, measure=measure)
    assert measure.asked[-2:] == KEYS[:2], "how often it runs counts too"


def test_a_pair_is_measured_anew_where_a_part_was(path: Path) -> None:
    own = record_of(SHAPES[0].convolution, Direction.FORWARD, Layout.CHANNELS_LAST, parameters=TILE, tuned_at=5.0)
    append_records(path, [own, conv_norm_record(SHAPES[0], parameters=TILE, tuned_at=4.0)])
    measure = MeasureBoth()
    measure_conv_norms({KEYS[0]: 1}, path, 10.0, measure=measure)
    measure_conv_norms({KEYS[0]: 1}, path, 10.0, measure=measure)
    assert measure.asked == [KEYS[0]]


def test_no_measurement_is_begun_when_the_time_is_up(path: Path) -> None:
    report = measure_conv_norms(dict.fromkeys(KEYS, 1), path, 0.0, measure=MeasureBoth())
    assert (report.tuned, report.left) == (0, 2)


def test_who_stops_keeps_what_there_is(path: Path) -> None:
    report = measure_conv_norms(dict.fromkeys(KEYS, 1), path, 10.0, measure=MeasureBoth(stop_at=1))
    assert (report.tuned, report.left, report.stopped) == (1, 1, True)
    assert len(read_database(path).conv_norms) == 1


@pytest.mark.parametrize("error", [KernelsUnavailable("no compiler"), WrongKernelError("it is wrong")])
def test_a_pair_without_a_kernel_is_left_apart(error: Exception, path: Path) -> None:
    report = measure_conv_norms(dict.fromkeys(KEYS, 1), path, 10.0, measure=MeasureBoth(fail=error))
    assert (report.tuned, report.empty, report.left) == (0, 2, 0)
    assert not read_database(path).conv_norms


def test_a_pair_whose_measurements_do_not_agree_is_not_recorded(path: Path) -> None:
    def measure(*_: object) -> ConvNormTime:
        return ConvNormTime(TILE, 1.0, 64.0, 1e-7, 1e-7, noise=0.5)

    report = measure_conv_norms(dict.fromkeys(KEYS, 1), path, 10.0, measure=measure)
    assert (report.tuned, report.unsteady) == (0, 2)
    assert not read_database(path).conv_norms
