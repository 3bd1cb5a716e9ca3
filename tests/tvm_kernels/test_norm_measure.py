"""Tests the measurement of fused norms: checked results, paired times, and the records that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridpar.tvm_kernels import measure, norm_kernels
from hybridpar.tvm_kernels.batch_norm_act import fused_batch_norm_act
from hybridpar.tvm_kernels.choice import Choices
from hybridpar.tvm_kernels.database import Database, read_database
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.measure import Bench, Timing
from hybridpar.tvm_kernels.operation import KernelKey, operations
from hybridpar.tvm_kernels.operations.batch_norm import BatchNormAct, NormBench, norm_floor_ms, norm_key
from hybridpar.tvm_kernels.search import Progress, search_all
from hybridpar.tvm_kernels.shapes import NormShape
from hybridpar.tvm_kernels.tuner import Tuned, tune
from tests.tvm_kernels.standin import norm_record

SHAPE = NormShape(6 * 35, 24, "silu")
KEYS = [norm_key(NormShape(rows, 8, "relu"), 1, cpu_fingerprint()) for rows in (64, 32, 16)]
COPIES = ((1 << 30, 1e9),)


@pytest.mark.usefixtures("kernels")
def test_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []
    inner = measure.time_pairs

    def pairs(*told: object) -> Timing:
        given.append((*told[3:5], torch.get_num_threads()))
        return inner(*told)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "time_pairs", pairs)
    (found,) = tune(norm_key(SHAPE, 2, cpu_fingerprint()), 0.0, speed=COPIES)
    assert given[0] == (1, 2, 2), "a first pair, which is no measurement"
    assert 2 <= len(given[1:]) <= 4, "repeated until two agree"
    assert set(given[1:]) == {(7, 2, 2)}
    assert torch.get_num_threads() == 1
    assert found.final
    assert min(found.ms, found.stock_ms) > 0
    assert 0 < found.error < 2e-6
    assert found.stock_error is not None
    assert 0 < found.stock_error < 2e-6
    assert found.floor_ms == norm_floor_ms(SHAPE, COPIES, 2)


@pytest.mark.usefixtures("kernels")
def test_both_sides_compute_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[torch.Tensor]] = []
    inner = torch.autograd.grad

    def grad(y: torch.Tensor, inputs: object, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = inner(y, inputs, gradient)  # type: ignore[arg-type]
        made.append([y.detach(), *found])
        return found

    monkeypatch.setattr(torch.autograd, "grad", grad)
    NormBench(SHAPE).run(fused_batch_norm_act)
    NormBench(SHAPE).instead()
    assert len(made) == 2
    for one, two in zip(*made, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("part", "factor"), [(0, 1.001), (2, 0.9), (3, float("nan"))])
def test_a_wrong_result_or_gradient_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: int, factor: float
) -> None:
    inner = torch.autograd.grad
    # Torch's side calls this in float64 and, last of all, in float32; the kernels' side is the second call of three.
    calls = iter((False, True, False))

    def normed(*given: object) -> torch.Tensor:
        y = fused_batch_norm_act(*given)  # type: ignore[arg-type]
        return y * factor if part == 0 else y

    def gradients(*given: object) -> list[torch.Tensor]:
        found, own = list(inner(*given)), next(calls)  # type: ignore[arg-type]
        return [one * factor if own and place == part else one for place, one in enumerate(found, 1)]

    monkeypatch.setattr(BatchNormAct, "load", lambda *_: normed)
    monkeypatch.setattr(torch.autograd, "grad", gradients)
    monkeypatch.setattr(Bench, "compare", lambda *_: pytest.fail("it was timed"))
    assert tune(norm_key(SHAPE, 1, cpu_fingerprint()), 0.0, speed=COPIES) == []
    assert "a kernel of batch_norm_act 210x24 silu is wrong by" in caplog.text


def test_what_is_wrong_or_unsteady_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def tuner(key: KernelKey, *_: object, **__: object) -> list[Tuned]:
        if key == KEYS[0]:
            return []
        noise = 0.96 if key == KEYS[1] else 0.03
        return [Tuned({}, 1.0, 1.9, 0.5, 1e-7, final=True, stock_error=1e-7, noise=noise)]

    report = search_all(KEYS, tmp_path / "k.jsonl", 3.0, tuner=tuner)
    assert (report.tuned, report.empty, report.unsteady, report.left) == (1, 1, 1, 0)
    (record,) = read_database(tmp_path / "k.jsonl").records
    assert (record.key, record.noise, record.stock_error) == (KEYS[2], 0.03, 1e-7)
    assert "batch_norm_act 32x8 relu: measurements lay 96 % apart, so none is recorded" in caplog.text


def test_the_floor_is_eight_passes_at_the_speed_of_copies() -> None:
    shape = NormShape(1 << 10, 1 << 8, "none")  # 1 MiB
    assert norm_floor_ms(shape, ((1 << 40, float(1 << 30)),)) == pytest.approx(1e3 * 8 / 1024)
    assert norm_floor_ms(shape, ((1 << 40, float(1 << 30)),), threads=2) == pytest.approx(1e3 * 4 / 1024)
    # Forward touches two tensors, backward three: what does not fit is as slow as memory.
    tiers = ((2 << 20, float(2 << 30)), (1 << 40, float(1 << 30)))
    assert norm_floor_ms(shape, tiers) == pytest.approx(1e3 * (3 / 2 + 5) / 1024)


def test_a_saving_is_the_difference_of_medians_as_often_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(ms=1.0, stock_ms=1.5, speedup=1.5, pairs=5)
    monkeypatch.setattr(Bench, "compare", lambda self, kernel, seconds, least, rival: timing)
    choices = Choices(
        Database("", [norm_record(key.shape) for key in KEYS[:2]]), lambda records: ["made"] * len(records)
    )
    assert choices.measure_saving({KEYS[0]: 3, KEYS[1]: 1, KEYS[2]: 7}) == pytest.approx(2.0)
    assert choices.measure_saving({}) == 0.0


# ------------------------------------------------------------------------------------------------------------- a tune


class Measure:
    """Measures at once, and remembers what it was asked."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.asked: list[NormShape] = []
        self.seconds: list[float] = []
        self.stop_at = stop_at

    def __call__(self, key: KernelKey, seconds: float, *_: object, **__: object) -> list[Tuned]:
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(key.shape)
        self.seconds.append(seconds)
        return [Tuned({}, 1.0, 2.0, 0.5, 1e-7, final=True)]


