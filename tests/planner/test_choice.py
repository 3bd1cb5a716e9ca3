"""`--compress auto`: the codec alone is searched for; where nothing can be measured, the exchange alone decides."""

from __future__ import annotations

import pytest
import torch

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.machine.cluster_file import ClusterSpec, Hosts, LinkLevel
from hybridpar.planner import choice
from tests.ranks import run_ranks
from tests.sync.test_compression import Net, batch
from tests.sync.test_meetings import TwoTypes
from tests.sync.test_reducer import make_data


def chosen(world: World, fidelity: str, megabytes_per_second: float) -> tuple[str, tuple[str, ...]]:
    """What a loop that says nothing of its inputs sends, over a link of a speed that is given."""
    config = TrainConfig(compress="auto", fidelity=fidelity)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        level = LinkLevel(bandwidth=1e6 * megabytes_per_second, latency_ms=1e-3)
        cluster = ClusterSpec(hosts=(Hosts(devices=2),), inside=level)
        patch.setattr(choice, "measure_cluster", lambda world: cluster)
        torch.manual_seed(0)
        with Trainer(Net(), config=config, world=world) as trainer:
            trainer.step(batch(world.rank, 0))
            return str(trainer.engine.wire_format().policy), trainer.planned.lines


@pytest.mark.parametrize(
    ("fidelity", "shared", "speed", "policy", "line"),
    [
        ("exact", False, 0.01, "none", "none: fidelity exact allows nothing else"),
        ("close", True, 0.01, "none", "none: in shared memory gradients"),
        ("close", False, 0.01, "fp16", "fp16 (of none, fp16, bf16)"),
        ("close", False, 1e9, "none", "none (of none, fp16, bf16)"),
        ("lossy", False, 0.01, None, "compared at a learning rate of 0.01"),
    ],
)
def test_all_workers_take_the_codec_whose_exchange_takes_least(fidelity, shared, speed, policy, line):
    first, other = run_ranks(chosen, 2, fidelity, speed, shared_memory=shared)
    assert first == other
    text, lines = first
    if policy is None:
        assert "onebit" in text
    elif policy == "fp16":
        assert text in ("fp16", "bf16")
        line = line.replace("fp16 (", f"{text} (")
    else:
        assert text == policy
    assert any(line in said for said in lines), lines


def with_two_types(world: World, plan: str) -> tuple[str, tuple[str, ...]]:
    torch.manual_seed(0)
    config = TrainConfig(compress="auto", fidelity="close", plan=plan)  # type: ignore[arg-type]
    known = {"example": torch.zeros(8, 3, 8, 8), "total_steps": 10**6}
    with Trainer(TwoTypes(), config=config, world=world, **known) as trainer:  # type: ignore[arg-type]
        trainer.step(make_data(8, seed=world.rank))
        return str(trainer.engine.wire_format().policy), trainer.planned.lines


@pytest.mark.parametrize("plan", ["none", "auto"])
def test_a_model_with_other_types_than_float32_is_sent_as_it_is(plan: str) -> None:
    for policy, lines in run_ranks(with_two_types, 2, plan, shared_memory=False):
        assert policy == "none"
        assert any("none: the parameter 'second.weight' is torch.float64" in line for line in lines), lines


def test_a_single_worker_has_nothing_to_choose_and_is_told_so(caplog):
    with Trainer(Net(), config=TrainConfig(compress="auto", fidelity="close"), world=World()) as trainer:
        assert trainer.plan.sync.codec == "none"
        assert "a single replica" in trainer.planned.lines[0]
        assert not caplog.records
