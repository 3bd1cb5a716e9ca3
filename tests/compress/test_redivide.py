"""With another number of workers, what the old ones had not sent is sent by the new ones, all of it and once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.compress import CODECS
from hybridpar.compress.ddp import CodecState
from hybridpar.compress.feedback import FeedbackCoder
from hybridpar.compress.redivide import put_together
from hybridpar.errors import CheckpointError
from tests.compress.team import Team, equal
from tests.compress.test_ddp import batch as ddp_batch
from tests.compress.test_ddp import make as make_ddp
from tests.compress.test_ddp import net, train
from tests.ranks import run_ranks
from tests.sync.test_compression import Net, batch

SHAPES = {"matrix": (40, 33), "conv": (10, 6, 3, 3), "row": (1, 64), "bias": (7,), "empty": (0, 5)}
TEXTS = [
    *CODECS,
    "onebit:group=column",
    "twobit:least=10",
    "twobit:pull=full,least=10",
    "powersgd:gain=0",
    "hylo:least=100",
]


def settled(text: str, workers: int, **spec: Any) -> Team:
    team = Team(text, SHAPES, workers, **spec)
    for seed in range(3):
        team.step(team.gradients(seed))
    return team


def resume(old: Team, text: str, workers: int, **spec: Any) -> Team:
    new = Team(text, SHAPES, workers, **spec)
    for name in SHAPES:
        states = [coder.state_dict() for coder in old.coders(name)]
        for coder in new.coders(name):
            coder.load_states(states)
    return new


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("before", "after", "average"), [(2, 1, True), (2, 3, False), (3, 2, True), (1, 4, False)])
def test_what_would_be_added_to_the_result_stays_the_same(text: str, before: int, after: int, average: bool) -> None:
    old = settled(text, before, average=average)
    new = resume(old, text, after, average=average)
    for name in SHAPES:
        left = old.unsent(name) / (before if average else 1)
        right = new.unsent(name) / (after if average else 1)
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)
    new.step(new.gradients(5))  # compares the workers bit for bit


@pytest.mark.parametrize("text", ["onebit:meet=shard", "twobit:least=10,meet=shard"])
def test_stripes_become_one_tensor_and_are_cut_anew(text: str) -> None:
    old = settled(text, 2, average=False)
    new = resume(old, text, 3, average=False)

    def owners(team: Team) -> Tensor:
        total = torch.zeros(10 * 6 * 9)
        for coder in team.coders("conv"):
            assert isinstance(coder, FeedbackCoder)
            coder._later.spread("owner", coder.residual("owner"), total)
        return total

    assert bool(owners(old).any())
    assert torch.equal(owners(old), owners(new))


def test_what_is_equal_on_all_workers_goes_on() -> None:
    old = settled("powersgd:gain=0,warmup=1", 2)
    for coder in resume(old, "powersgd:gain=0,warmup=1", 3).coders("conv"):
        theirs, ours = old.coders("conv")[0].state_dict(), coder.state_dict()
        assert ours["steps"] == theirs["steps"] == 3
        assert equal(ours["inner"], theirs["inner"])


@pytest.mark.parametrize("text", TEXTS)
def test_where_nothing_changed_it_goes_on_bit_for_bit(text: str) -> None:
    old = settled(text, 3)
    new = resume(old, text, 3)
    assert equal(old.snapshot(), new.snapshot())


def test_there_and_back_is_the_whole_again() -> None:
    old = settled("onebit", 4)
    back = resume(resume(old, "onebit", 1), "onebit", 4)
    for name in SHAPES:
        torch.testing.assert_close(old.unsent(name), back.unsent(name), rtol=0, atol=1e-5)


def test_states_of_another_shape_are_refused() -> None:
    old, new = settled("onebit", 2), Team("onebit", {"matrix": (33, 41)}, 3)
    with pytest.raises(CheckpointError, match="of worker 0 of 2"):
        new.coders("matrix")[0].load_states([coder.state_dict() for coder in old.coders("matrix")])


def test_a_missing_worker_is_named() -> None:
    states = [{"codec": "onebit", "rank": rank, "workers": 3, "parameters": {"w": {}}} for rank in (0, 2)]
    with pytest.raises(CheckpointError, match=r"3 workers, and there are the states of \[0, 2\]"):
        put_together(states)
    with pytest.raises(CheckpointError, match="twobit"):
        put_together([states[0], {**states[1], "codec": "twobit"}])


# ------------------------------------------------------------------------------------------------------ the DDP hook


def mass(state: CodecState) -> dict[str, Tensor]:
    """What this worker would add to the mean, by parameter."""
    coders = state._coders.values()
    return {one.spec.name: one.unsent() / one.spec.workers for one in coders if isinstance(one, FeedbackCoder)}


def hook_rank(world: World, codec: str, saved: Any, lanes: int) -> tuple[Any, dict[str, Tensor]]:
    """Two steps from the start, or what was kept after loading and before the first step."""
    if world.size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = net()
        ddp, state = make_ddp(codec, model, lanes=lanes)
        assert state is not None
        with state:
            if saved is None:
                train(ddp, world.rank, range(2))
                states = state.gather_state_dicts()
                return states, mass(state)
            state.load_state_dict(saved)
            # A worker that skips its first step has its coders, and in them what it loaded.
            images, labels = ddp_batch(world.rank, 7)
            F.cross_entropy(ddp(images), labels).backward()
            state.rollback()
            loaded = mass(state)
            train(ddp, world.rank, range(3, 5))
            return None, loaded
    finally:
        if world.size == 1:
            dist.destroy_process_group()


def total(found: list[tuple[Any, dict[str, Tensor]]]) -> dict[str, Tensor]:
    return {name: torch.stack([kept[name] for _, kept in found]).sum(0) for name in found[0][1]}


@pytest.mark.parametrize("change", [(2, 1), (2, 3), (3, 2)], ids=str)
def test_the_hook_goes_on_with_other_workers(change: tuple[int, int]) -> None:
    before = run_ranks(hook_rank, change[0], "onebit", None, 1)
    states = before[0][0]
    assert len(states) == change[0]
    assert not before[1][0]
    after = run_ranks(hook_rank, change[1], "onebit", states, 2)
    expected, found = total(before), total(after)
    assert expected.keys() == found.keys()
    for name, left in expected.items():
        assert bool(left.any())
        torch.testing.assert_close(left, found[name], rtol=0, atol=1e-7)


def wrong_hook(world: World) -> str:
    _ddp, state = make_ddp("onebit", net())
    assert state is not None
    with state, pytest.raises(CheckpointError) as caught:
        state.load_state_dict({**state.state_dict(), "workers": 5})
    return str(caught.value)


def test_one_workers_state_is_not_taken_for_that_of_another() -> None:
    for text in run_ranks(wrong_hook, 2):
        assert "of 5" in text
        assert "list with the states of all workers" in text


# ----------------------------------------------------------------------------------------------------------- trainer


def run_trainer(
    world: World, codec: str, directory: str, path: str | None, options: dict[str, Any]
) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Two steps and a checkpoint, or what is kept after loading one; then two more. Kept sums by parameter, weights."""
    torch.manual_seed(0)
    config = TrainConfig(**{"compress": codec, "lr": 0.05, "bucket_mb": 0.02, **options})
    with Trainer(Net(), config=config, world=world) as trainer:
        if path is not None:
            trainer.load(path)
            trainer.engine.pipeline.stages[0].reducer.follow_trainable()  # type: ignore[union-attr]
        else:
            for step in range(2):
                trainer.step(batch(world.rank, step))
            path = str(trainer.save(directory))
        kept = {
            name: coder.unsent()
            for one in trainer.engine.codecs
            for name, coder in one._coders.items()
            if isinstance(coder, FeedbackCoder)
        }
        for step in range(2, 4):
            trainer.step(batch(world.rank, step))
        return path, kept, {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def summed(found: list[Any]) -> dict[str, Tensor]:
    return {name: torch.stack([kept[name] for _, kept, _ in found]).sum(0) for name in found[0][1]}


@pytest.mark.parametrize(
    ("codec", "change", "options"),
    [
        ("onebit", (2, 3), {}),
        ("powersgd:gain=0", (3, 2), {}),
        ("twobit", (3, 2), {"bucket_mb": 0.5}),
        ("onebit", (2, 2), {"bucket_mb": 0.5}),
    ],
)
def test_a_checkpoint_goes_on_with_other_workers(
    codec: str, change: tuple[int, int], options: dict[str, Any], tmp_path: Any
) -> None:
    before = run_ranks(run_trainer, change[0], codec, str(tmp_path), None, {}, shared_memory=False)
    after = run_ranks(run_trainer, change[1], codec, str(tmp_path), before[0][0], options, shared_memory=False)
    expected, found = summed(before), summed(after)
    assert expected.keys() == found.keys()
    for name, left in expected.items():
        torch.testing.assert_close(left, found[name], rtol=0, atol=1e-6)
    assert any(bool(left.any()) for left in expected.values())
    for _, _, weights in after[1:]:
        for name, tensor in weights.items():
            assert torch.equal(tensor, after[0][2][name]), name


@pytest.mark.parametrize("average", [True, False])
def test_momentum_that_a_codec_keeps_is_divided_too(average: bool) -> None:
    old = settled("dgc:least=1", 2, average=average)
    new = resume(old, "dgc:least=1", 3, average=average)
    for key in ("momentum", "unsent"):
        sums = [
            torch.stack([coder.state_dict()[key] for coder in team.coders("conv")]).sum(0)
            / (team.workers if average else 1)
            for team in (old, new)
        ]
        assert bool(sums[0].any())
        torch.testing.assert_close(*sums, rtol=0, atol=1e-5)
