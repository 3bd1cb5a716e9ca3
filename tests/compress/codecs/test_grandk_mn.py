"""Tests the codec GRandK-MN: all workers send the same elements in turn, and values that wait are not lost."""

from __future__ import annotations

import pytest
import torch

from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "grandk_mn:rate=0.3,levels=4/8,least=1",
    "grandk_mn:feedback=off",
)

SHAPES = {"w": (40, 25)}


@pytest.mark.parametrize("text", ["grandk_mn:rate=0.15", "grandk_mn:rate=0.15,levels=4/8,feedback=off"])
def test_each_element_goes_once_in_each_turn_of_the_queue(text: str) -> None:
    team = Team(text, SHAPES, 2)
    ones = [[torch.ones(1000)] for _ in range(2)]
    orders = []
    for _ in range(2):
        sent = torch.stack([team.step(ones)[0] != 0 for _ in range(7)])  # 150 of 1000 at a time
        assert (sent.sum(0) == 1).all()
        assert set(sent.sum(1).tolist()) == {142, 143}
        orders.append(sent)
    assert not torch.equal(*orders), "the queue is drawn anew"
