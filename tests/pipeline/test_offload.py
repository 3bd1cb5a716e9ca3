"""Activations that wait in the host's memory: what moves and when, and that nothing else changes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridpar.pipeline import offload
from hybridpar.pipeline.offload import Parked
from tests.lanes.checked import Checker
from tests.pipeline.oracle import Residuals, Setting, compare


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets the smallest storage move, and counts the bytes that do."""
    sizes: list[int] = []
    park = offload._Block.park

    def counted(block: Any) -> None:
        sizes.append(block.size)
        park(block)

    monkeypatch.setattr(offload, "LEAST_BYTES", 0)
    monkeypatch.setattr(offload._Block, "park", counted)
    return sizes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_nothing_changes_but_where_activations_wait(schedule: str, moved: list[int]) -> None:
    compare(Residuals, 3, Setting(6), schedule=schedule, offload=(0, 1, 2), check=Checker(0, 0.0005), together=True)
    assert moved


def test_stages_of_one_lane_move_while_the_others_compute(moved: list[int]) -> None:
    compare(
        Residuals, 3, Setting(2), kind="loop", schedule="looped_bfs", offload=(0, 1), check=Checker(), together=True
    )
    assert moved


def saved_by(run: Any, *stays: Tensor) -> tuple[Tensor, Parked]:
    parked = Parked(stays)
    with parked.hooks():
        return run(), parked


def around(parked: Parked) -> None:
    """To the host and back."""
    parked.park(())
    parked.release()
    parked.make_room(torch.device("cpu"))
    parked.fetch()


def test_views_of_a_tensor_move_once_and_parameters_do_not(moved: list[int]) -> None:
    weight = nn.Parameter(torch.randn(8, 24))
    x = torch.randn(4, 8, requires_grad=True)

    def attend() -> Tensor:
        one, two, three = (x @ weight).chunk(3, 1)
        return (one * two.mT.expand(2, 8, 4).mT[0] * three.t().t()).sum()

    loss, parked = saved_by(attend, x, weight)
    expected = torch.autograd.grad(attend(), (x, weight))
    around(parked)
    assert moved.count(4 * 24 * 4) == 1  # the product, of which three views and more were saved
    assert 8 * 24 * 4 not in moved
    assert all(map(torch.equal, torch.autograd.grad(loss, (x, weight)), expected))


def test_memory_is_free_between_and_again_as_the_backward_pass_goes_on(moved: list[int]) -> None:
    x = torch.randn(100, requires_grad=True)
    kept: list[weakref.ref[torch.UntypedStorage]] = []

    def chain() -> Tensor:
        first = x.exp()
        second = first.sin().exp()
        kept.extend(weakref.ref(one.untyped_storage()) for one in (first, second))
        return second.sum()

    loss, parked = saved_by(chain, x)
    parked.park(())
    assert all(one() is not None for one in kept)
    parked.release()
    assert all(one() is None for one in kept)
    parked.make_room(torch.device("cpu"))
    back = [
        weakref.ref(block.device.untyped_storage()) for block in parked._blocks.values() if block.device is not None
    ]
    assert len(back) == 2
    parked.fetch()
    loss.backward()
    assert all(one() is None for one in back)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().exp().sum(), x)[0])


def test_small_tensors_and_what_leaves_stay_and_a_write_is_an_error() -> None:
    x = torch.randn(300, 300, requires_grad=True)
    out, parked = saved_by(lambda: F.relu(x), x)
    parked.park([out])
    assert not parked._blocks
    _, parked = saved_by(lambda: x[:4].exp().sum(), x)
    assert not parked._blocks
    written, parked = saved_by(x.exp, x)
    written.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(300, 300\).*modified by an inplace operation"):
        parked.park(())
