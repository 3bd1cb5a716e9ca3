"""Tests that a parameter server decodes compressed pushes as the worker encoded them.

A difference would train another model without an error.
"""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import CODECS, Policy, parse_codec, read_policy
from hybridpar.errors import SyncError
from hybridpar.server import PushDecoder, PushEncoder, cut_model
from tests.compress.team import same_bits
from tests.compress.test_every_codec import VARIANTS

SHAPES = {"bias": (7,), "matrix": (40, 33), "filters": (6, 5, 3, 3), "conv": (50, 16, 3, 3), "scalar": ()}
STRIPES = cut_model([(name, shape, False) for name, shape in SHAPES.items()], 2)


def both(text, stripe):
    policy = Policy.of(parse_codec(text))
    return PushEncoder(policy, stripe), PushDecoder(policy, stripe)


def send(encoder, decoder, gradient):
    """What the worker's own coders decoded, and what the server did."""
    meant, got, warm = torch.empty(encoder.stripe.count), torch.empty(encoder.stripe.count), encoder.warm
    sizes = encoder.sizes
    parts = []
    for number, (first, last) in enumerate(encoder.stripe.ranges):
        parts.append(encoder.encode(number, gradient[first:last], meant[first:last]))
    assert [part.numel() for part in parts] == sizes  # known before anything was encoded
    decoder.decode(torch.cat(parts), got, warm)
    return meant, got


def is_for_servers(text: str) -> bool:
    """Whether what comes of a codec are gradients."""
    name = text.partition(":")[0]
    return name not in CODECS or CODECS.get(name).gives_sums


@pytest.mark.parametrize("text", filter(is_for_servers, [*CODECS, *VARIANTS]))
def test_the_server_decodes_what_the_worker_meant(text):
    for stripe in STRIPES:
        encoder, decoder = both(text, stripe)
        for seed in range(4):
            gradient = torch.randn(stripe.count, generator=torch.Generator().manual_seed(seed))
            meant, got = send(encoder, decoder, gradient)
            assert same_bits(meant, got)
            # Of the steps that do not count both forget what they did.
            encoder.rollback() if seed % 3 == 1 else encoder.commit()
            decoder.rollback() if seed % 3 == 1 else decoder.commit()


@pytest.mark.parametrize("text", ["powersgd:rank=1,gain=0", "qsgd_mn", "grandk_mn"])
def test_a_worker_that_joins_tells_its_twin_how_far_it_is(text):
    (stripe,) = cut_model([("conv", (50, 16, 3, 3), False)], 1)
    encoder, decoder = both(text, stripe)
    for seed in range(3):
        send(encoder, decoder, torch.randn(stripe.count, generator=torch.Generator().manual_seed(seed)))
        encoder.commit(), decoder.commit()
    late = PushDecoder(Policy.of(parse_codec(text)), stripe, encoder.shared_state())
    meant, got = send(encoder, late, torch.ones(stripe.count))
    assert same_bits(meant, got)


def test_rules_by_name_hold_for_parts_of_a_parameter_too():
    stripe = cut_model([("a.weight", (64, 64), False), ("b.weight", (64, 64), False)], 2)[0]
    encoder = PushEncoder(read_policy("a.* -> onebit"), stripe)
    assert sum(encoder.sizes) < 4 * stripe.count / 10


def test_a_message_of_another_size_is_refused():
    stripe = STRIPES[0]
    _, decoder = both("onebit", stripe)
    full, _ = both("none", stripe)
    message = torch.cat([full.encode(n, torch.zeros(b - a)) for n, (a, b) in enumerate(stripe.ranges)])
    with pytest.raises(SyncError, match="where the codec makes"):
        decoder.decode(message, torch.empty(stripe.count))