def test_everything_is_measured_once_the_largest_first_and_kept(tmp_path: Path) -> None:
    file, measured, told = tmp_path / "k.jsonl", Measure(), list[Progress]()
    report = search_all([*KEYS[::-1], KEYS[0]], file, 3.0, tuner=measured, on_progress=told.append)
    assert (report.tuned, report.skipped, report.left) == (3, 0, 0)
    assert measured.asked == [key.shape for key in KEYS]
    assert max(measured.seconds) <= 1.5
    assert [(one.done, one.total, one.key) for one in told] == [(place, 3, key) for place, key in enumerate(KEYS)]
    read = read_database(file)
    assert set(read) == set(KEYS)
    record = read.best(KEYS[0])
    assert record is not None
    assert (record.ms, record.stock_ms, record.floor_ms, record.error) == (1.0, 2.0, 0.5, 1e-7)
    assert record.versions == dict(operations()["batch_norm_act", "cpu"].versions)
    assert search_all(KEYS, file, 3.0, tuner=measured).skipped == 3
    assert search_all(KEYS, file, 3.0, tuner=measured, again=True).tuned == 3


def test_who_stops_keeps_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "k.jsonl"
    report = search_all(KEYS, file, 3.0, tuner=Measure(stop_at=2))
    assert (report.stopped, report.tuned, report.left) == (True, 2, 1)
    again = Measure()
    assert search_all(KEYS, file, 3.0, tuner=again).tuned == 1
    assert again.asked == [KEYS[2].shape]


def test_no_time_is_no_measurement(tmp_path: Path) -> None:
    report = search_all(KEYS, tmp_path / "k.jsonl", 0.0, tuner=Measure())
    assert (report.tuned, report.left) == (0, 3)
    assert not list(tmp_path.iterdir())


def test_without_kernels_torch_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(norm_kernels, "table", dict)
    assert search_all(KEYS, tmp_path / "k.jsonl", 3.0).empty == 3
    assert caplog.text.count("there is no kernel") == 3
