"""The hook in the ways in which people use DDP: unused parameters, static graphs, accumulation, and odd input."""

from __future__ import annotations

import copy
import io
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybridpar.comm.world import World
from hybridpar.compress.ddp import CodecState, ddp_hook
from hybridpar.errors import CheckpointError, SyncError, UsageError
from tests.compress.team import equal
from tests.compress.test_ddp import batch, make, net, train, weights
from tests.ranks import run_ranks


class Branches(nn.Module):
    """One branch that only some workers take, and one that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(192, 64)
        self.some = nn.Linear(64, 64)
        self.none = nn.Linear(64, 64)
        self.last = nn.Linear(64, 5)

    def forward(self, images: Tensor, branch: bool) -> Tensor:
        x = torch.relu(self.first(images.flatten(1)))
        return self.last(torch.relu(self.some(x)) if branch else x)  # type: ignore[no-any-return]


def branches(world: World, codec: str | None) -> tuple[Tensor, bool, list[int]]:
    model = Branches()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, find_unused_parameters=True)
    state: Any = None
    seen: list[int] = []
    if codec is not None:
        state, hook = ddp_hook(codec, model)
        ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with state or nullcontext():
        for step in range(3):
            optimizer.zero_grad()
            images, labels = batch(world.rank, step)
            F.cross_entropy(ddp(images, world.rank == 0), labels).backward()
            optimizer.step()
            seen.append(state.traffic.payload if state is not None else 0)
    return weights(model), model.none.weight.grad is None, seen


def test_unused_parameters_stay_unused() -> None:
    plain, ours = run_ranks(branches, 2, None), run_ranks(branches, 2, "none")
    for (one, untouched, _), (other, also, _) in zip(plain, ours, strict=True):
        assert untouched
        assert also
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    (left, _, sent), (right, untouched, _) = run_ranks(branches, 2, "onebit")
    assert torch.equal(left, right)
    assert untouched
    assert len(set(sent)) == 1  # what travels does not depend on who used what


def static(world: World, codec: str | None) -> Tensor:
    model = net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, static_graph=True)
    state: Any = None
    if codec is not None:
        state, hook = ddp_hook(codec, model)
        ddp.register_comm_hook(state, hook)
    with state or nullcontext():
        train(ddp, world.rank, range(4))  # DDP itself cannot accumulate in the first step of a static graph
    return weights(model)


def test_a_static_graph() -> None:
    for one, other in zip(run_ranks(static, 2, None), run_ranks(static, 2, "none"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    one, other = run_ranks(static, 2, "onebit")
    assert torch.equal(one, other)


def closed(world: World) -> tuple[str, int, bool]:
    before = threading.active_count()
    model = net()
    ddp, state = make("onebit", model)
    assert state is not None
    train(ddp, world.rank, range(2))
    state.close()
    state.close()
    with pytest.raises(Exception, match="closed") as caught:
        train(ddp, world.rank, range(1))
    left = threading.active_count() - before
    saved = state.state_dict()  # what it kept can still be saved
    dist.barrier()
    return str(caught.value), left, bool(saved["parameters"])


def test_the_end_of_a_hook() -> None:
    for text, threads, saved in run_ranks(closed, 2):
        assert "after the last backward pass" in text
        assert threads <= 0
        assert saved


def parties(world: World) -> Tensor:
    """Two jobs of two workers in one: each hook knows its own group alone."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group: Any = groups[world.rank // 2]
    model = net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, process_group=group)
    state, hook = ddp_hook("onebit", model, group=group)
    ddp.register_comm_hook(state, hook)
    with state:
        train(ddp, world.rank, range(3))
        assert len(state.gather_state_dicts()) == (2 if world.rank % 2 == 0 else 0)
    return weights(model)


def test_groups_that_are_a_part_of_the_job() -> None:
    a, b, c, d = run_ranks(parties, 4)
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    assert not torch.equal(a, c)


# --------------------------------------------------------------------------------------------------------- odd input


