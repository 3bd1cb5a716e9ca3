"""Tests the simulation of parameter servers with up to thirty learners in one process.

The published behaviour is reproduced, with the same result each time.
"""

from __future__ import annotations

import heapq
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.compress import CODECS, ErrorFeedback, parse_codec
from hybridpar.errors import UsageError
from hybridpar.server import Rules
from tests.server.problems import DigitsGradient, digits, sgd
from tests.server.simulate import Arrival, Happening, Simulation, round_robin


def simulation(rules, lr=0.1, *, batch=8, hidden=0, momentum=0.0, **options):
    problem = DigitsGradient(batch, hidden)
    return problem, Simulation(problem.shapes, problem.start, rules, sgd(lr, momentum), problem, **options)


@pytest.mark.parametrize("shards", [1, 2])
def test_sync_is_sgd_on_the_concatenated_batch(shards):
    problem, simulated = simulation(Rules.synchronous(3), momentum=0.9, shards=shards)
    weights = problem.start.requires_grad_()
    plain = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    inputs, labels = digits()
    for step in range(6):
        chosen = [
            torch.randint(len(labels), (8,), generator=torch.Generator().manual_seed(1000 * learner + step))
            for learner in range(3)
        ]
        together = torch.cat(chosen)
        weights.grad = problem.at(weights.detach(), inputs[together], labels[together])
        plain.step()
        simulated.play(Arrival(learner) for learner in (2, 0, 1))
    # The mean of three means of eight is rounded otherwise than a mean of 24.
    torch.testing.assert_close(simulated.weights, weights.detach(), rtol=1e-5, atol=1e-6)


def test_softsync_of_as_many_as_there_are_learners_is_async():
    results = []
    for rules in (Rules.soft(5, 5, "inverse"), Rules.asynchronous(5, "inverse")):
        _, simulated = simulation(rules, 0.05)
        simulated.play(round_robin(5, 60))
        results.append(simulated.weights)
    assert torch.equal(*results)


def test_a_rate_that_is_stable_in_sync_diverges_on_stale_gradients_and_not_where_they_count_less():
    """Zhang et al. 2016, figures 5 to 7, in kind: 30 learners, one rate for all."""
    learners, lr, rounds = 30, 0.5, 20
    problem, synchronous = simulation(Rules.synchronous(learners), lr, hidden=32)
    synchronous.play(round_robin(learners, rounds * learners))
    start, reached = problem.loss(problem.start), problem.loss(synchronous.weights)
    assert reached < 0.4 < 2 < start

    losses = {}
    for scale in ("none", "inverse", "mean"):
        _, stale = simulation(Rules.asynchronous(learners, scale), lr, hidden=32)
        stale.play(round_robin(learners, rounds * learners))
        losses[scale] = problem.loss(stale.weights)
        assert stale.shards[0].histogram.mean == pytest.approx(learners - 1, rel=0.05)
    assert not losses["none"] < 100 * start  # diverged, to NaN perhaps
    assert losses["inverse"] < 0.4
    assert losses["mean"] < 0.4


KEEPERS = [text for text in CODECS if CODECS.get(text).gives_sums and isinstance(parse_codec(text), ErrorFeedback)]


@pytest.mark.parametrize("text", ["none", *KEEPERS, "onebit:meet=shard,least=1,warmup=2"])
def test_a_lost_push_loses_nothing_and_a_doubled_one_adds_nothing(text):
    """What all pushes that were heard of were, is what arrived and what the learners still keep."""
    _, simulated = simulation(Rules.asynchronous(3), hidden=40, shards=2, codec=text)
    draw = torch.Generator().manual_seed(5)
    kinds = [Happening.ARRIVES, Happening.LOST, Happening.UNHEARD, Happening.DOUBLED]
    for _ in range(24):
        learner, kind = torch.randint(3, (), generator=draw), torch.randint(4, (), generator=draw)
        simulated.happen(Arrival(int(learner), kinds[int(kind)]))
    assert simulated.shards[0].clock == simulated.shards[1].clock > 0
    found = simulated.received + simulated.unsent()
    torch.testing.assert_close(found, simulated.computed, rtol=1e-4, atol=1e-4)


