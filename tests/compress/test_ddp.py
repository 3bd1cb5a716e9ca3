"""The hook under vanilla DistributedDataParallel: the same mathematics, whatever DDP does with its buckets."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybridpar.comm import connections
from hybridpar.comm.world import World
from hybridpar.compress.ddp import CodecState, ddp_hook
from hybridpar.errors import CheckpointError
from tests.ranks import run_ranks


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 40), nn.ReLU(), nn.Linear(40, 5)
    )


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def make(codec: str | None, model: nn.Module, **options: Any) -> tuple[DistributedDataParallel, CodecState | None]:
    # Small buckets, so that there are several and that they are cut anew after the first step.
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    if codec is None:
        return ddp, None
    state, hook = ddp_hook(codec, model, **options)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def train(ddp: DistributedDataParallel, rank: int, steps: range, parts: int = 1) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            with ddp.no_sync() if part < parts - 1 else nullcontext():
                images, labels = batch(rank, step * parts + part)
                F.cross_entropy(ddp(images), labels).backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_rank(world: World, codec: str | None, parts: int) -> Tensor:
    model = net()
    ddp, state = make(codec, model) if codec else make(None, model)
    with state or nullcontext():
        train(ddp, world.rank, range(4), parts)
    return weights(model)


@pytest.mark.parametrize("parts", [1, 3])
def test_none_is_plain_ddp(parts: int) -> None:
    plain = run_ranks(train_rank, 2, None, parts)
    ours = run_ranks(train_rank, 2, "none", parts)
    for one, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("codec", ["onebit", "qsgd_mn", "powersgd"])
def test_replicas_stay_equal_bit_for_bit(codec: str) -> None:
    one, other = run_ranks(train_rank, 2, codec, 2)
    assert torch.equal(one, other)
    assert not torch.equal(one, weights(net()))


def other_state(world: World, changed: dict[str, Any]) -> str:
    _ddp, state = make("onebit", net())
    assert state is not None
    with state, pytest.raises(CheckpointError) as caught:
        state.load_state_dict({**state.state_dict(), **changed})
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({"codec": "twobit"}, "twobit"), ({"workers": 5}, "of 5"), ({"nodes": [2, 1]}, "on nodes of 2, 1 workers")],
)
def test_state_of_another_run_is_one_error_on_every_worker(changed: dict[str, Any], expected: str) -> None:
    for text in run_ranks(other_state, 2, changed):
        assert expected in text


def with_rules(world: World) -> set[str]:
    model = net()
    ddp, state = make("3.* -> onebit; *.weight -> fp16", model)
    assert state is not None
    with state:
        train(ddp, world.rank, range(2))
        return {name for name, one in state.state_dict()["parameters"].items() if "residuals" in one}


def test_a_policy_says_what_each_parameter_travels_as() -> None:
    assert run_ranks(with_rules, 2) == [{"3.weight"}] * 2


def begun_anew(world: World, saved: Any) -> tuple[Any, list[str], Tensor]:
    """The states of all workers after two steps; or warnings, and the weights of two steps that go on from states."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hybridpar.compress.ddp").addHandler(handler)
    model = net()
    ddp, state = make("onebit:warmup=1", model)
    assert state is not None
    with state:
        if saved is not None:
            state.load_state_dict(saved)
        train(ddp, world.rank, range(2))
        return state.gather_state_dicts(), told, weights(model)


def test_with_other_workers_codecs_begin_anew() -> None:
    states = run_ranks(begun_anew, 2, None)[0][0]
    assert [one["rank"] for one in states] == [0, 1]
    fresh, late = run_ranks(begun_anew, 3, None), run_ranks(begun_anew, 3, states)
    for (_, nothing, expected), (_, told, found) in zip(fresh, late, strict=True):
        assert not nothing
        assert told == ["what codec onebit:warmup=1 has not sent is dropped: the workers are others now"]
        assert torch.equal(found, expected)
    _, told, found = run_ranks(begun_anew, 2, states)[0]
    assert not told
    assert not torch.equal(found, run_ranks(begun_anew, 2, None)[0][2])


def alone(world: World) -> bool:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain, model = net(), net()
    train(DistributedDataParallel(plain), 0, range(2))
    ddp, state = make("none", model)
    assert state is not None
    with state:
        train(ddp, 0, range(2))
    dist.destroy_process_group()
    return torch.equal(weights(model), weights(plain))


def test_a_worker_alone_trains_as_without_a_hook() -> None:
    assert run_ranks(alone, 1) == [True]


def over_torch(world: World) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "MOST_WORKERS", 1)
        model = net()
        ddp, state = make("onebit", model)
        assert state is not None
        train(ddp, world.rank, range(1))
        state.close()
        state.close()
        return dist.is_initialized()


def test_groups_of_torch_are_closed_once() -> None:
    assert run_ranks(over_torch, 2) == [True, True]
