"""What is predicted of double buffering and of more workers, against the numbers of the paper."""

from __future__ import annotations

import math

import pytest
import torch

from hybridpar.errors import UsageError
from hybridpar.recipes.figures import WorkerFigures, measure_figures
from hybridpar.recipes.gain import best_workers, predicted_gain
from hybridpar.recipes.per_sample import momentum_per_step, rate_per_sample, rate_per_step, time_constant
from tests.recipes.training import batch, make_net


@pytest.mark.parametrize(
    ("samples", "sample_us", "wire_ms", "count"),
    [(2880, 122, 10, 184.9), (2880, 122, 12, 61.6), (2880, 122, 20, 16.8), (1024, 137, 20, 7.2)],
)
def test_the_papers_best_number_of_workers(samples, sample_us, wire_ms, count):
    figures = {"pass_s": 9.2e-3 / 3, "compression": 32, "update_s": 9e-3}
    best = best_workers(samples, sample_us * 1e-6, float_s=32 * wire_ms * 1e-3, **figures)
    assert best.count == pytest.approx(count, abs=0.06)
    assert best.bounded
    shared = samples / 2 * sample_us * 1e-6 + 9.2e-3
    assert best.speedup == pytest.approx((shared + 9e-3) / (wire_ms * 1e-3))


def test_without_compression_one_worker_is_best():
    best = best_workers(1024, 137e-6, pass_s=9.2e-3 / 3, float_s=0.32, update_s=9e-3)  # K-hat would be 0.26
    assert (best.count, best.speedup) == (1, 1)


def test_a_link_that_cannot_be_saturated():
    best = best_workers(1000, 1e-4, pass_s=1e-3, float_s=0.3, compression=32, update_s=0.01)
    assert best.count == math.inf
    assert not best.bounded
    assert best.speedup == pytest.approx((500e-4 + 3e-3 + 0.01) / 0.01)
    assert best_workers(10, 1e-3, pass_s=0, float_s=0, update_s=0).speedup == math.inf


def test_whole_batches_hide_twice_as_much():
    figures = {"pass_s": 0.0, "float_s": 0.1, "update_s": 0.0}
    assert best_workers(1000, 1e-3, half=False, **figures).count == 2 * best_workers(1000, 1e-3, **figures).count


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"sample_s": -1.0}, {"float_s": math.nan}, {"compression": 0.5}, {"update_s": math.inf}]
)
def test_figures_that_are_none(wrong):
    figures = {"samples": 10, "sample_s": 1.0, "pass_s": 1.0, "float_s": 1.0, "compression": 2.0, "update_s": 0.1}
    with pytest.raises(UsageError):
        best_workers(**{**figures, **wrong})


def test_sync_of_half_a_batch_is_hidden_by_both_forms():
    gain = predicted_gain(100.0, 50.0)
    assert (gain.plain_ms, gain.delay_ms, gain.half_ms) == (150, 100, 100)
    assert gain.over_plain == 1.5
    # Two thirds of the step hide it as well, if they are overlapped bucket by bucket: nothing is left to gain.
    assert gain.overlapped_ms == 100
    assert not gain.pays


def test_it_pays_where_the_backward_pass_is_too_short():
    assert predicted_gain(100.0, 90.0).pays
    assert predicted_gain(100.0, 50.0, exposed_ms=20.0).gain == pytest.approx(1.2)


def test_what_is_fixed_is_paid_twice_by_halves():
    gain = predicted_gain(100.0, 10.0, fixed_ms=20.0)
    assert gain.half_ms == gain.delay_ms + 20
    slow = predicted_gain(100.0, 1000.0)
    assert slow.half_ms == 2 * slow.delay_ms  # a slow link carries gradients of both halves
    assert predicted_gain(100.0, 0.0).gain == 1.0


@pytest.mark.parametrize("times", [(-1.0, 1.0), (1.0, math.nan), (0.0, 1.0)])
def test_times_that_are_none(times):
    with pytest.raises(UsageError):
        predicted_gain(*times)


def test_rates_per_sample():
    assert rate_per_step(rate_per_sample(0.1, 64), 128) == pytest.approx(0.2)
    constant = time_constant(0.9, 64)
    assert momentum_per_step(constant, 64) == pytest.approx(0.9)
    assert momentum_per_step(constant, 32) ** 2 == pytest.approx(0.9)
    assert momentum_per_step(time_constant(0.0, 64), 64) == 0


def test_figures_of_a_model_leave_it_as_it_was():
    net = make_net(norm=True)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    figures = measure_figures(net, *batch(0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert figures.gradient_bytes == 4 * sum(parameter.numel() for parameter in net.parameters())
    assert min(figures.sample_s, figures.pass_s, figures.update_s) > 0


def test_figures_say_how_many_workers_a_link_can_keep_busy():
    figures = WorkerFigures(sample_s=122e-6, pass_s=9.2e-3 / 3, update_s=9e-3, gradient_bytes=46_000_000 * 4)
    seconds = 32 * 20e-3  # of an exchange in float32
    best = figures.best(2880, 2 * figures.gradient_bytes / seconds, 32)
    assert best.count == pytest.approx(16.8, abs=0.06)
    with pytest.raises(UsageError, match="0 bytes per second"):
        figures.best(2880, 0)
