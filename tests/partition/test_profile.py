from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.partition.dry_run import measured_saved_bytes
from hybridpar.partition import profile_cache
from hybridpar.partition.planning import saved_bytes
from hybridpar.partition.profile import (
    Clock,
    Roofline,
    UnitTimes,
    _summarise,
    estimate_units,
    measure_units,
    step_times,
)
from hybridpar.partition.profile_cache import measured_profile, profile_key
from hybridpar.partition.split import split_model
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import ModelUnits, find_units
from tests.partition.nets import CASES


def units_of(name: str) -> tuple[ModelUnits, torch.Tensor]:
    make, shape = CASES[name]
    example = torch.randn(*shape)
    return find_units(trace_model(make(), [example]), [example]), example


@pytest.mark.parametrize("name", CASES)
def test_the_timed_step_is_the_models_own_step(name: str) -> None:
    units, example = units_of(name)
    model = units.model.train()
    torch.manual_seed(1)
    from hybridpar.partition.nest import tensor_leaves

    before = {key: value.clone() for key, value in model.named_buffers()}
    leaves = [leaf for _, leaf in tensor_leaves(model(example)) if leaf.requires_grad]
    torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
    wanted = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    for key, value in model.named_buffers():
        value.copy_(before[key])
    model.zero_grad()
    torch.manual_seed(1)
    stages = split_model(units, range(len(units.graph)), in_place=True)
    times = step_times(stages, dict(zip(stages[0].model_inputs, [example], strict=True)), Clock(example.device))
    assert len(times) == len(units.graph)
    assert all(ahead >= 0 and back >= 0 for ahead, back in times)
    found = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    assert sorted(found) == sorted(wanted)
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-6)


def test_measuring_leaves_the_model_as_it_was() -> None:
    units, example = units_of("residual")
    model = units.model.eval()
    gradient = torch.full_like(model.head.weight, 7.0)
    model.head.weight.grad = gradient
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    threads = torch.get_num_threads()
    seen = []
    times = measure_units(
        units, [example], passes=2, threads=1, progress=lambda done, total: seen.append((done, total))
    )
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == threads
    assert model.head.weight.grad is gradient
    assert model.conv1.weight.grad is None
    assert not model.training
    assert seen == [(1, 2), (2, 2)]
    assert times.source == "measured"
    assert sum(times.forward_ms) + sum(times.backward_ms) == pytest.approx(times.step_ms)


def test_minimum_counts_and_halves_tell_the_noise() -> None:
    rows = torch.tensor([[[1.0, 2.0]], [[1.5, 2.5]], [[9.0, 9.0]], [[1.5, 2.0]]], dtype=torch.float64)
    times = _summarise(rows, step_ms=6.0)
    assert (times.forward_ms, times.backward_ms) == ((2.0,), (4.0,))
    assert times.noise == pytest.approx(0.5 / 3)


def test_the_median_whole_step_sets_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    units, example = units_of("residual")
    steps = iter([99.0, 7.0, 5.0, 6.0, 8.0])  # the first one warms up
    monkeypatch.setattr("hybridpar.partition.profile.whole_step_ms", lambda *_: next(steps))
    assert measure_units(units, [example], passes=2).step_ms == 6.5


@pytest.mark.parametrize("name", CASES)
def test_predicted_saved_bytes_are_what_stages_save(name: str) -> None:
    units, example = units_of(name)
    count = min(3, len(units.graph))
    stage_of = [min(index * count // len(units.graph), count - 1) for index in range(len(units.graph))]
    measured = measured_saved_bytes(split_model(units, stage_of), example)
    predicted = saved_bytes(units.graph, stage_of)
    # A copy at a border, or the relu of one, may save a few values more or fewer.
    assert sum(predicted) == pytest.approx(sum(measured), rel=0.1, abs=64)


def test_roofline_takes_the_slower_of_arithmetic_and_memory() -> None:
    units, _ = units_of("residual")
    graph = units.graph
    names = [unit.name for unit in graph.units]
    compute = estimate_units(graph, Roofline(1e6, 1e15, 0.0))
    memory = estimate_units(graph, Roofline(1e15, 1e6, 0.0))
    conv1, conv2 = names.index("conv1"), names.index("conv2")
    assert compute.forward_ms[conv2] == pytest.approx(graph.units[conv2].flops / 1e6 * 1e3)
    assert compute.backward_ms[conv2] == pytest.approx(2 * compute.forward_ms[conv2])
    assert compute.backward_ms[conv1] == pytest.approx(compute.forward_ms[conv1]), "images need no gradient"
    assert memory.forward_ms[names.index("relu")] > 0
    assert estimate_units(graph, Roofline(1e15, 1e15, 0.25)).forward_ms == pytest.approx((0.25,) * len(graph))


def test_profiles_are_kept_by_everything_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    units, example = units_of("residual")
    others = [example, example.double(), torch.randn(3, 3, 8, 8), example.contiguous(memory_format=torch.channels_last)]
    keys = [profile_key(units, [other], 1, 5) for other in others]
    keys += [profile_key(units, [example], 2, 5), profile_key(units, [example], 1, 6)]
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "9.9")
        keys.append(profile_key(units, [example], 1, 5))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")  # another allocator, other times
    keys.append(profile_key(units, [example], 1, 5))
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)


class Machine:
    """Measures profiles of given noise, all units alike, and is as busy as that says."""

    def __init__(self, patch: pytest.MonkeyPatch, *noises: float) -> None:
        self.noises, self.measured = iter(noises), 0
        patch.setattr(profile_cache, "measure_units", self)

    def __call__(self, units: ModelUnits, *_: object, **__: object) -> UnitTimes:
        self.measured += 1
        noise = next(self.noises)
        each = (1.0 + noise,) * len(units.graph)
        return UnitTimes(each, each, 1.0, noise=noise)


def test_a_noisy_profile_is_used_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    units, example = units_of("residual")
    options = {"passes": 5, "threads": 1, "cache": tmp_path}
    Machine(monkeypatch, 0.53, 0.53, 0.05)
    assert measured_profile(units, [example], **{**options, "cache": None}).noise == 0.53
    assert not caplog.text, "the planner measures on every worker"
    assert measured_profile(units, [example], **options).noise == 0.53
    assert "differ by 53 %, as other programs run too: they are used now, and measured again" in caplog.text
    assert not list(tmp_path.iterdir())
    assert measured_profile(units, [example], **options).noise == 0.05, "the next command measures again"


@pytest.mark.parametrize("damage", ["", "of other units", "nan"])
def test_a_damaged_profile_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    units, example = units_of("residual")
    machine = Machine(monkeypatch, 0.01, 0.02)
    options = {"passes": 5, "threads": 1, "cache": tmp_path}
    measured_profile(units, [example], **options)
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    times = data["data"]["forward_ms"]
    data["data"]["forward_ms"] = times[1:] if damage == "of other units" else [math.nan, *times[1:]]
    path.write_text(json.dumps(data) if damage else "")
    assert measured_profile(units, [example], **options).noise == 0.02
    assert machine.measured == 2