def test_what_the_server_decodes_is_what_the_learner_left_out_of_its_residual():
    _, simulated = simulation(Rules.asynchronous(2), hidden=40, codec="powersgd:rank=1,gain=0")
    simulated.play(round_robin(2, 10))
    left = simulated.unsent()
    assert float(left.norm()) > 0.1 * float(simulated.computed.norm())  # it did leave something out
    torch.testing.assert_close(simulated.received + left, simulated.computed, rtol=1e-4, atol=1e-5)


def test_learners_die_and_join_and_the_others_go_on():
    problem, simulated = simulation(Rules.asynchronous(4), 0.2)
    simulated.play(round_robin(4, 40))
    simulated.happen(Arrival(2, Happening.DIES))
    simulated.play(Arrival(number) for _ in range(20) for number in (0, 1, 3))
    simulated.happen(Arrival(9, Happening.JOINS))
    assert simulated.ages()[-1] == 0
    simulated.play(Arrival(number) for _ in range(20) for number in (0, 1, 3, 9))
    assert simulated.shards[0].clock == 40 + 60 + 80
    assert problem.loss(simulated.weights) < 0.3


def play_timed(simulated, seconds, pushes):
    """Learners compute for so many seconds, by number, and push as fast as they can; the time of the last push."""
    queue = [(seconds(number), number) for number in simulated._learners]
    heapq.heapify(queue)
    now = 0.0
    for _ in range(pushes):
        now, number = heapq.heappop(queue)
        for free in simulated.happen(Arrival(number)):
            heapq.heappush(queue, (now + seconds(free), free))
    return now


def test_a_slow_learner_holds_up_those_who_wait_for_it():
    """One of four is four times slower: what the servers take in while it makes ten steps."""

    def pushes_per_second(rules):
        _, simulated = simulation(rules, 0.01, batch=1)
        return 120 / play_timed(simulated, lambda learner: 4.0 if learner == 0 else 1.0, 120)

    synchronous = pushes_per_second(Rules.synchronous(4))
    assert synchronous == pytest.approx(1.0)
    for rules in (Rules.asynchronous(4), Rules.soft(4, 2), Rules.soft(4, 1)):
        assert pushes_per_second(rules) > 2 * synchronous
    bounded = pushes_per_second(Rules.asynchronous(4, bound=0))
    assert bounded == pytest.approx(synchronous, rel=0.05)  # nobody may be ahead at all


def test_nobody_is_ahead_by_more_than_the_bound():
    _, simulated = simulation(Rules.asynchronous(4, bound=3), 0.01, batch=1)
    play_timed(simulated, lambda learner: 9.0 if learner == 0 else 1.0, 80)
    done = [learner.computed for learner in simulated._learners.values()]
    assert max(done) - min(done) <= 3 + 1  # and one that is being computed
    assert simulated.shards[0].histogram.most <= 3 * (3 + 1 + 3)


def test_a_schedule_cannot_have_a_waiting_learner_push():
    _, simulated = simulation(Rules.synchronous(2))
    simulated.happen(Arrival(0))
    with pytest.raises(UsageError, match="waits"):
        simulated.happen(Arrival(0))


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(list(Happening)[:4])), max_size=30))
def test_a_schedule_says_the_same_every_time(lines):
    schedule = [Arrival(learner, what) for learner, what in lines]
    results = []
    for _ in range(2):
        _, simulated = simulation(Rules.soft(4, 2), codec="onebit:least=1", batch=2)
        simulated.play(schedule)
        results.append(simulated)
    assert torch.equal(results[0].weights, results[1].weights)
    assert results[0].shards[0].histogram.counts == results[1].shards[0].histogram.counts
    assert all(math.isfinite(value) for value in results[0].weights.tolist())
