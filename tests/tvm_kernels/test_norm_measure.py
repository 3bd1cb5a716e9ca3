"""Why: records of norms are made of these numbers, so they must be of the right computation, paired, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridpar.errors import UsageError
from hybridpar.tvm_kernels import norm_kernels, norm_measure, norm_search
from hybridpar.tvm_kernels.database import read_database
from hybridpar.tvm_kernels.device import cpu_fingerprint
from hybridpar.tvm_kernels.measure import Timing
from hybridpar.tvm_kernels.norm_measure import (
    NormBench,
    NormTime,
    measure_norm,
    measure_norm_saving,
    norm_floor_ms,
)
from hybridpar.tvm_kernels.norm_records import NormKey, NormShape, norm_versions
from hybridpar.tvm_kernels.norm_search import NormProgress, measure_norms
from hybridpar.tvm_kernels.record import WrongKernelError

SHAPE = NormShape(6 * 35, 24, "silu")
KEYS = [NormKey(NormShape(rows, 8, "relu"), 1, cpu_fingerprint()) for rows in (16, 32, 64)]


@pytest.mark.usefixtures("kernels")
def test_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int, int]] = []
    inner = norm_measure.time_pairs

    def pairs(own: object, stock: object, seconds: float, least: int, threads: int) -> Timing:
        given.append((least, threads, torch.get_num_threads()))
        return inner(own, stock, seconds, least, threads)  # type: ignore[arg-type]

    monkeypatch.setattr(norm_measure, "time_pairs", pairs)
    found = measure_norm(SHAPE, 2, seconds=0.0, copies=((1 << 30, 1e9),))
    assert 2 <= len(given) <= 3, "repeated until two agree"
    assert set(given) == {(7, 2, 2)}
    assert torch.get_num_threads() == 1
    assert min(found.ms, found.stock_ms) > 0
    assert 0 < found.error < 2e-6
    assert found.stock_error is not None
    assert 0 < found.stock_error < 2e-6
    assert found.floor_ms == norm_floor_ms(SHAPE, ((1 << 30, 1e9),), 2)


@pytest.mark.usefixtures("kernels")
def test_both_sides_compute_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[torch.Tensor]] = []
    inner = torch.autograd.grad

    def grad(y: torch.Tensor, inputs: object, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = inner(y, inputs, gradient)  # type: ignore[arg-type]
        made.append([y.detach(), *found])
        return found

    monkeypatch.setattr(torch.autograd, "grad", grad)
    for side in (NormBench(SHAPE).fused, NormBench(SHAPE).stock):
        side()
    assert len(made) == 2
    for one, two in zip(*made, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("part", "factor"), [(0, 1.001), (2, 0.9), (3, float("nan"))])
def test_a_wrong_result_or_gradient_is_never_timed(monkeypatch: pytest.MonkeyPatch, part: int, factor: float) -> None:
    inner = torch.autograd.grad, norm_measure.batch_norm_then
    # Torch's side calls these in float64 and, last of all, in float32; the kernels' side is the second call of three.
    calls = iter((False, True, False))

    def normed(*given: object) -> torch.Tensor:
        y = inner[1](*given)  # type: ignore[arg-type]
        return y * factor if part == 0 else y

    def gradients(*given: object) -> list[torch.Tensor]:
        found, own = list(inner[0](*given)), next(calls)  # type: ignore[arg-type]
        return [one * factor if own and place == part else one for place, one in enumerate(found, 1)]

    monkeypatch.setattr(norm_measure, "batch_norm_then", normed)
    monkeypatch.setattr(torch.autograd, "grad", gradients)
    monkeypatch.setattr(norm_measure, "time_pairs", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(WrongKernelError, match="a kernel of batch_norm_act 210x24 silu is wrong by"):
        measure_norm(SHAPE, 1, seconds=0.0)


def test_what_is_wrong_or_unsteady_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def measure(shape: NormShape, *_: object) -> NormTime:
        if shape == KEYS[0].shape:
            raise WrongKernelError("a kernel is wrong by 1")
        return NormTime(1.0, 228.0, 0.5, 1e-7, 1e-7, noise=0.96 if shape == KEYS[1].shape else 0.03)

    report = measure_norms(KEYS, tmp_path / "k.jsonl", 3.0, measure=measure)
    assert (report.tuned, report.empty, report.unsteady, report.left) == (1, 1, 1, 0)
    (record,) = read_database(tmp_path / "k.jsonl").norms
    assert (record.key, record.noise, record.stock_error) == (KEYS[2], 0.03, 1e-7)
    assert "a kernel is wrong by 1" in caplog.text
    assert "batch_norm_act 32x8 relu: measurements lay 96 % apart, so none is recorded" in caplog.text


def test_what_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_kernels, "table", dict)
    with pytest.raises(UsageError, match="no kernel can norm 16 rows of 8 channels here"):
        measure_norm(NormShape(16, 8, "relu"), 1)


def test_the_floor_is_eight_passes_at_the_speed_of_copies() -> None:
    shape = NormShape(1 << 10, 1 << 8, "none")  # 1 MiB
    assert norm_floor_ms(shape, ((1 << 40, float(1 << 30)),)) == pytest.approx(1e3 * 8 / 1024)
    assert norm_floor_ms(shape, ((1 << 40, float(1 << 30)),), threads=2) == pytest.approx(1e3 * 4 / 1024)
    # Forward touches two tensors, backward three: what does not fit is as slow as memory.
    tiers = ((2 << 20, float(2 << 30)), (1 << 40, float(1 << 30)))
    assert norm_floor_ms(shape, tiers) == pytest.approx(1e3 * (3 / 2 + 5) / 1024)


def test_a_saving_is_the_difference_of_medians_as_often_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(ms=1.0, stock_ms=1.5, speedup=1.5, pairs=5, dropped=0, best_ms=1.0)
    monkeypatch.setattr(NormBench, "compare", lambda self, seconds, threads, least: timing)
    assert measure_norm_saving({KEYS[0]: 3, KEYS[1]: 1}) == pytest.approx(2.0)
    assert measure_norm_saving({}) == 0.0


# ------------------------------------------------------------------------------------------------------------- a tune


class Measure:
    """Measures at once, and remembers what it was asked."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.asked: list[NormShape] = []
        self.seconds: list[float] = []
        self.stop_at = stop_at

    def __call__(self, shape: NormShape, threads: int, seconds: float, seed: int, copies: object) -> NormTime:
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(shape)
        self.seconds.append(seconds)
        return NormTime(1.0, 2.0, 0.5, 1e-7)


