"""Messages of a quantiser that go to everybody."""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import Collective, TensorSpec, bind, parse_codec
from hybridpar.compress.feedback import FeedbackCoder
from hybridpar.errors import UsageError
from tests.compress.team import Team

SHAPES = {"w": (40, 33), "v": (8, 3, 3, 5)}
TEXTS = ["onebit", "onebit:least=1", "twobit:least=1", "twobit:least=1,factor=1.1"]


def collective(text: str, workers: int) -> Collective:
    return bind(parse_codec(text), TensorSpec("w", (40, 33), workers=workers)).rounds[0].collective


@pytest.mark.parametrize("text", ["onebit", "twobit:least=1"])
def test_two_workers_send_to_each_other_and_more_to_owners(text: str) -> None:
    assert [collective(text, workers) for workers in (1, 2, 3)] == [
        Collective.GATHER,
        Collective.GATHER,
        Collective.SHARD,
    ]
    more = "," if ":" in text else ":"
    assert collective(f"{text}{more}meet=shard", 2) is Collective.SHARD
    assert collective(f"{text}{more}meet=gather", 3) is Collective.GATHER


@pytest.mark.parametrize("text", TEXTS)
def test_between_two_workers_it_takes_no_more_bytes(text: str) -> None:
    more = "," if ":" in text else ":"
    ways = [Team(f"{text}{more}meet={meet}", SHAPES, 2).exchanges[0].traffic.wire for meet in ("gather", "shard")]
    assert ways[0] <= ways[1] + 16  # the stripes' messages end at multiples of 8 each


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("text", TEXTS)
def test_what_all_send_is_added_once(text: str, workers: int, average: bool) -> None:
    """The result and what is kept back are the gradients, with nothing lost at an owner."""
    team = Team(f"{text},meet=gather" if ":" in text else f"{text}:meet=gather", SHAPES, workers, average=average)
    gradients = team.gradients(0)
    outs = team.step(gradients)
    for number, name in enumerate(SHAPES):
        unsent = sum(coder.unsent().double() for coder in team.coders(name) if isinstance(coder, FeedbackCoder))
        total = sum(worker[number].double() for worker in gradients)
        came = outs[number].double() * (workers if average else 1)
        torch.testing.assert_close(came + unsent, total, rtol=0, atol=2e-5)


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="meet=ring"):
        parse_codec("onebit:meet=ring")
    with pytest.raises(UsageError, match="pull=full with meet=gather"):
        parse_codec("twobit:pull=full,meet=gather")
