"""What the workers agree on in a step, number by number."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.errors import SyncError
from hybridpar.lanes import Lanes
from hybridpar.lanes.base import Constants
from hybridpar.pipeline.local_stage import (
    HEAD,
    LAYOUT,
    SAVE,
    Agreement,
    check_layout,
    decide,
    forward_report,
)
from hybridpar.pipeline.step import StepOutcome, StepValues
from hybridpar.sync.figures import SyncFigures
from tests.ranks import run_ranks
from tests.threads import on_threads


def report(loss=1.0, samples=4, stop=False, save=False, layout=7, batch_norm=None):
    known = Constants(torch.device("cpu"))
    losses = torch.tensor(loss, dtype=torch.float64)
    head = forward_report(losses, samples, (stop, save), constants=known)
    return torch.cat([*head, known.of(layout, layout * layout), *([] if batch_norm is None else [batch_norm])])


class Known(StepOutcome):
    """An outcome whose values are there."""

    sync = SyncFigures()

    def __init__(self, values):
        self._values = StepValues(*values.tolist())

    @property
    def values(self):
        return self._values


def outcome(reports, squares=4.0, *, guard=True, measured=True):
    head = sum(reports)[: SAVE + 1]
    return Known(decide([head], torch.tensor([squares], dtype=torch.float64), guard=guard, measured=measured))


def test_summed_reports_are_the_step_of_all_workers():
    agreed = outcome([report(0.75, 6), report(0.25, 2)])
    assert agreed.loss == 1.0
    assert agreed.samples == 8
    assert agreed.committed
    assert agreed.grad_norm == 2.0
    assert not agreed.stop
    assert not agreed.save


@pytest.mark.parametrize("wish", ["stop", "save"])
def test_the_wish_of_one_worker_counts_for_all(wish):
    agreed = outcome([report(), report(**{wish: True}), report()])
    assert getattr(agreed, wish)
    assert not getattr(agreed, {"stop": "save", "save": "stop"}[wish])


@pytest.mark.parametrize("squares", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_rolls_back_under_the_guard_only(squares):
    guarded = outcome([report()], squares)
    assert not guarded.committed
    assert guarded.values.commit == 0.0
    assert guarded.grad_norm == math.inf
    assert outcome([report()], squares, guard=False).committed


def test_batchnorm_sums_follow_the_head():
    sums = torch.arange(5, dtype=torch.float64)
    message = report(batch_norm=sums)
    assert torch.equal(message[HEAD:], sums)
    assert message.dtype == torch.float64
    assert len(report()) == HEAD


@pytest.mark.parametrize("layouts", [(1, 2), (65535, 65534), (5, 5, 6), (0, 65535), (1, 2, 3)])
def test_different_layouts_are_refused(layouts):
    with pytest.raises(SyncError, match="do not train the same parameters"):
        check_layout(sum(report(layout=layout) for layout in layouts)[LAYOUT:HEAD], len(layouts))


def agree(world, lanes, whole=True):
    return Agreement({0: SimpleNamespace(replicas=world, guarded=True, measured=True)}, world, lanes, is_whole=whole)


def test_one_worker_alone_counts_its_own_samples():
    with Lanes("cpu") as lanes:
        agreement = agree(World(), lanes)
        assert agreement.lane is lanes.caller
        assert agreement.count_samples(3)() == 3


def count_in_order(group):
    named = {"named_errors": lambda doing: nullcontext()}
    world = SimpleNamespace(rank=group.rank, size=group.size, control_group=group, **named)
    with Lanes("cpu") as lanes:
        agreement = agree(world, lanes)
        pending = [agreement.count_samples(10**power * (group.rank + 1)) for power in range(4)]
        return [count() for count in reversed(pending)]


def test_messages_are_summed_in_the_order_they_were_sent():
    assert on_threads(3, count_in_order) == [[6000, 600, 60, 6]] * 3


def lose_a_peer(world):
    with Lanes("cpu") as lanes:
        agreement = agree(world, lanes)
        if world.rank == 1:
            return "left"
        try:
            agreement.count_samples(1)()
        except SyncError as error:
            return str(error)
    return "no error"


def test_who_waited_for_what_is_in_the_error():
    first, second = run_ranks(lose_a_peer, 2, timeout=15)
    assert second == "left"
    assert "worker 0 of 2 stopped while exchanging sample counts" in first
