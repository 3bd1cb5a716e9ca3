"""Tests learners and a shard in one process, without a clock: the effect of stale gradients, and lost messages."""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import CODECS, Policy, parse_codec
from hybridpar.server import Push, Rules, Shard, cut_model
from hybridpar.server.encoding import PushDecoder, PushEncoder
from tests.server.problems import DigitsGradient, sgd, unsent
from tests.server.test_encoding import STRIPES

LEARNERS = 30


def train(rules: Rules) -> tuple[DigitsGradient, Shard]:
    """Let equally fast learners push in turn, twenty times each."""
    problem = DigitsGradient(8, hidden=32)
    (stripe,) = cut_model([("w", tuple(problem.start.shape), False)], 1)
    shard = Shard(stripe, problem.start, rules, sgd(0.5))
    for learner in range(LEARNERS):
        shard.join(learner)
    held = [(problem.start, 0)] * LEARNERS
    for number in range(20 * LEARNERS):
        turn, learner = divmod(number, LEARNERS)
        weights, clock = held[learner]
        for answer in shard.push(Push(learner, turn + 1, clock), problem(learner, turn, weights)):
            held[answer.learner] = shard.values.clone(), answer.clock
    return problem, shard


def test_a_rate_that_is_stable_in_sync_diverges_on_stale_gradients_and_not_where_they_count_less():
    """Zhang et al. 2016, figures 5 to 7, in kind: 30 learners, one rate for all."""
    problem, synchronous = train(Rules.synchronous(LEARNERS))
    start = problem.loss(problem.start)
    assert problem.loss(synchronous.values) < 0.4 < 2 < start
    losses = {}
    for scale in ("none", "inverse", "mean"):
        problem, stale = train(Rules.asynchronous(LEARNERS, scale))
        losses[scale] = problem.loss(stale.values)
        ages = stale.histogram
        assert sum(age * count for age, count in ages.items()) / ages.total() == pytest.approx(LEARNERS - 1, rel=0.05)
    assert not losses["none"] < 100 * start  # diverged, to NaN perhaps
    assert losses["inverse"] < 0.4
    assert losses["mean"] < 0.4


KEEPERS = [text for text in CODECS if CODECS.get(text).gives_sums and parse_codec(text).feedback]


@pytest.mark.parametrize("stripe", STRIPES, ids=["first", "second"])
@pytest.mark.parametrize("text", ["none", *KEEPERS, "onebit:meet=shard,least=1,warmup=2"])
def test_a_lost_push_loses_nothing_and_a_doubled_one_adds_nothing(text, stripe):
    """What all pushes that were heard of were, is what arrived and what the learners still keep."""
    policy, draw = Policy.of(parse_codec(text)), torch.Generator().manual_seed(5)
    shard = Shard(stripe, torch.zeros(stripe.count), Rules.asynchronous(3), sgd())
    learners, decoder = [PushEncoder(policy, stripe) for _ in range(3)], PushDecoder(policy, stripe)
    for learner in range(3):
        shard.join(learner)
    computed, received = (torch.zeros(stripe.count, dtype=torch.float64) for _ in range(2))
    clocks, sequences = [0] * 3, [0] * 3
    for _ in range(24):
        learner, times = (int(torch.randint(3, (), generator=draw)) for _ in range(2))
        encoder = learners[learner]
        gradient = torch.randn(stripe.count, generator=draw)
        messages = encoder.encode([gradient[a:b] for a, b in stripe.ranges])
        if times == 0:  # lost on its way, and given up
            continue
        sequences[learner] += 1
        computed += gradient
        for _ in range(times):  # once, or again because its answer was lost
            decoded = torch.empty(stripe.count)
            if shard.expects(learner, sequences[learner]):
                decoder.decode(*messages, decoded)
                received += decoded
            (answer,) = shard.push(Push(learner, sequences[learner], clocks[learner]), decoded)
        encoder.commit()
        clocks[learner] = answer.clock
    assert shard.clock == sum(sequences) > 0
    found = received + sum(unsent(encoder) for encoder in learners)
    torch.testing.assert_close(found, computed, rtol=1e-4, atol=1e-4)