class Odd(nn.Module):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.odd = parameter
        self.last = nn.Linear(192, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(images.flatten(1)) + self.odd.sum().real  # type: ignore[no-any-return]


def odd(world: World, parameter: Tensor) -> Tensor | str:
    model = Odd(nn.Parameter(parameter))
    ddp, state = make("onebit", model)
    assert state is not None
    with state:
        try:
            train(ddp, world.rank, range(3))
        except Exception as error:
            return str(error)
    return model.last.weight.detach()


def test_a_parameter_of_no_elements() -> None:
    one, other = run_ranks(odd, 2, torch.zeros(0, 5))
    assert isinstance(one, Tensor), one
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_gradients_of_another_type_are_refused(dtype: torch.dtype) -> None:
    for text in run_ranks(odd, 2, torch.zeros(3, dtype=dtype)):
        assert f"gradients of type {dtype}" in text


def sparse(world: World) -> str:
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 2))
    ddp, state = make("onebit", model)
    assert state is not None
    with state:
        try:
            ddp(torch.tensor([[1, 2], [3, 4]])).sum().backward()
        except Exception as error:
            return str(error)
    return "nothing"


def test_sparse_gradients_are_refused() -> None:
    for text in run_ranks(sparse, 2):
        assert "gradients of type sparse" in text
        assert "sparse=False" in text


def reshaped(world: World) -> tuple[str, str]:
    model = net()
    ddp, state = make("onebit", model)
    assert state is not None
    with state:
        train(ddp, world.rank, range(2))
        saved = state.state_dict()
        model[5] = nn.Linear(40, 7)  # five classes became seven
        again = DistributedDataParallel(model, bucket_cap_mb=0.02)
        again.register_comm_hook(state, CodecState.exchange)
        with pytest.raises(Exception, match="lacks") as changed:
            train(again, world.rank, range(1))
        model = copy.deepcopy(model)
        fresh: CodecState = ddp_hook("onebit", model)[0]
        fresh.load_state_dict(saved)
        last = DistributedDataParallel(model, bucket_cap_mb=0.02)
        last.register_comm_hook(fresh, CodecState.exchange)
        with fresh, pytest.raises((CheckpointError, RuntimeError), match="the residuals of") as loaded:
            train(last, world.rank, range(1))
        return str(changed.value), str(loaded.value)


def test_a_layer_that_changed_its_shape() -> None:
    for changed, loaded in run_ranks(reshaped, 2):
        assert "a parameter of shape (7" in changed
        assert "280" in loaded


def unlike(world: World, what: str) -> str:
    with pytest.raises(UsageError) as caught:
        ddp_hook("qsgd_mn", net(), **{what: world.rank})
    return str(caught.value)


@pytest.mark.parametrize("what", ["hierarchical", "seed"])
def test_workers_that_are_not_told_the_same(what: str) -> None:
    one, other = run_ranks(unlike, 2, what)
    assert one == other
    assert "do not agree" in one


def histories(world: World, codec: str) -> tuple[Tensor, Tensor]:
    """Gradients with and without a history, the first after the DDP was copied and saved."""
    found = []
    for create_graph in (True, False):
        torch.manual_seed(0)
        ddp, state = make(codec, nn.Sequential(nn.Flatten(), nn.Linear(192, 5, bias=False)))  # DDP takes few models
        assert state is not None
        torch.save(copy.deepcopy(ddp) if create_graph else ddp, io.BytesIO())
        images, labels = batch(world.rank, 0)
        with state:
            F.cross_entropy(ddp(images), labels).backward(create_graph=create_graph)
        found.append(torch.cat([one.grad.detach().flatten() for one in ddp.parameters() if one.grad is not None]))
    return found[0], found[1]


@pytest.mark.parametrize("codec", ["none", "onebit:warmup=0,least=1", "topk:least=1"])
def test_copies_and_graphs_of_gradients(codec: str) -> None:
    for one, other in run_ranks(histories, 2, codec):
        assert torch.equal(one, other)


def lost(world: World) -> tuple[str, float]:
    """What a worker says whose peer has left, and how long it would wait for it."""
    ddp, state = make("onebit", net())
    assert state is not None
    path: Any = state._across
    if world.rank == 1:
        state.close()
        dist.barrier()
        return "", path._timeout
    with pytest.raises(SyncError) as caught:
        train(ddp, world.rank, range(1))
    dist.barrier()
    state.close()
    return str(caught.value), path._timeout


def test_a_peer_that_leaves_is_named_and_time_outs_are_those_of_the_group() -> None:
    (text, waited), (_, also) = run_ranks(lost, 2, timeout=60)
    assert "worker 1 of the group has left" in text
    assert waited == also == 40


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
    (counted, one), (same, other) = run_ranks(amp, 2, "powersgd:gain=0")
    assert counted == same == [True, True, False, True]
    assert torch.equal(one, other)
    assert bool(one.isfinite().all())
