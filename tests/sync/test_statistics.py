"""Means of BatchNorm statistics and of whole models, as one worker with all samples has them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hybridpar.sync.statistics import Statistics, average_model
from tests.ranks import run_ranks


def _merge(nets, weights):
    """What every one of some models has afterwards; all of them in this process."""
    parts = [Statistics(lambda net=net: dict(net.named_buffers()), rank, len(nets)) for rank, net in enumerate(nets)]
    total = sum(part.message(weight) for part, weight in zip(parts, weights, strict=True))
    for part in parts:
        part.load(total, sum(weights))


def test_moments_are_those_of_all_samples():
    shards = [torch.randn(5, 3) * 2, torch.randn(11, 3) + 4]
    nets = [nn.BatchNorm1d(3, momentum=None) for _ in shards]
    for net, shard in zip(nets, shards, strict=True):
        net.running_mean.copy_(shard.mean(0))
        net.running_var.copy_(shard.var(0, correction=0))
    nets[1].num_batches_tracked.fill_(7)
    _merge(nets, [5, 11])
    whole = torch.cat(shards)
    for net in nets:
        torch.testing.assert_close(net.running_mean, whole.mean(0))
        torch.testing.assert_close(net.running_var, whole.var(0, correction=0))
        assert net.num_batches_tracked == 7


def test_buffers_are_those_that_a_name_stands_for_now():
    nets = [nn.BatchNorm1d(3) for _ in range(2)]
    parts = [Statistics(lambda net=net: dict(net.named_buffers()), rank, 2) for rank, net in enumerate(nets)]
    for value, net in enumerate(nets):
        net.running_mean = torch.full((3,), float(value), dtype=torch.float64)
    total = parts[0].message(1) + parts[1].message(1)
    for part, net in zip(parts, nets, strict=True):
        part.load(total, 2)
        assert net.running_mean.tolist() == [0.5] * 3


@pytest.mark.parametrize("workers", [2, 3])
def test_equal_buffers_stay_equal_bit_by_bit(workers):
    net = nn.BatchNorm2d(8)
    net.running_mean.normal_()
    net.running_var.uniform_(0.1, 3)
    net.register_buffer("mask", torch.full((2,), -torch.inf))
    net.register_buffer("scale", torch.randn(3))
    nets = [copy.deepcopy(net) for _ in range(workers)]
    _merge(nets, [7, 5, 12][:workers])
    for other in nets:
        assert all(torch.equal(one, two) for one, two in zip(other.buffers(), net.buffers(), strict=True))


def test_a_worker_without_weight_counts_nothing():
    nets = [nn.BatchNorm1d(2) for _ in range(3)]
    nets[0].running_mean.fill_(torch.nan)
    nets[1].running_mean.fill_(1.0)
    nets[2].running_mean.fill_(2.0)
    _merge(nets, [0, 3, 1])
    assert all(torch.equal(net.running_mean, torch.full((2,), 1.25)) for net in nets)


def _average(world):
    torch.manual_seed(world.rank)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    return net.state_dict(), average_model(net, world)


def test_the_mean_of_models_is_new_and_equal_on_all_workers():
    (own, mean), (other, same) = run_ranks(_average, 2)
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (own[name] + other[name]).div(2).to(tensor.dtype))
        assert torch.equal(tensor, same[name])
        assert tensor.stride() == own[name].stride()
