"""Tests how a model's parameters are divided among servers: completely, evenly, and alike in every process."""

from __future__ import annotations

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.errors import UsageError
from hybridpar.server import cut_model, described_parameters
from hybridpar.server.place import Place
from hybridpar.server.stripes import cut_stages, parts_of_a_host, piece_views, trained_parameters


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
    described = described_parameters(torchvision.models.resnet18())
    total = sum(torch.Size(shape).numel() for _, shape, _ in described)
    for shards in (2, 3, 4, 8):
        counts = [stripe.count for stripe in cut_model(described, shards)]
        assert max(counts) < 1.02 * total / shards


def test_a_process_holds_several_shards_of_a_large_model_and_one_of_a_small():
    large, small = (described_parameters(model) for model in (torchvision.models.resnet18(), torch.nn.Linear(9, 9)))
    assert [parts_of_a_host(large, hosts) for hosts in (1, 2, 8)] == [6, 6, 5]
    assert parts_of_a_host(small, 2) == parts_of_a_host(small, 3) == 1


def test_weight_decay_is_where_the_plain_run_has_it():
    decays = {name: own for name, _, own in described_parameters(torchvision.models.resnet18())}
    assert decays["conv1.weight"]
    assert not decays["bn1.weight"]
    assert not decays["fc.bias"]


def test_pieces_are_views_of_the_models_own_memory():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 6, 3)).to(
        memory_format=torch.channels_last
    )
    parameters = trained_parameters(model)
    stripes = cut_model(described_parameters(model), 2)
    for stripe in stripes:
        for view in piece_views(stripe, dict(parameters)):
            view.data.fill_(7)
    assert all(bool((own == 7).all()) for own in parameters.values())


def test_more_shards_than_parameters_is_a_mistake():
    with pytest.raises(UsageError, match="3 shards for a model with 2 trained"):
        cut_model([("a", (4,), False), ("b", (4,), False)], 3)


@pytest.mark.parametrize(("servers", "hosts_each"), [(1, 1), (2, 1), (3, 3), (4, 2), (0, 3)])
def test_stages_have_shards_at_processes_of_their_own_where_these_can_be_divided(servers, hosts_each):
    place = Place(0, 6, servers, None, "token", positions=2)
    assert place.hosts_each == hosts_each
    count = 2 * hosts_each
    numbers = [place.shards_of(position, count) for position in range(2)]
    assert sorted(numbers[0] + numbers[1]) == list(range(2 * count))
    assert numbers[0][0] == 0
    hosts = [[number % place.hosts for number in own] for own in numbers]
    for own in hosts:  # links take turns at one process, which they know by their own order
        assert all(host == own[index % hosts_each] for index, host in enumerate(own))
    assert (set(hosts[0]) & set(hosts[1]) == set()) == (place.hosts % 2 == 0)


def test_each_stage_is_cut_by_itself():
    parameters = [(name, (1000, 1000), False) for name in "abcd"]
    first, second = cut_stages(parameters, ["ab", "cd"], 2, {"c": 0.5})
    assert len(first) == len(second) == 2
    assert {piece.name for stripe in first for piece in stripe.pieces} == {"a", "b"}
    assert {(piece.name, piece.scale) for stripe in second for piece in stripe.pieces} == {("c", 0.5), ("d", 1.0)}
    with pytest.raises(UsageError, match="shards for a stage with 1 trained parameter tensors"):
        cut_stages(parameters, ["abc", "d"], 2)


def test_what_servers_do_not_hold_is_named():
    with pytest.raises(UsageError, match=r"weight.*float64"):
        described_parameters(torch.nn.Linear(2, 2).double())


def test_frozen_parameters_stay_with_the_workers():
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    assert [name for name, _, _ in described_parameters(model)] == ["bias"]
