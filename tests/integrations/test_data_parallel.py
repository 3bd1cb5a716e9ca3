"""`hybridpar.DataParallel` in the place of DistributedDataParallel: same results, same use, state that resumes."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import hybridpar
from hybridpar.comm.world import World
from hybridpar.compress.ddp import ddp_hook
from hybridpar.errors import CheckpointError, UsageError
from hybridpar.integrations import data_parallel
from tests.compress.test_ddp import batch, net, train, weights
from tests.ranks import run_ranks


def trained(kind: Any, world: World, steps: range = range(3), **options: Any) -> tuple[Any, Tensor]:
    ddp = kind(net(), bucket_cap_mb=0.02, **options)
    train(ddp, world.rank, steps, parts=2)
    return ddp, weights(ddp.module)


def same_as_torch(world: World) -> dict[str, bool]:
    plain, expected = trained(DistributedDataParallel, world)
    ours, found = trained(hybridpar.DataParallel, world)
    by_hand = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    state, hook = ddp_hook("onebit", by_hand.module)
    by_hand.register_comm_hook(state, hook)
    train(by_hand, world.rank, range(3), parts=2)
    options = {"gradient_as_bucket_view": True, "find_unused_parameters": True, "process_group": dist.group.WORLD}
    onebit, compressed = trained(hybridpar.DataParallel, world, compress="onebit", **options)
    payload = onebit.compression.traffic.payload
    copied = copy.deepcopy(onebit)
    images, labels = batch(world.rank, 9)
    F.cross_entropy(copied(images), labels).backward()
    state.close()
    return {
        "none is DDP": torch.equal(found, expected)
        and ours.compression is None
        and ours.compression_state_dict() == {},
        "a codec is the hook": torch.equal(compressed, weights(by_hand.module)),
        "a codec changes something": not torch.equal(compressed, expected),
        "it is a DDP": isinstance(onebit, DistributedDataParallel) and isinstance(onebit.module, nn.Sequential),
        "it sends less": payload < 4 * compressed.numel() / 4,
        "keys are those of DDP": list(onebit.state_dict()) == list(plain.state_dict()),
        "a copy does not compress": copied.compression is None and onebit.compression is not None,
    }


def test_it_is_ddp_and_with_a_codec_the_hook() -> None:
    for found in run_ranks(same_as_torch, 2):
        assert not [what for what, holds in found.items() if not holds]


def resumed(world: World, directory: str) -> list[bool]:
    """Three steps at once, against one, a file, and two in new objects: of each worker's state, and of all of them."""
    _, expected = trained(hybridpar.DataParallel, world, compress="onebit", seed=3)
    first, _ = trained(hybridpar.DataParallel, world, range(1), compress="onebit", seed=3)
    path = Path(directory)
    everybody = first.gather_compression()  # a collective
    if world.rank == 0:
        torch.save({"model": first.module.state_dict(), "compression": everybody}, path / "all.pt")
    own = {"model": first.module.state_dict(), "compression": first.compression_state_dict()}
    torch.save(own, path / f"rank-{world.rank}.pt")
    dist.barrier()
    found = [bool(everybody) == (world.rank == 0)]
    for name in ("all.pt", f"rank-{world.rank}.pt", None):
        again = hybridpar.DataParallel(net(), bucket_cap_mb=0.02, compress="onebit", seed=3)
        saved = torch.load(path / (name or "all.pt"), weights_only=True)
        again.module.load_state_dict(saved["model"])
        if name:
            again.load_compression_state_dict(saved["compression"])
            again.load_compression_state_dict(again.compression_state_dict())  # saved again before a step
        train(again, world.rank, range(1, 3), parts=2)
        found.append(torch.equal(weights(again.module), expected) == bool(name))  # without its state it differs
        again.close()
    plain = hybridpar.DataParallel(net())
    plain.load_compression_state_dict([])
    with pytest.raises(CheckpointError, match="of codec 'onebit', and 'none' is used"):
        plain.load_compression_state_dict(saved["compression"])
    return found


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    for found in run_ranks(resumed, 2, str(tmp_path)):
        assert found == [True] * 4


