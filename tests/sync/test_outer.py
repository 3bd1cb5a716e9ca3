"""The outer loop against the equations of its papers, on small numbers, and when fragments are exchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.compress import read_policy
from hybridpar.errors import UsageError
from hybridpar.sync.outer import OuterLoop, OuterOptimizer, OuterRound, Timetable, Transfer, divide
from tests.lanes.checked import Checker, Lanes
from tests.ranks import run_ranks

ALONE = World()
NONE = read_policy("none")
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def parameters(*values: Sequence[float], dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    return {f"p{index}": nn.Parameter(torch.tensor(one, dtype=dtype)) for index, one in enumerate(values)}


def run_loop(
    world: World,
    own: dict[str, nn.Parameter],
    inner: Callable[[dict[str, nn.Parameter]], None],
    steps: int,
    every: int,
    outer: OuterOptimizer | None,
    *,
    fragments: int = 1,
    delay: int = 0,
    checked: bool = False,
) -> list[list[float]]:
    """Train, and return all values after every step."""
    checker = Checker(world.rank, max_delay=0.001) if checked else None
    history = []
    with checker or nullcontext(), Lanes("cpu", check=checker) as lanes:
        loop = OuterLoop(own, dict, world, lanes, NONE, outer, fragments, delay > 0)
        loop.begin()
        timetable = Timetable(every)
        current = timetable.next_round(0, 1.0)
        for step in range(1, steps + 1):
            if step > current.stop:
                current = timetable.next_round(current.stop, 1.0)
            with torch.no_grad():
                inner(own)
            for one in current.transfers(fragments, delay):
                if one.sent == step:
                    loop.send(one.fragment, 1)
                if one.arrives == step:
                    assert loop.arrive().good
            history.append([float(value) for one in own.values() for value in one.detach().flatten()])
    return history


def exchange(
    world: World, own: dict[str, nn.Parameter], new: Sequence[Any], outer: OuterOptimizer | None, policy: str
) -> Any:
    """One exchange after another, in which this worker's weights have moved by -D each time."""
    found = []
    with Lanes("cpu") as lanes:
        loop = OuterLoop(own, dict, world, lanes, read_policy(policy), outer)
        loop.begin()
        for gradient in new:
            with torch.no_grad():
                own["p0"].sub_(torch.tensor(gradient).view_as(own["p0"]))
            loop.send(0, 1)
            assert loop.arrive().good
            states = [one.state_dict()["parameters"]["p0"]["residuals"]["worker"].clone() for one in loop.compressions]
            found.append((own["p0"].detach().clone().flatten(), *states))
    return found


# ----------------------------------------------------------------- outer steps


def test_nesterov_is_that_of_the_paper():
    own = parameters([1.0, -2.0])
    expected = [[0.867, -2.266], [0.6773, -2.1134], [0.56957, -2.23506]]
    with Lanes("cpu") as lanes:
        loop = OuterLoop(own, dict, ALONE, lanes, NONE, NESTEROV)
        loop.begin()
        for gradient, values in zip([[0.1, 0.2], [0.1, -0.2], [0.0, 0.1]], expected, strict=True):
            with torch.no_grad():
                own["p0"].sub_(torch.tensor(gradient, dtype=torch.float64))
            loop.send(0, 1)
            loop.arrive()
            torch.testing.assert_close(own["p0"].detach(), torch.tensor(values, dtype=torch.float64))
        momentum = loop.common_state()["momentum"]["p0"]
    torch.testing.assert_close(momentum, torch.tensor([0.171, 0.082], dtype=torch.float64))


def _quadratics(world: World, every: int, outer: OuterOptimizer | None, steps: int) -> list[float]:
    target = 3.0 * world.rank

    def inner(own: dict[str, nn.Parameter]) -> None:
        own["p0"].sub_(0.1 * (own["p0"] - target))

    history = run_loop(world, parameters([1.0]), inner, steps, every, outer, checked=True)
    return [values[0] for values in history[every - 1 :: every]]


