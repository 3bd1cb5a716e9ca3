"""What users of other libraries for gradient compression ran into, and no other test shows, against all of our codecs.

The names in brackets are public: issues and pull requests of the projects, or files in which the fault can be read.
"""

from __future__ import annotations

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.compress import CODECS, ErrorFeedback, parse_codec
from tests.compress.hang_hunt import for_small
from tests.compress.team import Team, equal, run_together, same_bits
from tests.compress.test_ddp import batch, make, net, weights
from tests.ranks import run_ranks

SHAPES = {"matrix": (40, 33), "conv": (12, 10, 3, 3), "few": (3, 70), "bias": (7,)}


@pytest.fixture(params=list(CODECS))
def text(request: pytest.FixtureRequest) -> str:
    return for_small(str(request.param))


def test_generators_of_the_process_are_left_alone_and_make_no_difference(text: str) -> None:
    """[grace: randomk seeds the global generator at every call, and with it dropout and augmentation]."""
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


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_messages_are_of_one_size_whatever_the_gradient(text: str, value: float) -> None:
    """[grace#16: a threshold codec hangs on gloo where a worker has nothing to send] Nor does training stop there."""
    team = Team(text, SHAPES, 3)
    sizes = [exchange.traffic for exchange in team.exchanges]
    nothing = [[torch.zeros(torch.Size(shape).numel()) for shape in SHAPES.values()] for _ in range(2)]
    outs = team.step([*nothing, [torch.full_like(one, value) for one in nothing[0]]])
    assert [exchange.traffic for exchange in team.exchanges] == sizes
    assert all(bool(out.isfinite().all()) for out in outs)
    gradients, came = team.gradients(0), torch.zeros(1320)
    for _ in range(4):
        came += team.step(gradients)[0]
    assert float(came @ sum(own[0] for own in gradients)) > 0


def test_tensors_are_made_on_the_device_of_the_gradient(text: str) -> None:
    """[grace#16: the wrong GPU] Another default device must make no difference; on `meta` nothing can be computed."""
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


def amp(world: World, codec: str) -> tuple[list[bool], Tensor]:
    """Steps of a loss scaler, one of which overflows on worker 1 and leaves residuals: which counted, the weights."""
    model = net()
    ddp, state = make(codec, model)
    assert state is not None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    counted, kept = [], {}
    with state:
        for step in range(4):
            optimizer.zero_grad()
            images, labels = batch(world.rank, step)
            bad = float("inf") if step == 2 and world.rank == 1 else 1.0
            scaler.scale(F.cross_entropy(ddp(images), labels) * bad).backward()
            before, (was, kept) = weights(model), (kept, state.state_dict()["parameters"])
            assert equal(was, kept) == (step == 2)
            scaler.step(optimizer)
            scaler.update()
            counted.append(not torch.equal(before, weights(model)))
        return counted, weights(model)


def test_an_overflow_under_mixed_precision_poisons_nothing() -> None:
    """[pytorch PR 55031: PowerSGD gives NaN with AMP]."""
    (counted, one), (same, other) = run_ranks(amp, 2, "powersgd:gain=0")
    assert counted == same == [True, True, False, True]
    assert torch.equal(one, other)
    assert bool(one.isfinite().all())


def test_memory_is_in_units_of_the_gradient(text: str) -> None:
    """[a memory of g minus the code instead of g minus what it decodes to]: scaled gradients, scaled residuals."""
    if not isinstance(parse_codec(text), ErrorFeedback):
        pytest.skip("it keeps nothing")
    one, other = Team(text, SHAPES, 2), Team(text, SHAPES, 2)
    for seed in range(2):
        one.step(one.gradients(seed))
        other.step(other.gradients(seed, 1024.0))
    for name in SHAPES:
        torch.testing.assert_close(1024 * one.unsent(name), other.unsent(name), rtol=1e-4, atol=1e-2)
