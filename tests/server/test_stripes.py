"""Tests how a model's parameters are divided among servers: completely, evenly, and alike in every process."""

from __future__ import annotations

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.config.optimizer import Groups
from hybridpar.errors import UsageError
from hybridpar.server import cut_model
from hybridpar.server.stripes import described_parameters, piece_views, trained_parameters


@given(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=12), st.integers(1, 12))
def test_every_element_is_in_one_stripe(shapes, shards):
    shards = min(shards, len(shapes))
    parameters = [(f"p{number}", shape, False) for number, shape in enumerate(shapes)]
    stripes = cut_model(parameters, shards)
    assert len(stripes) == shards
    found = {name: [] for name, _, _ in parameters}
    for stripe in stripes:
        assert stripe.count > 0
        for piece in stripe.pieces:
            found[piece.name] += range(piece.start, piece.start + piece.count)
    for name, shape, _ in parameters:
        assert sorted(found[name]) == list(range(torch.Size(shape).numel()))


def test_shards_of_a_real_model_are_even():
    described = described_parameters(torchvision.models.resnet18(), Groups())
    total = sum(torch.Size(shape).numel() for _, shape, _ in described)
    for shards in (2, 3, 4, 8):
        counts = [stripe.count for stripe in cut_model(described, shards)]
        assert max(counts) < 1.02 * total / shards


def test_pieces_are_views_of_the_models_own_memory():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 6, 3)).to(
        memory_format=torch.channels_last
    )
    parameters = trained_parameters(model)
    stripes = cut_model(described_parameters(model, Groups()), 2)
    for stripe in stripes:
        for view in piece_views(stripe, dict(parameters)):
            view.data.fill_(7)
    assert all(bool((own == 7).all()) for own in parameters.values())


def test_more_shards_than_parameters_is_a_mistake():
    with pytest.raises(UsageError, match="3 shards for a model with 2 trained"):
        cut_model([("a", (4,), False), ("b", (4,), False)], 3)


def test_what_servers_do_not_hold_is_named():
    with pytest.raises(UsageError, match=r"weight.*float64"):
        described_parameters(torch.nn.Linear(2, 2).double(), Groups())
    turned = torch.nn.Linear(2, 3)
    turned.weight = torch.nn.Parameter(turned.weight.detach().t().contiguous().t())
    with pytest.raises(UsageError, match=r"weight.*strides \(1, 3\)"):
        described_parameters(turned, Groups())
