"""What is found out of a model: parameters with their units, times per size and format, and nothing left changed."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.machine.cluster_file import ClusterSpec
from hybridpar.partition import profile_cache
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import find_units
from hybridpar.planner import measure_run, store
from hybridpar.planner.cuts import cuts_of, figures_of
from hybridpar.planner.measure import TURNS, measure_rates, parameters_of, profile_model
from tests.planner.small import cluster
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


def test_a_measured_profile_has_every_size_and_format_and_leaves_the_model_alone(monkeypatch):
    monkeypatch.setattr(profile_cache, "MOST_NOISE", math.inf)  # whatever else runs meanwhile
    monkeypatch.setattr(store, "MOST_NOISE", math.inf)
    model = net()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    told: list[str] = []
    profile = profile_model(
        model,
        images(4, 2),
        passes=2,
        formats=("contiguous", "channels_last"),
        lanes=(2,),
        announce=told.append,
    )
    assert [(one.memory_format, [size.samples for size in one.sizes]) for one in profile.variants] == [
        ("contiguous", [2, 4]),
        ("channels_last", [2, 4]),
    ]
    assert profile.batch_norm
    assert profile.source == "measured"
    assert profile.samples == 2
    assert profile.co_run[2] >= 1
    assert len(told) == 6
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(one.is_contiguous() for one in model.parameters())


def test_figures_of_stages_are_those_of_their_units():
    profile = profile_model(net(), images(2), measure=False)
    whole = figures_of(profile, cuts_of(profile, 1)[0], 0, 2)
    for cut in cuts_of(profile, 2):
        parts = figures_of(profile, cut, 0, 2)
        assert sum(parts.forward_ms) == pytest.approx(whole.forward_ms[0])
        assert sum(parts.backward_ms) == pytest.approx(whole.backward_ms[0])
        assert [one for stage in parts.parameters for one in stage] == list(whole.parameters[0])
        (edge,) = parts.edges
        assert (edge.source, edge.target) == (0, 1)
        assert edge.bytes > 0
    twice = figures_of(profile, cuts_of(profile, 1)[0], 0, 4)
    assert twice.forward_ms[0] == pytest.approx(2 * whole.forward_ms[0])
    assert twice.saved_bytes[0] == pytest.approx(2 * whole.saved_bytes[0])
    ready = [whole.ready[name] for name, _ in net().named_parameters()]
    assert ready == sorted(ready, reverse=True), "the last layer's gradients come first"
    assert ready[0] <= 1


def test_codecs_that_fit_a_layer_are_timed():
    parameters = profile_model(net(), images(2), measure=False).parameters
    rates = measure_rates(("fp16", "onebit:decay=0.5"), parameters, 4096, torch.device("cpu"))
    assert rates.keys() == {"fp16", "onebit:decay=0.5"}
    assert all(write > 0 and read > 0 for tried in rates.values() for write, read in tried.values())
    assert measure_rates(("fp16",), (), 2, torch.device("cpu")) == {}


def rates_together(world: World, cache: Path | None) -> list[object]:
    store.MOST_NOISE = math.inf  # whatever else runs meanwhile
    parameters = profile_model(net(), images(2), measure=False).parameters
    codecs = ("fp16", "onebit:decay=0.5")
    return [measure_rates(codecs, parameters, world.size, world.device, world=world, cache=cache) for _ in range(2)]


def test_workers_time_codecs_at_the_same_time_and_all_know_the_mean(tmp_path):
    first, second = run_ranks(rates_together, 2, tmp_path)
    assert first == second
    assert first[0] == first[1], "it is remembered"
    assert first[0].keys() == {"fp16", "onebit:decay=0.5"}
    assert len(list(tmp_path.glob("codec-*.json"))) == 2, "the first worker keeps it"


def test_ways_to_compute_are_compared_in_turns_and_units_add_up_to_that(monkeypatch):
    turns: list[bool] = []

    def step(model, inputs, clock):
        last = inputs[0].is_contiguous(memory_format=torch.channels_last) and not inputs[0].is_contiguous()
        assert last == (not next(model.parameters()).is_contiguous()), "the model is in the format of what it is given"
        turns.append(last)
        return 30.0 if last else 20.0

    monkeypatch.setattr("hybridpar.planner.measure.whole_step_ms", step)
    profile = profile_model(net(), images(2, 4), formats=("contiguous", "channels_last"), passes=2)
    for one, whole in zip(profile.variants, (20.0, 30.0), strict=True):
        assert sum(one.sizes[-1].forward_ms) + sum(one.sizes[-1].backward_ms) == pytest.approx(whole)
        assert sum(one.sizes[0].forward_ms) > 0
    assert turns == [False, False, True, True] * TURNS, "one that counts after one that does not, and then the other's"
    turns.clear()
    profile_model(net(), images(2), passes=2)
    assert not turns, "one way alone has nothing to be compared with"


def test_what_disturbs_most_steps_of_one_way_makes_it_no_worse_than_the_others(monkeypatch):
    counting = {False: [20.0, 31.0, 24.0], True: [30.0, 30.3, 30.6]}
    calls = {False: 0, True: 0}

    def step(model, inputs, clock):
        last = not inputs[0].is_contiguous()
        calls[last] += 1
        return counting[last][calls[last] // 2 - 1] if calls[last] % 2 == 0 else 99.0

    monkeypatch.setattr("hybridpar.planner.measure.whole_step_ms", step)
    profile = profile_model(net(), images(4), formats=("contiguous", "channels_last"), passes=2)
    plain, last = (sum(one.sizes[0].forward_ms) + sum(one.sizes[0].backward_ms) for one in profile.variants)
    assert last / plain == pytest.approx(1.5), "the least of each"
    assert plain == pytest.approx(20 * 1.015), "and all as much longer as the middle step was"


def test_every_memory_format_has_an_update_of_its_own():
    profile = profile_model(net(), images(2), formats=("contiguous", "channels_last"), passes=2, optimizer_copies=1)
    plain, last = profile.variants
    assert plain.update_ms == profile.update_ms
    assert last.update_ms is not None
    assert last.update_ms > 0


def test_a_job_on_hosts_of_two_speeds_is_planned_with_them_and_one_host_is_not_measured(monkeypatch):
    told: list[tuple[float, ...]] = []

    def speeds(*_: object) -> list[float]:
        return list(told[-1])

    monkeypatch.setattr(measure_run, "measure_speeds", speeds)
    monkeypatch.setattr(measure_run, "_key", lambda *_: {})
    monkeypatch.setattr(measure_run, "_example", lambda *_: None)

    def planned_for(places: str, *measured: float) -> ClusterSpec:
        told.append(measured)
        world = SimpleNamespace(gather=lambda _: list(places), device=torch.device("cpu"), is_main=True)
        world.from_main = lambda act: act()
        scope = SimpleNamespace(sizes=[2])
        return measure_run._at_speeds(spec, nn.Identity(), SimpleNamespace(amp="none"), scope, world, False)  # type: ignore[arg-type]

    spec = cluster(2)
    assert [host.throughput for _, host in planned_for("ab", 1, 0.5).by_worker] == [1, 0.5]
    assert [host.throughput for _, host in planned_for("ab", 1, 2).by_worker] == [1, 2]
    assert planned_for("ab", 1, 1) == spec
    assert planned_for("aa", 1, 0.5) is spec
    assert planned_for("aab", 1, 1, 0.5) is spec, "workers that share cores"
