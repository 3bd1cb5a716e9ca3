"""Tests one shard of a parameter server call by call: weights, clocks, and learners that wait."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import UsageError
from hybridpar.server import Push, Rules, Shard
from hybridpar.server.shard import Ledger
from hybridpar.server.stripes import Piece, Stripe
from tests.server.problems import sgd, small_shard

ONES = torch.ones(4)


def push(shard, learner, sequence, clock, gradient=ONES, **more):
    """With a barrier, weighted for the mean."""
    weight = 1 / shard.rules.collect if shard.rules.barrier else 1.0
    return shard.push(Push(learner, sequence, clock, **{"weight": weight, **more}), gradient)


def test_a_synchronous_update_waits_for_all_and_takes_their_mean():
    shard = small_shard(Rules(3, 3, barrier=True))
    assert push(shard, 2, 1, 0, 3 * ONES) == []
    assert push(shard, 0, 1, 0, 1 * ONES) == []
    assert (shard.clock, shard.waiting, shard.queued) == (0, [0, 2], 2)
    answers = push(shard, 1, 1, 0, 2 * ONES)
    assert [(one.learner, one.clock, one.staleness, one.applied) for one in answers] == [
        (0, 1, 0, True),
        (1, 1, 0, True),
        (2, 1, 0, True),
    ]
    assert torch.allclose(shard.values, -0.1 * 2 * ONES)
    assert shard.step == 1


def test_the_sum_does_not_depend_on_the_order_of_arrival():
    gradients = [torch.randn(4, generator=torch.Generator().manual_seed(seed)) * 10**seed for seed in range(3)]
    results = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        shard = small_shard(Rules(3, 3, barrier=True))
        for learner in order:
            push(shard, learner, 1, 0, gradients[learner])
        results.append(shard.values)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_every_gradient_is_an_update_without_a_barrier():
    shard = small_shard(Rules.soft(2, 2, "none"))
    (first,) = push(shard, 0, 1, 0)
    (second,) = push(shard, 1, 1, 0)
    assert [(one.clock, one.staleness) for one in (first, second)] == [(1, 0), (2, 1)]
    assert torch.allclose(shard.values, -0.2 * ONES)


def test_soft_synchrony_answers_at_once_and_updates_with_c_gradients_of_anybody():
    shard = small_shard(Rules.soft(4, 2, "none"))
    assert [one.clock for one in push(shard, 0, 1, 0)] == [0]
    assert [one.clock for one in push(shard, 0, 2, 0)] == [1]
    assert torch.allclose(shard.values, -0.1 * ONES)
    assert shard.clock == 1


@pytest.mark.parametrize(("scale", "weight"), [("none", 1.0), ("inverse", 1 / 3), ("mean", 1 / 4)])
def test_staleness_scales_the_gradient(scale, weight):
    shard = small_shard(Rules.soft(4, 4, scale))
    for sequence in (1, 2, 3):
        push(shard, 0, sequence, shard.clock, 0 * ONES)
    (answer,) = push(shard, 1, 1, 0)
    assert answer.staleness == 3
    assert torch.allclose(shard.values, -0.1 * weight * ONES)


def test_updates_of_a_part_of_the_gradients_take_that_part_of_a_steps_rate():
    def after_a_step(rules):
        shard = small_shard(rules)
        for learner in range(4):
            push(shard, learner, 1, shard.clock)
        return shard.values

    whole = after_a_step(Rules(4, 4, barrier=True))
    for split in (2, 4):
        parts = Rules.soft(4, split, "none")
        torch.testing.assert_close(after_a_step(replace(parts, rate=parts.collect / 4)), whole)
        assert not torch.allclose(after_a_step(parts), whole)


def test_a_parameter_that_nobody_used_is_left_alone_and_one_that_some_used_is_not():
    stripe = Stripe((Piece("a", 0, (2,), True, True), Piece("b", 0, (2,), True, True)))
    shard = Shard(stripe, torch.ones(4), Rules(2, 2, barrier=True), sgd(0.1, 0.9, 0.5))
    shard.join(0), shard.join(1)
    zeros = torch.tensor([1.0, 1.0, 0.0, 0.0])
    push(shard, 0, 1, 0, zeros, unused=frozenset({1}))
    push(shard, 1, 1, 0, zeros, unused=frozenset({1}))
    assert torch.equal(shard.values[2:], torch.ones(2))  # not even weight decay
    push(shard, 0, 2, 1, zeros, unused=frozenset({1}))
    push(shard, 1, 2, 1, zeros)
    assert bool((shard.values[2:] < 1).all())


def test_a_push_that_comes_twice_into_a_barrier_counts_once():
    shard = small_shard(Rules(2, 2, barrier=True))
    assert push(shard, 0, 1, 0) == push(shard, 0, 1, 0) == []
    answers = push(shard, 1, 1, 0)
    assert [one.learner for one in answers] == [0, 1]
    assert torch.allclose(shard.values, -0.1 * ONES)


def test_a_gradient_that_is_not_finite_changes_nothing():
    alone = small_shard(Rules.soft(2, 2))
    (answer,) = push(alone, 0, 1, 0, torch.full((4,), torch.nan), sound=False)
    assert (answer.applied, alone.clock, alone.taken) == (False, 0, 1)
    assert torch.equal(alone.values, torch.zeros(4))
    together = small_shard(Rules(2, 2, barrier=True))
    push(together, 0, 1, 0)
    answers = push(together, 1, 1, 0, torch.full((4,), torch.nan), sound=False)
    assert [one.applied for one in answers] == [False, False]  # as everywhere: all workers, or none
    assert torch.equal(together.values, torch.zeros(4))
    assert (together.clock, together.step) == (0, 1)


def test_a_learner_that_is_too_far_ahead_waits_for_the_slowest():
    shard = small_shard(Rules.soft(3, 3, bound=2))
    for sequence in (1, 2):
        assert [one.learner for one in push(shard, 0, sequence, shard.clock)] == [0]
    assert push(shard, 0, 3, shard.clock) == []
    assert [one.learner for one in push(shard, 1, 1, 0)] == [1]
    assert shard.waiting == [0]
    assert [one.learner for one in push(shard, 2, 1, 0)] == [0, 2]
    assert shard.clock == 5


def test_who_waits_for_a_learner_that_dies_goes_on():
    shard = small_shard(Rules.soft(2, 2, bound=0))
    assert push(shard, 0, 1, 0) == []
    assert [one.learner for one in shard.leave(1)] == [0]
    assert [one.learner for one in push(shard, 0, 2, 1)] == [0]


def test_who_joins_late_does_not_hold_up_the_others():
    shard = small_shard(Rules.soft(2, 2, bound=1))
    shard.leave(1)
    for sequence in range(1, 6):
        push(shard, 0, sequence, shard.clock)
    shard.join(1)
    assert [one.learner for one in push(shard, 0, 6, shard.clock)] == [0]
    assert push(shard, 0, 7, shard.clock) == []


def test_pushes_past_the_limit_change_nothing():
    shard = small_shard(Rules.soft(2, 2), limit=2)
    push(shard, 0, 1, 0), push(shard, 1, 1, 0)
    before = shard.values.clone()
    (answer,) = push(shard, 0, 2, 1)
    assert (answer.applied, shard.done, shard.taken) == (False, True, 2)
    assert torch.equal(shard.values, before)


def test_unknown_rules_are_refused():
    with pytest.raises(UsageError, match="from 1 to 4"):
        Rules.soft(4, 5)
    with pytest.raises(UsageError, match="unknown rule of staleness 'of nobody'"):
        Rules.soft(4, 2, "of nobody")


@settings(max_examples=60, deadline=None)
@given(learners=st.integers(1, 9), split=st.integers(1, 9), order=st.lists(st.integers(0, 8), min_size=1, max_size=150))
def test_the_mean_staleness_is_lambda_minus_1_over_c_in_every_order(learners, split, order):
    """Every update ages the weights of all learners but the one whose push made it, whoever pushes when."""
    split = min(split, learners)
    shard = small_shard(Rules.soft(learners, split), count=1)
    clocks, sequences = [0] * learners, [0] * learners
    for number in order:
        learner = number % learners
        sequences[learner] += 1
        (answer,) = push(shard, learner, sequences[learner], clocks[learner], torch.zeros(1))
        clocks[learner] = answer.clock
    on_the_way = sum(shard.clock - clock for clock in clocks)
    assert sum(shard.histogram.elements()) + on_the_way == shard.clock * (learners - 1)


def test_the_state_goes_on_as_if_nothing_had_happened():
    rules = Rules.soft(3, 1, "inverse")

    def steps(shard, first, last):
        for number in range(first, last):
            gradient = torch.randn(4, generator=torch.Generator().manual_seed(number))
            push(shard, number % 3, number // 3 + 1, max(0, shard.clock - number % 2), gradient)

    whole, half = (small_shard(rules, momentum=0.9) for _ in range(2))
    steps(whole, 0, 17)
    steps(half, 0, 9)  # after an update
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    again = small_shard(rules, momentum=0.9)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again.load_state_dict(state)
    for learner in range(3):
        again.join(learner)
    steps(again, 9, 17)
    assert torch.equal(again.values, whole.values)
    assert (again.clock, again.taken, again.histogram) == (whole.clock, whole.taken, whole.histogram)


def test_the_ledger_adds_pushes_up_to_steps():
    times = iter([0.0, 2.0, 5.0])
    ledger = Ledger(2, clock=lambda: next(times))
    ledger.arrived(Push(0, 1, 0, samples=8, loss=1.0), 0, queued=1)
    assert ledger.rows_after(0) == []
    ledger.arrived(Push(1, 1, 0, samples=8, loss=2.0, rate=0.5), 3, queued=2)
    (row,) = ledger.rows_after(0)
    assert (row.step, row.loss, row.samples, row.step_ms) == (1, 1.5, 16, 2000.0)
    assert (row.staleness, row.most_stale, row.queued, row.lr) == (1.5, 3, 1.5, 0.75)
    ledger.arrived(Push(0, 2, 0, samples=8, loss=4.0), 0, queued=1)
    ledger.arrived(Push(1, 2, 0, samples=8, loss=float("nan"), sound=False), 0, queued=1)
    assert [(row.step, row.loss, row.skipped) for row in ledger.rows_after(1)] == [(2, 4.0, 1)]
