"""What is predicted of double buffering."""

from __future__ import annotations

import math

import pytest

from hybridpar.errors import UsageError
from hybridpar.train.gain import predicted_gain


def test_sync_of_half_a_batch_is_hidden_by_both_forms():
    gain = predicted_gain(100.0, 50.0)
    assert (gain.plain_ms, gain.delay_ms, gain.half_ms) == (150, 100, 100)
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