def refused(world: World) -> list[str]:
    texts = []
    wrong: list[dict[str, Any]] = [
        {"compress": "onebitt"},
        {"compress": "layer9.* -> onebit"},
        {"compress": "auto", "fidelity": "loose"},
        {"compress": ["onebit", "fp16"][world.rank]},
    ]
    for options in wrong:
        with pytest.raises(UsageError) as caught:
            hybridpar.DataParallel(net(), **options)
        texts.append(str(caught.value))
    hooked = DistributedDataParallel(net())
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for ddp in (hooked, hybridpar.DataParallel(net())):
        with pytest.raises(UsageError) as caught:
            hybridpar.DataParallel.adopt(ddp, compress="onebit")
        texts.append(str(caught.value))
    return texts


def test_wrong_names_are_refused() -> None:
    for texts in run_ranks(refused, 2):
        codec, pattern, fidelity, unlike, hooked, adopted = texts
        assert "onebitt" in codec
        assert "Did you mean onebit" in codec
        assert "matches no parameter" in pattern
        assert "'loose'" in fidelity
        assert "was given another compression policy" in unlike
        assert "has a communication hook already" in hooked
        assert "wrapped as hybridpar.integrations" in adopted


def two_models(world: World) -> list[Tensor]:
    """A generator and a discriminator, each in a DDP with a codec of its own, whose backward passes alternate."""
    torch.manual_seed(0)
    made = [nn.Linear(8, 192), nn.Linear(192, 1)]
    generator, judge = (
        hybridpar.DataParallel(one, compress=text) for one, text in zip(made, ("onebit", "qsgd_mn"), strict=True)
    )
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (generator, judge)]
    for step in range(3):
        real = batch(world.rank, step)[0].flatten(1)
        fake = generator(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + world.rank)))
        (judge(fake.detach()).mean() - judge(real).mean()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        (-judge(fake).mean()).backward()
        optimizers[0].step()
        for one in optimizers:
            one.zero_grad()
    return [weights(one) for one in made]


def test_two_models_that_train_through_each_other() -> None:
    first, second = run_ranks(two_models, 2)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def others(world: World) -> tuple[str, bool, list[int], str]:
    """The choice of `auto`, a world of one worker, threads that are left after `close`, and a warning."""
    auto = hybridpar.DataParallel(net(), compress="auto", fidelity="lossy")
    choices = world.gather(auto.compress)
    with mock.patch.object(data_parallel._log, "warning") as said:
        exact = hybridpar.DataParallel(net(), compress="auto")  # with fidelity exact
    groups = [dist.new_group([0]), dist.new_group([1])]
    alone = hybridpar.DataParallel(net(), process_group=groups[world.rank], compress="onebit")
    train(alone, world.rank, range(1))
    before = threading.active_count()
    with_hook, _ = trained(hybridpar.DataParallel, world, compress="fp16")
    during = threading.active_count()
    with_hook.close()
    with_hook.close()
    auto.close()
    with mock.patch.object(data_parallel._log, "warning") as warning:
        alone.load_compression_state_dict(with_hook.compression_state_dict())
    told = warning.call_args.args
    same = len(set(map(str, choices))) == 1 and exact.compression is None and alone.compression is None
    same &= (world.rank > 0) != any("fidelity exact allows nothing else" in str(one) for one in said.mock_calls)
    return auto.compress, same, [during - before, threading.active_count() - before], told[0] % told[1:]


def test_auto_agrees_and_one_worker_sends_nothing() -> None:
    for chosen, same, (during, after), told in run_ranks(others, 2):
        assert chosen
        assert same
        assert during == 1
        assert after <= 0
        assert told == "what codec fp16 has not sent is dropped: gradients are sent as none now"