def test_everything_is_measured_once_and_kept(tmp_path: Path) -> None:
    file, measure, told = tmp_path / "k.jsonl", Measure(), list[NormProgress]()
    report = measure_norms([*KEYS, KEYS[0]], file, 3.0, measure=measure, on_progress=told.append)
    assert (report.tuned, report.skipped, report.left) == (3, 0, 0)
    assert measure.asked == [key.shape for key in KEYS]
    assert max(measure.seconds) <= norm_search.LONGEST
    assert [(one.done, one.total, one.key) for one in told] == [(place, 3, key) for place, key in enumerate(KEYS)]
    read = read_database(file)
    assert set(read.norm_keys) == set(KEYS)
    record = read.best_norm(KEYS[0])
    assert record is not None
    assert (record.ms, record.stock_ms, record.floor_ms, record.error) == (1.0, 2.0, 0.5, 1e-7)
    assert record.versions == dict(norm_versions())
    assert measure_norms(KEYS, file, 3.0, measure=measure).skipped == 3
    assert measure_norms(KEYS, file, 3.0, measure=measure, again=True).tuned == 3


def test_who_stops_keeps_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "k.jsonl"
    report = measure_norms(KEYS, file, 3.0, measure=Measure(stop_at=2))
    assert (report.stopped, report.tuned, report.left) == (True, 2, 1)
    again = Measure()
    assert measure_norms(KEYS, file, 3.0, measure=again).tuned == 1
    assert again.asked == [KEYS[2].shape]


def test_no_time_is_no_measurement(tmp_path: Path) -> None:
    report = measure_norms(KEYS, tmp_path / "k.jsonl", 0.0, measure=Measure())
    assert (report.tuned, report.left) == (0, 3)
    assert not list(tmp_path.iterdir())


def test_without_kernels_torch_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(norm_kernels, "table", dict)
    assert measure_norms(KEYS, tmp_path / "k.jsonl", 3.0).empty == 3
    assert "torch is used for all 3" in caplog.text
