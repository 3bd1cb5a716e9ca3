"""`--compress auto`: the codec alone is searched for; where nothing can be measured, the exchange alone decides."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.machine.cluster_file import ClusterSpec, Hosts, LinkLevel
from hybridpar.plan import Plan
from hybridpar.planner import choice, decide, planned_run
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.planned_run import PlannedRun
from hybridpar.planner.probes import Question
from tests.ranks import run_ranks
from tests.sync.test_compression import Net, Staged, batch
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


def settled(world: World) -> tuple[list[Question], PlannedRun]:
    """What is searched for with `--plan none`, and what comes of an answer that says more than that."""
    answer = Plan.model_validate(
        {
            "model": {"name": "Staged", "fingerprint": "0" * 16, "parameters": 10},
            "partition": {"stages": [{"units": ["a"]}, {"units": ["b"]}]},
            "pipeline": {"schedule": "gpipe", "micro_batches": 8},
            "sync": {"lanes": 7, "policy": [{"pattern": "a.*", "codec": "fp16"}]},
        }
    )
    asked = []

    def search(model: nn.Module, world: World, question: Question, *_: object) -> decide.Decision:
        asked.append(question)
        return decide.Decision(answer, ("plan     the answer",), mock.Mock())

    config = TrainConfig(plan="none", compress="auto", fidelity="close", stages=2, micro_batches=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decide, "decide_plan", search)
        return asked, planned_run.plan_loop(Staged(), config, world, batch(0, 0)[0], 10**6, "net", None, mock.Mock())


def test_with_plan_none_the_search_is_for_the_codec_alone():
    for (question,), run in run_ranks(settled, 4, shared_memory=False):
        assert question.fixed == Fixed(
            *(4, 2, 2, 2, "greedy", "linear"), every_step=True, equal=True, shard_optimizer=False
        )
        assert run.lines == ("plan     the answer",)
        assert run.plan.sync.codec == "a.* -> fp16"
        pipeline = run.plan.pipeline
        assert (pipeline.schedule, pipeline.micro_batches, run.plan.sync.lanes) == ("greedy", 2, 2)


def test_a_single_worker_has_nothing_to_choose_and_is_told_so(caplog):
    with Trainer(Net(), config=TrainConfig(compress="auto", fidelity="close"), world=World()) as trainer:
        assert trainer.plan.sync.codec == "none"
        assert "a single replica" in trainer.planned.lines[0]
        assert not caplog.records
