"""Two nodes of several workers: full precision inside, the codec between, and the same bits everywhere."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.compress.nodes import Nodes, columns_of, nodes_of
from tests.compress.test_ddp import make as make_ddp
from tests.compress.test_ddp import net, train, weights
from tests.ranks import run_ranks
from tests.sync.test_compression import Staged, batch, kept
from tests.sync.test_compression import make as make_trainer

EVEN = ("a", "a", "b", "b")
MIXED = ("a", "b", "b", "a")
UNEVEN = ("a", "b", "b", "b")


@pytest.mark.parametrize(
    ("names", "nodes", "columns"),
    [
        (EVEN, ((0, 1), (2, 3)), [[0, 2], [1, 3]]),
        (MIXED, ((0, 3), (1, 2)), [[0, 1], [2, 3]]),
        (UNEVEN, ((0,), (1, 2, 3)), [[0, 1], [2], [3]]),
    ],
)
def test_nodes(names: tuple[str, ...], nodes: Nodes, columns: list[list[int]]) -> None:
    assert nodes_of(names) == nodes
    assert columns_of(nodes) == columns


# ------------------------------------------------------------------------------------------------------ the DDP hook


def on_nodes(names: tuple[str, ...], rank: int) -> Any:
    return mock.patch("hybridpar.compress.nodes.host_identity", return_value=names[rank])


def hooked(world: World, names: tuple[str, ...], codec: str) -> tuple[Tensor, int, int]:
    model = net()
    with on_nodes(names, world.rank):
        ddp, state = make_ddp(codec, model, hierarchical=True)
    assert state is not None
    with state:
        train(ddp, world.rank, range(3))
        return weights(model), state.traffic.wire, len(state.state_dict()["parameters"])


def plain(world: World) -> Tensor:
    model = net()
    ddp, _ = make_ddp(None, model)
    train(ddp, world.rank, range(3))
    return weights(model)


@pytest.mark.parametrize("names", [MIXED, UNEVEN])
def test_without_a_codec_it_is_the_plain_mean(names: tuple[str, ...]) -> None:
    expected = run_ranks(plain, 4)
    found = run_ranks(hooked, 4, names, "none")
    for (ours, _, _), theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert torch.equal(ours, found[0][0])


@pytest.mark.parametrize(("names", "codec"), [(EVEN, "onebit"), (MIXED, "powersgd"), (UNEVEN, "onebit:decay=0.9")])
def test_replicas_stay_equal_and_leaders_share_the_work(names: tuple[str, ...], codec: str) -> None:
    found = run_ranks(hooked, 4, names, codec)
    for ours, _, _ in found[1:]:
        assert torch.equal(ours, found[0][0])
    assert sum(count for _, _, count in found) == 2 * len(list(net().parameters()))  # once on each node
    sending = [wire > 0 for _, wire, _ in found]
    nodes = nodes_of(names)
    assert sending == [any(rank in node[: min(map(len, nodes))] for node in nodes) for rank in range(4)]


# ---------------------------------------------------------------------------------------------------------- training


def summed(world: World, codec: str) -> tuple[list[Tensor], list[Any]]:
    """The gradients after a step, and what codecs know of nodes."""
    with mock.patch("hybridpar.compress.nodes.host_identity", return_value=EVEN[world.rank]):
        trainer = make_trainer(world, codec)
    with trainer:
        trainer.step(batch(world.rank, 0))
        grads = [one.grad.clone() for one in trainer.model.parameters() if one.grad is not None]
        return grads, [codec.state_dict()["nodes"] for codec in trainer.engine.codecs]


def test_a_codec_that_keeps_everything_gives_the_sum() -> None:
    """A warm-up step of error feedback travels in full precision: nodes change nothing but the order of additions."""
    found = run_ranks(summed, 4, "onebit:warmup=9", shared_memory=False)
    for (ours, nodes), (theirs, _) in zip(found, run_ranks(summed, 4, "none", shared_memory=False), strict=True):
        assert nodes == [[2, 2]]
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------ replicas of stages


def staged(
    world: World, names: str, codec: str, replicas: int, poisoned: bool, hierarchy: bool
) -> tuple[dict[str, Tensor], dict[str, str], list[list[int]], bool]:
    """State after three steps, what parameters travel as, the sizes of nodes, and whether any residual is kept."""
    config = {
        "stages": 2,
        "replicas": replicas,
        "micro_batches": 2,
        "sync": f"allreduce:bucket=0.02,hierarchy={hierarchy}",
    }
    with mock.patch("hybridpar.compress.nodes.host_identity", return_value=names[world.rank]):
        trainer = make_trainer(world, codec, **config)
    skipped, unmoved = list[bool](), list[bool]()
    with trainer:
        for step in range(3):
            images, labels = batch(world.rank % replicas, step)
            bad = poisoned and step == 1
            before = {path: tensor.clone() for path, tensor in kept(trainer).items()}
            if bad and world.rank % replicas == 1:
                images = images * float("inf")
            skipped.append(trainer.step((images, labels)).skipped)
            trainer.wait()
            after = kept(trainer)
            unmoved.append(before.keys() == after.keys() and equal(before, after))
        nodes = [codec.state_dict()["nodes"] for codec in trainer.engine.codecs]
        rows = {row.layer: row.codec for row in trainer.engine.wire_format().layers}
        assert skipped == [False, poisoned, False]
        keeps = any(bool(residual.any()) for residual in after.values())
        assert not keeps or unmoved == [False, poisoned, False], "what is kept moves with steps that count"
        trainer.engine.pipeline.collect()
        state = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
        return state, rows, nodes, keeps


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(("names", "sizes", "keeping"), [("abba", [2, 2], 4), ("abbb", [1, 3], 2)])
def test_two_stages_on_each_worker(names: str, sizes: list[int], keeping: int) -> None:
    found = run_ranks(staged, 4, names, "onebit", 4, True, True, shared_memory=False)
    flat = run_ranks(staged, 4, names, "onebit", 4, True, False, shared_memory=False)
    for state, rows, nodes, _ in found:
        assert equal(state, found[0][0])
        assert nodes == [sizes] * 2
        assert (rows["4.weight"], rows["4.bias"]) == ("onebit", "none")
    assert sum(keeps for *_, keeps in found) == keeping
    assert not equal(found[0][0], flat[0][0])
    assert [nodes for _, _, nodes, _ in flat] == [[[], []]] * 4


def test_a_stage_whose_replicas_are_on_one_node_compresses_nothing() -> None:
    # Replicas of the first stage are on one node, those of the second on two.
    found = run_ranks(staged, 4, "aaab", "onebit", 2, True, True, shared_memory=False)
    for state, rows, _, _ in found:
        assert equal(state, found[0][0])
        assert list(rows) == list(found[0][1])
        assert {name for name, codec in rows.items() if codec == "onebit"} == {"4.weight", "6.weight"}
    assert [nodes for _, _, nodes, _ in found] == [[[2]], [[2]], [[]], [[]]]
    assert [keeps for *_, keeps in found] == [False, False, True, True]
    assert len(found[0][1]) == len(list(Staged().parameters()))


def resumed(world: World, names: str, directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Four steps of stages in one go, and two by two with a checkpoint between."""
    states = []
    for part in ("whole", "rest"):
        with mock.patch("hybridpar.compress.nodes.host_identity", return_value=names[world.rank]):
            trainer = make_trainer(world, "onebit", stages=2, replicas=4)
        with trainer:
            if part == "rest":
                trainer.load(directory)
            for step in range(trainer.steps_done, 4):
                trainer.step(batch(world.rank, step))
                trainer.wait()
                if (part, step) == ("whole", 1):
                    trainer.save(directory)
            states.append({name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()})
    return states[0], states[1]


def test_stages_on_nodes_go_on_bit_for_bit(tmp_path: Any) -> None:
    for whole, rest in run_ranks(resumed, 4, "abba", str(tmp_path), shared_memory=False):
        assert equal(whole, rest)