@pytest.mark.parametrize(
    ("every", "outer", "expected"),
    [
        (2, NESTEROV, [1.12635, 1.274636355, 1.420317563]),
        (1, None, [1.05, 1.095, 1.1355]),
    ],
)
def test_two_quadratics(every, outer, expected):
    for values in run_ranks(_quadratics, 2, every, outer, 3 * every):
        assert values == pytest.approx(expected, abs=1e-9)


# ------------------------------------------------------------------- streaming

FIXTURES = {
    0: [(-11, -5), (-17, -23), (-35, -29), (-41, -47)],
    1: [(-6, -5), (-12, -15), (-21.5, -21), (-27.5, -29)],  # half of a worker's own weights stays
}


def _stream(world: World, delay: int) -> list[list[float]]:
    def inner(own: dict[str, nn.Parameter]) -> None:
        for one in own.values():
            one.sub_(2.0)

    outer = partial(torch.optim.SGD, lr=2.0)
    return run_loop(world, parameters([1.0], [1.0]), inner, 12, 6, outer, fragments=2, delay=delay, checked=True)


@pytest.mark.parametrize("delay", FIXTURES)
@pytest.mark.parametrize("workers", [1, 2])
def test_streaming_is_torchfts(delay, workers):
    ranks = [_stream(ALONE, delay)] if workers == 1 else run_ranks(_stream, 2, delay)
    for history in ranks:
        assert [tuple(values) for values in history[2::3]] == FIXTURES[delay]


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 7])
def test_fragments_hold_every_parameter_once(parts):
    sizes = [400, 100, 90, 5, 300, 10, 700]
    cuts = divide(sizes, parts)
    assert [index for cut in cuts for index in cut] == list(range(len(sizes)))
    assert len(cuts) == parts
    assert all(cuts)
    assert max(sum(sizes[index] for index in cut) for cut in cuts) <= max(sum(sizes) / parts + 700 / 2, 700)
    tied = nn.Linear(4, 4)
    net = nn.Sequential(tied, nn.Linear(4, 2), tied)
    with Lanes("cpu") as lanes:
        loop = OuterLoop(dict(net.named_parameters()), dict, ALONE, lanes, NONE, NESTEROV, 2)
    assert sorted(name for fragment in loop.fragments for name in fragment.last) == [
        "0.bias",
        "0.weight",
        "1.bias",
        "1.weight",
    ]


def test_more_fragments_than_parameters_are_refused():
    with Lanes("cpu") as lanes, pytest.raises(UsageError, match="fragments=3 of 2 parameters"):
        OuterLoop(parameters([1.0], [1.0]), dict, ALONE, lanes, NONE, NESTEROV, 3)


# -------------------------------------------------------------------- means


def _without_samples(world: World) -> Any:
    own = parameters([float(2 + 3 * world.rank), 7.0])
    with Lanes("cpu") as lanes:
        loop = OuterLoop(own, dict, world, lanes, NONE)
        loop.begin()
        loop.send(0, 0)
        return loop.arrive().good, own["p0"].detach()


def test_where_nobody_has_samples_the_exchange_does_not_count():
    for rank, (good, values) in enumerate(run_ranks(_without_samples, 2)):
        assert not good
        assert values.tolist() == [2.0 + 3 * rank, 7.0]


# -------------------------------------------------------------------- codecs


def _sparse_loco(world: World) -> Any:
    gradients = [[[0.4, -0.1, 0.2, 0.05], [0.1, 0.3, -0.2, 0.0]], [[0.1, -0.1, 0.2, 0.1], [0.0, 0.1, -0.3, 0.1]]]
    own = parameters([[0.0, 0.0], [0.0, 0.0]], dtype=torch.float32)
    mine = [both[world.rank] for both in gradients]
    return exchange(world, own, mine, None, "topk:rate=0.25,least=1,decay=0.95")


