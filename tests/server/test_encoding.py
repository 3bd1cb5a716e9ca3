"""Tests that a parameter server decodes compressed pushes as the worker encoded them.

A difference would train another model without an error.
"""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import CODECS, Policy, parse_codec, read_policy
from hybridpar.server import Push, Rules, Shard, cut_model
from hybridpar.server.encoding import PushDecoder, PushEncoder
from tests.compress.team import same_bits
from tests.compress.test_every_codec import VARIANTS
from tests.server.problems import sgd, unsent

SHAPES = {"bias": (7,), "matrix": (40, 33), "filters": (6, 5, 3, 3), "conv": (50, 16, 3, 3), "scalar": ()}
STRIPES = cut_model([(name, shape, False) for name, shape in SHAPES.items()], 2)


def both(text, stripe):
    policy = Policy.of(parse_codec(text))
    return PushEncoder(policy, stripe), PushDecoder(policy, stripe)


def parts_of(stripe, flat):
    return [flat[first:last] for first, last in stripe.ranges]


def send(encoder, decoder, gradient):
    """What the worker's coders read of their messages, and what the server did."""
    meant, got = torch.empty(encoder.stripe.count), torch.empty(encoder.stripe.count)
    messages = encoder.encode(parts_of(encoder.stripe, gradient))
    for coder, message, out in zip(encoder._coders, messages[0], parts_of(encoder.stripe, meant), strict=True):
        out.copy_(message) if isinstance(message, torch.Tensor) else coder.working.finish(out)
    decoder.decode(*messages, got)
    return meant, got


def is_for_servers(text: str) -> bool:
    """Whether what comes of a codec are gradients."""
    name = text.partition(":")[0]
    return "scope=bucket" not in text and (name not in CODECS or CODECS.get(name).gives_sums)


@pytest.mark.parametrize("text", list(filter(is_for_servers, [*CODECS, *VARIANTS])))
def test_the_server_decodes_what_the_worker_meant(text):
    for stripe in STRIPES:
        encoder, decoder = both(text, stripe)
        for seed in range(4):
            gradient = torch.randn(stripe.count, generator=torch.Generator().manual_seed(seed))
            meant, got = send(encoder, decoder, gradient)
            assert same_bits(meant, got)
            if seed % 3 != 1:  # else the step does not count
                encoder.commit()


def test_rules_by_name_hold_for_parts_of_a_parameter_too():
    stripe = cut_model([("a.weight", (64, 64), False), ("b.weight", (64, 64), False)], 2)[0]
    pieces, _ = PushEncoder(read_policy("a.* -> onebit"), stripe).encode(parts_of(stripe, torch.ones(stripe.count)))
    assert sum(one.nbytes for (one,) in pieces) < 4 * stripe.count / 10


@pytest.mark.parametrize("other", ["bf16", "twobit"])
def test_messages_of_another_codec_or_size_are_refused(other):
    stripe = STRIPES[0]
    _, decoder = both("onebit", stripe)
    encoder, _ = both(other, stripe)
    pieces, states = encoder.encode(parts_of(stripe, torch.zeros(stripe.count)))
    for wrong in (pieces, pieces[:1], [torch.zeros(3), *pieces[1:]]):
        with pytest.raises(ValueError, match=r"where the codec makes|zip\(\)"):
            decoder.decode(wrong, states, torch.empty(stripe.count))


KEEPERS = [text for text in CODECS if CODECS.get(text).gives_sums and parse_codec(text).feedback]


@pytest.mark.parametrize("stripe", STRIPES, ids=["first", "second"])
@pytest.mark.parametrize("text", ["none", *KEEPERS, "onebit:meet=shard,least=1,warmup=2"])
def test_a_lost_push_loses_nothing_and_a_doubled_one_adds_nothing(text, stripe):
    """What all pushes that were heard of were, is what arrived and what the learners still keep."""
    policy, draw = Policy.of(parse_codec(text)), torch.Generator().manual_seed(5)
    shard = Shard(stripe, torch.zeros(stripe.count), Rules.soft(3, 3), sgd())
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
