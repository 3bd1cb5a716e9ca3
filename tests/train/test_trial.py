"""Plans that are run: with the options that they ask for, the same result for all that are exact, and in turns."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.machine.cluster_file import parse_cluster
from hybridpar.plan import Plan, parse_plan
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.profile import profile_model
from hybridpar.planner.record import plan_of
from hybridpar.planner.search import Answer, find_plan
from hybridpar.planner.trials import random_batch
from hybridpar.train import trial
from hybridpar.train.trainer import open_trial
from tests.planner.small import RATES
from tests.ranks import run_ranks
from tests.train.test_engine import blocks

BATCH, SIDE, STEPS = 8, 8, 3


def searched(workers: int = 2, fidelity: str = "exact") -> Answer:
    profile = profile_model(blocks(), [torch.zeros(BATCH // workers, 3, SIDE, SIDE)], measure=False)
    spec = parse_cluster({"hosts": [{"count": workers}], "between": {"bandwidth": 1e6, "latency_ms": 0.01}})
    asked = PlannerInputs(profile, spec, BATCH, fidelity, RATES)  # type: ignore[arg-type]
    return find_plan(asked)


def of_each_kind(answer: Answer) -> dict[str, Plan]:
    """A plan for every number of stages and workers, placement and schedule."""
    found: dict[str, Plan] = {}
    for outcome in answer.ranked:
        candidate = outcome.candidate
        shape = candidate.layout
        if shape.stages > 1 and shape.workers < answer.evaluator.space.workers:
            continue
        key = f"{shape.stages} on {shape.positions} x {shape.replicas}, {shape.kind} {candidate.schedule}"
        found.setdefault(key, plan_of(answer, outcome))
    return found


def trained(world: World, plans: dict[str, str]) -> dict[str, dict[str, torch.Tensor]]:
    """The whole model after some steps of every plan, on the first worker."""
    images, states = random_batch((3, SIDE, SIDE), BATCH, world.device), {}
    with mock.patch.object(trial, "_PLAIN", TrainConfig(plan="none", lr=0.1)):
        for name, text in plans.items():
            steps = open_trial(blocks(), TrainConfig(), world, images, parse_plan(json.loads(text)))
            for _ in range(STEPS):
                steps.step()
            if steps.trainer is not None:
                steps.trainer.engine.synchronize_buffers()
                if world.is_main:
                    states[name] = {key: one.clone() for key, one in steps.trainer.model.state_dict().items()}
            steps.close()
    return states


def test_plans_that_are_exact_train_the_same_model():
    plans = of_each_kind(searched())
    assert len(plans) >= 5
    assert {len(plan.partition.stages) for plan in plans.values()} == {1, 2, 4}
    states = run_ranks(trained, 2, {name: plan.to_json() for name, plan in plans.items()})[0]
    # One process, the whole model, the micro-batches of plain data parallelism one after the other.
    oracle = states["1 on 1 x 1, linear accumulate"]
    start = blocks().state_dict()
    assert any(not torch.equal(oracle[key], start[key]) for key in oracle)
    for name, state in states.items():
        for key, one in state.items():
            torch.testing.assert_close(one, oracle[key], rtol=1e-5, atol=1e-6, msg=f"{key} of {name}")


def refused(world: World, text: str) -> str:
    images = random_batch((3, SIDE, SIDE), BATCH, world.device)
    with pytest.raises(UsageError) as caught:
        open_trial(blocks(), TrainConfig(), world, images, parse_plan(json.loads(text)))
    return caught.value.what


def test_a_pipeline_on_a_part_of_the_workers_is_refused():
    outcome = next(one for one in searched().ranked if one.candidate.layout.positions == 2)
    text = plan_of(searched(), outcome).to_json()
    assert "a pipeline on 2 of 3 workers" in run_ranks(refused, 3, text)[0]
