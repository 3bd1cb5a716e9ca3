"""What is found out of a model: parameters with their units, times per size and format, and nothing left changed."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.partition import profile_cache
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import find_units
from hybridpar.planner import rates, trials
from hybridpar.planner.cuts import balanced_cut, figures_of, smallest_cut
from hybridpar.planner.probes import speeds_of, with_rest
from hybridpar.planner.profile import parameters_of, profile_model
from hybridpar.planner.rates import measure_rates
from hybridpar.planner.ways import Way
from tests.ranks import run_ranks


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(288, 10),
    )


def images(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(samples, 3, 8, 8) for samples in sizes]


def test_parameters_are_the_model_s_each_with_the_unit_that_uses_it():
    model = net()
    model[3].bias.requires_grad_(False)
    units = find_units(trace_model(model, images(2)), images(2))
    found = parameters_of(units)
    assert [one.name for one in found] == [name for name, one in model.named_parameters() if name != "3.bias"]
    assert found[0].shape == (8, 3, 3, 3)
    assert [one.unit for one in found] == sorted(one.unit for one in found)
    modules = [units.graph.units[one.unit].module for one in found]
    assert modules == [one.name.partition(".")[0] for one in found]


def test_a_measured_profile_has_times_of_every_size(monkeypatch):
    monkeypatch.setattr(profile_cache, "MOST_NOISE", math.inf)  # whatever else runs meanwhile
    profile = profile_model(net(), images(4, 2))
    assert [size.samples for size in profile.sizes] == [2, 4]
    assert all(time > 0 for size in profile.sizes for time in size.forward_ms)
    assert profile.batch_norm
    assert profile.source == "measured"
    assert profile.samples == 2


def test_figures_of_stages_are_those_of_their_units():
    profile = profile_model(net(), images(2), measure=False)
    whole = figures_of(profile, balanced_cut(profile, 1), 2)
    for cut in (balanced_cut(profile, 2), smallest_cut(profile, 2)):
        parts = figures_of(profile, cut, 2)
        assert sum(parts.forward_ms) == pytest.approx(whole.forward_ms[0])
        assert sum(parts.backward_ms) == pytest.approx(whole.backward_ms[0])
        assert [one for stage in parts.parameters for one in stage] == list(whole.parameters[0])
        (edge,) = parts.edges
        assert (edge.source, edge.target) == (0, 1)
        assert edge.bytes > 0
    twice = figures_of(profile, balanced_cut(profile, 1), 4)
    assert twice.forward_ms[0] == pytest.approx(2 * whole.forward_ms[0])
    assert twice.saved_bytes[0] == pytest.approx(2 * whole.saved_bytes[0])
    ready = [whole.ready[name] for name, _ in net().named_parameters()]
    assert ready == sorted(ready, reverse=True), "the last layer's gradients come first"
    assert ready[0] <= 1


def test_codecs_that_fit_a_layer_are_timed():
    parameters = profile_model(net(), images(2), measure=False).parameters
    found = measure_rates(("fp16", "onebit:decay=0.5"), parameters, 4096, World())
    assert found.keys() == {"fp16", "onebit:decay=0.5"}
    assert all(encode > 0 and decode > 0 for rate in found.values() for _, encode, decode in rate.tried)
    assert measure_rates(("fp16",), (), 2, World()) == {}


def rates_together(world: World, cache: Path) -> list[object]:
    os.environ["HYBRIDPAR_CACHE"] = str(cache)
    rates.MOST_NOISE = trials.MOST_NOISE = math.inf  # whatever else runs meanwhile
    parameters = profile_model(net(), images(2), measure=False).parameters
    codecs = ("fp16", "onebit:decay=0.5")
    return [measure_rates(codecs, parameters, world.size, world) for _ in range(2)]


def test_workers_time_codecs_at_the_same_time_and_all_know_the_mean(tmp_path):
    first, second = run_ranks(rates_together, 2, tmp_path)
    assert first == second
    assert first[0] == first[1], "it is remembered"
    assert first[0].keys() == {"fp16", "onebit:decay=0.5"}
    assert len(list(tmp_path.glob("planner/codec-*.json"))) == 2, "the first worker keeps it"


def test_hosts_of_nearly_one_speed_count_as_equal_and_the_slowest_worker_of_a_host_counts():
    assert speeds_of("ab", [100, 200]) == [1, 0.5]
    assert speeds_of("ab", [100, 120]) == [1, 1]
    assert speeds_of("aab", [90, 100, 220]) == [1, 1, pytest.approx(100 / 220)]
    assert speeds_of("abc", [100, 200, 210]) == [1, pytest.approx(100 / 210), pytest.approx(100 / 210)]
    assert speeds_of("ab", [200, 100]) == [1, 2]


def test_a_profile_has_the_rest_of_a_step_and_is_as_fast_as_the_way_that_was_chosen():
    profile = profile_model(net(), images(4), measure=False)
    units = profile.step_ms
    slower = with_rest(profile, Way({}, None, (3 * units, 4 * units), 4 * units, 4 * units))
    assert slower.step_ms == pytest.approx(units)
    assert slower.update_ms == pytest.approx(2 * units)
    captured = with_rest(profile, Way({"cuda_graph": "on"}, None, (units,), 2 * units, 2 * units))
    assert captured.step_ms + captured.update_ms == pytest.approx(units)
    compiled = with_rest(profile, Way({}, None, (units / 2,), units / 2, units / 2))
    assert (compiled.step_ms, compiled.update_ms) == (pytest.approx(units / 2), 0)
