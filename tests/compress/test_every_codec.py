"""Tests what must hold for every registered codec; a new codec is tested here without being named.

Each is tested as it comes, and as `VARIANTS` in its own test, `tests/compress/codecs/test_NAME.py`, says.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import random

import numpy
import pytest
import torch
from torch import Tensor

from hybridpar.compress import CODECS, Codec, TensorSpec, format_codec, parse_codec
from hybridpar.spec import fields_of
from tests.compress import codecs
from tests.compress.team import Team, equal, run_together, same_bits

#: With other options than their own, from `VARIANTS` in the tests of the codecs.
VARIANTS = [
    text
    for module in pkgutil.iter_modules(codecs.__path__, f"{codecs.__name__}.")
    for text in getattr(importlib.import_module(module.name), "VARIANTS", ())
]
TEXTS = [*CODECS, *VARIANTS]

SHAPES = {
    "bias": (7,),
    "matrix": (40, 33),
    "filters": (6, 5, 3, 3),
    "wide": (3, 70),
    "conv": (50, 16, 3, 3),
    "one": (1, 1),
    "scalar": (),
    "empty": (0, 5),
}


@pytest.fixture(params=TEXTS)
def text(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def keeps_everything(text: str) -> bool:
    codec = parse_codec(text)
    if text.startswith("onebit_sgd") and "momentum=0,adagrad=off" not in text:
        return False  # what arrives is no gradient
    if "hylo" in text and "cast" in text:  # the sum of the filters is rounded on the way
        return False
    return codec.feedback and codec.decay == 1


def test_text_and_codec_are_one(text: str) -> None:
    codec = parse_codec(text)
    assert parse_codec(format_codec(codec)) == codec
    assert hash(codec) == hash(parse_codec(text))


@pytest.mark.parametrize("name", list(CODECS))
def test_every_option_is_tried(name: str) -> None:
    variants = [text for text in VARIANTS if text.partition(":")[0] == name]
    tried = {option.partition("=")[0] for text in variants for option in text.partition(":")[2].split(",")}
    left = fields_of(CODECS.get(name)).keys() - fields_of(Codec).keys() - tried
    assert not left, f"add {name}:{min(left)}=... to VARIANTS in the codec's test"


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_agree_and_nothing_is_lost(text: str, workers: int) -> None:
    team = Team(text, SHAPES, workers)
    gone = {name: torch.zeros(math.prod(shape), dtype=torch.float64) for name, shape in SHAPES.items()}
    came = {name: torch.zeros_like(total) for name, total in gone.items()}
    for seed in range(4):
        gradients = team.gradients(seed)
        before = [[gradient.clone() for gradient in own] for own in gradients]
        outs = team.step(gradients)  # compares the workers bit for bit
        for own, kept in zip(gradients, before, strict=True):
            assert all(map(same_bits, own, kept)), "a gradient was changed"
            for name, gradient in zip(SHAPES, own, strict=True):
                gone[name] += gradient
        for name, out in zip(SHAPES, outs, strict=True):
            assert out.isfinite().all()
            came[name] += workers * out.double()
    for name, shape in SHAPES.items():
        if keeps_everything(text) or not parse_codec(text).fits(shape):
            torch.testing.assert_close(came[name] + team.unsent(name), gone[name], rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_bytes_are_as_declared(text: str, workers: int) -> None:
    team = Team(text, SHAPES, workers)
    for seed in range(2):
        declared = [exchange.traffic for exchange in team.exchanges]
        rounds = [[coder.working.rounds for coder in exchange.coders] for exchange in team.exchanges]
        groups = run_together(team.exchanges, team.gradients(seed, 10.0**seed), team.gradients(seed))
        team.commit()
        assert [group.payload for group in groups] == [traffic.payload for traffic in declared]
        assert rounds.count(rounds[0]) == workers, "rounds differ between workers"
        assert (declared[0].wire == 0) == (workers == 1)


def test_constant_gradients(text: str) -> None:
    codec = parse_codec(text)
    for value in (0.0, -0.0, 1.0, -3.5, 1e-40, 1e30, -1e30):
        team = Team(text, SHAPES, 2)
        outs = team.step([[torch.full((math.prod(shape),), value) for shape in SHAPES.values()] for _ in range(2)])
        for name, out in zip(SHAPES, outs, strict=True):
            assert not out.isnan().any(), (name, value)
            if value == 0:
                assert not out.any(), name
                assert not team.unsent(name).any(), name
            if abs(value) in (1.0, 3.5) and not codec.fits(SHAPES[name]):
                torch.testing.assert_close(out, torch.full_like(out, value))


def test_a_bad_number_is_seen_by_all_and_can_be_taken_back(text: str) -> None:
    bad = {"matrix": torch.inf, "conv": torch.nan, "wide": -torch.inf}
    team, untroubled = Team(text, SHAPES, 4), Team(text, SHAPES, 4)
    for seed in range(2):
        for each in (team, untroubled):
            each.step(each.gradients(seed))
    before = team.snapshot()
    gradients = team.gradients(17)
    for rank, (name, value) in enumerate(bad.items()):
        gradients[rank + 1][list(SHAPES).index(name)][-1] = value
    outs = team.meet(gradients)
    for own in outs:
        for name, out in zip(SHAPES, own, strict=True):
            assert bool(out.isfinite().all()) == (name not in bad), f"a bad number was laundered, or spread: {name}"
    assert equal(team.snapshot(), before)
    for left, right in zip(team.step(team.gradients(2)), untroubled.step(untroubled.gradients(2)), strict=True):
        assert same_bits(left, right), "a step that was taken back changed what was kept, or what is drawn"
    assert equal(team.snapshot(), untroubled.snapshot())


def test_state_is_saved_and_restored(text: str) -> None:
    team, resumed = Team(text, SHAPES, 2), Team(text, SHAPES, 2)
    for seed in range(3):
        team.step(team.gradients(seed))
    saved = team.snapshot()
    resumed.restore(team.state())
    steps = [team.step(team.gradients(seed)) for seed in range(3, 5)]
    assert equal(resumed.snapshot(), saved), "a later step wrote into a state that was handed out"
    for seed, outs in enumerate(steps, 3):
        for left, right in zip(outs, resumed.step(team.gradients(seed)), strict=True):
            assert same_bits(left, right), "the state has not all that was kept, or what is drawn next"


def test_a_parameter_that_nobody_used_keeps_its_state(text: str) -> None:
    team = Team(text, {"used": SHAPES["conv"], "unused": SHAPES["conv"]}, 2)
    team.step(team.gradients(0))
    before = team.snapshot()
    team.meet(team.gradients(1))
    for exchange in team.exchanges:
        exchange.commit(unused={"unused"})
    (lasts,) = {coder.lasts for coder in team.coders("used")}
    for left, right in zip(before, team.snapshot(), strict=True):
        assert equal(left["unused"], right["unused"])
        assert equal(left["used"], right["used"]) is not lasts


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_gradients_of_any_stride_and_results_in_place(text: str, default: torch.dtype) -> None:
    plain = Team(text, SHAPES, 2)
    gradients = plain.gradients(5)
    outs = plain.meet(gradients)
    spread: list[list[Tensor]] = []
    for own in gradients:
        spread.append([torch.stack((gradient, gradient), 1).view(-1)[::2] for gradient in own])
    torch.set_default_dtype(default)
    try:
        run_together(Team(text, SHAPES, 2).exchanges, spread, spread)
    finally:
        torch.set_default_dtype(torch.float32)
    for left, right in zip(outs, spread, strict=True):
        assert all(map(same_bits, left, right))


def test_the_sum_is_the_mean_times_the_workers(text: str) -> None:
    mean, total = Team(text, SHAPES, 4), Team(text, SHAPES, 4, average=False)
    gradients = mean.gradients(3)
    for left, right in zip(mean.step(gradients), total.step(gradients), strict=True):
        torch.testing.assert_close(4 * left, right)


def test_parameters_that_do_not_fit_travel_as_without_a_codec(text: str) -> None:
    codec, full = parse_codec(text), parse_codec("none")
    for name, shape in SHAPES.items():
        spec = TensorSpec(name, shape)
        if not codec.fits(shape):
            assert codec.bind(spec).rounds == full.bind(spec).rounds


@pytest.mark.parametrize("name", list(CODECS))
def test_a_codec_describes_itself(name: str) -> None:
    assert CODECS.get(name).name == name
    assert CODECS.describe()[name]


def test_what_says_that_it_is_unbiased_is(text: str) -> None:
    """The squared error of a mean of n draws is 1 / n of their variance, and more where there is a bias.

    What a cast to bfloat16 rounds to nearest counts as none.
    """
    codec, shape = parse_codec(text), SHAPES["matrix"]
    if codec.feedback or codec.biased or not codec.fits(shape):
        return
    team, times = Team(text, {"matrix": shape}, 2), 100
    gradients = team.gradients(0)
    true = torch.stack([own[0] for own in gradients]).double().mean(0)
    found = torch.stack([team.step(gradients)[0].double() for _ in range(times)])
    error, drawn, cast = (found.mean(0) - true).square().sum(), found.var(0).sum() / times, 1e-5 * true.square().sum()
    assert error < 1.3 * drawn + cast, "biased = False in the codec's class, and the result is biased"


def test_generators_of_the_process_are_left_alone_and_make_no_difference(text: str) -> None:
    results = []
    for seed in (1, 2):
        team = Team(text, SHAPES, 2, seed=5)
        gradients = [team.gradients(step) for step in range(2)]
        torch.manual_seed(seed)
        states = (torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=True)[1].copy())
        results.append([team.step(own) for own in gradients])
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert numpy.array_equal(numpy.random.get_state(legacy=True)[1], states[2])
    for one, other in zip(*results, strict=True):
        assert all(map(same_bits, one, other))


def test_tensors_are_made_on_the_device_of_the_gradient(text: str) -> None:
    """Another default device makes no difference; on `meta` nothing can be computed."""
    other = Team(text, SHAPES, 2)
    gradients = other.gradients(0)
    outs = [[torch.empty_like(one) for one in own] for own in gradients]
    torch.set_default_device("meta")
    try:
        team = Team(text, SHAPES, 2)
        run_together(team.exchanges, gradients, outs)
    finally:
        torch.set_default_device(None)
    assert all(map(same_bits, outs[0], other.step(gradients)))
