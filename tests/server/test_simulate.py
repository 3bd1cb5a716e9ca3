"""Tests the simulation of parameter servers with up to thirty learners in one process.

The published behaviour is reproduced.
"""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import CODECS, ErrorFeedback, parse_codec
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
