"""Messages of a quantiser that go to everybody."""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import Collective, TensorSpec, bind, parse_codec
from hybridpar.compress.feedback import FeedbackCoder
from tests.compress.team import Team

SHAPES = {"w": (40, 33), "v": (8, 3, 3, 5)}
TEXTS = ["onebit:least=1", "twobit:least=1"]


def collective(text: str, workers: int) -> Collective:
    return bind(parse_codec(text), TensorSpec("w", (40, 33), workers=workers)).rounds[0].collective


@pytest.mark.parametrize("text", TEXTS)
def test_two_workers_send_to_each_other_and_more_to_owners(text: str) -> None:
    assert [collective(text, workers) for workers in (2, 3)] == [Collective.GATHER, Collective.SHARD]
    assert collective(f"{text},meet=shard", 2) is Collective.SHARD
    assert collective(f"{text},meet=gather", 3) is Collective.GATHER


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_what_all_send_is_added_once(text: str, average: bool) -> None:
    """The result and what is kept back are the gradients, with nothing lost at an owner."""
    team = Team(f"{text},meet=gather", SHAPES, 3, average=average)
    gradients = team.gradients(0)
    outs = team.step(gradients)
    for number, name in enumerate(SHAPES):
        unsent = sum(coder.unsent().double() for coder in team.coders(name) if isinstance(coder, FeedbackCoder))
        total = sum(worker[number].double() for worker in gradients)
        came = outs[number].double() * (3 if average else 1)
        torch.testing.assert_close(came + unsent, total, rtol=0, atol=2e-5)