def test_top_one_of_four_with_feedback_is_sparse_locos():
    kept = [[[0, -0.1, 0.2, 0.05], [0.1, 0, -0.2, 0]], [[0.1, -0.195, 0, 0.1475], [0.095, 0.1, 0, 0.1]]]
    weights = [[-0.2, -0.15, 0, 0], [-0.2, -0.15, 0.05, 0]]
    for rank, rounds in enumerate(run_ranks(_sparse_loco, 2, shared_memory=False)):
        for number, (values, residual) in enumerate(rounds):
            torch.testing.assert_close(values, torch.tensor(weights[number]))
            # Each worker's part is weighed before it is encoded.
            torch.testing.assert_close(2 * residual, torch.tensor(kept[number][rank]))


# -------------------------------------------------------------------- memory


def _layout(world: World) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)).to(memory_format=torch.channels_last)
    net[1].weight.requires_grad_(False)
    frozen = net[1].weight.clone()
    before = [(one.data_ptr(), one.stride()) for one in net.parameters()]
    with Lanes("cpu") as lanes:
        loop = OuterLoop(dict(net.named_parameters()), dict, world, lanes, NONE, NESTEROV, 2)
        loop.begin()
        for index in (0, 1, 0):
            with torch.no_grad():
                net[0].weight.add_(world.rank)
                net[0].bias.sub_(world.rank)
            loop.send(index, 1 + world.rank)
            loop.arrive()
    assert [(one.data_ptr(), one.stride()) for one in net.parameters()] == before
    assert torch.equal(net[1].weight, frozen)
    return net[0].weight.detach()


def test_memory_formats_and_frozen_parameters_stay():
    weights: list[Tensor] = run_ranks(_layout, 2)
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("rate", "steps"), [(0.008, 4), (0.004, 19), (0.002, 76), (0.001, 306), (0.0005, 1225), (0.0001, 30625)]
)
def test_rounds_grow_as_the_quadratic_rule_says(rate, steps):
    timetable = Timetable(4, ratio=0.0175 / 0.008)
    found = timetable.next_round(10, rate / 0.008)
    assert (found.start, found.stop, found.is_last) == (10, 10 + steps, False)


@pytest.mark.parametrize("ratio", [None, 2.0])
def test_rounds_make_up_the_run_and_end_with_it(ratio):
    timetable, rounds, at = Timetable(4, total=98, ratio=ratio, warmup=10), list[OuterRound](), 0
    while at < 98:
        rounds.append(timetable.next_round(at, max(0.0, 1 - at / 98)))
        at = rounds[-1].stop
    lengths = [one.stop - one.start for one in rounds]
    assert sum(lengths) == 98
    assert [one.is_last for one in rounds] == [False] * (len(rounds) - 1) + [True]
    assert lengths[:2] == [4, 4]
    assert (max(lengths) > 4) == (ratio is not None)
    assert timetable.next_round(200, 1.0) == OuterRound(200, 204), "a run that goes on after its end"


@pytest.mark.parametrize("fragments", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [4, 7, 12])
def test_each_fragment_has_a_slot_of_its_own(fragments, length):
    delay = length // fragments - 1
    found = OuterRound(20, 20 + length).transfers(fragments, delay)
    assert [one.fragment for one in found] == list(range(fragments))
    assert found[-1].arrives == 20 + length
    assert all(one.sent == one.arrives - delay > 20 - (delay == 0) for one in found)
    assert all(one.arrives < other.sent for one, other in itertools.pairwise(found))


def test_the_last_round_ends_with_all_fragments():
    last = OuterRound(8, 16, is_last=True)
    assert last.transfers(2, 1) == [Transfer(11, 12, 0), Transfer(16, 16, 0), Transfer(16, 16, 1)]
    assert OuterRound(8, 10, is_last=True).transfers(3, 1) == [Transfer(10, 10, index) for index in range(3)]
