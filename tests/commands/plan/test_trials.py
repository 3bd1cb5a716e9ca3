"""Plans that are run: with the options that they ask for, the same result for all that are exact, and in turns."""

from __future__ import annotations

import json

import pytest
import torch
from hybridpar.commands.plan.trials import Trial, random_batch, time_plans

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.machine.cluster_file import parse_cluster
from hybridpar.plan import Plan, parse_plan
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.measure import profile_model
from hybridpar.planner.record import plan_of
from hybridpar.planner.search import Answer, find_plan
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
    images, targets = random_batch((3, SIDE, SIDE), BATCH, 5, world.device)
    states = {}
    for name, text in plans.items():
        plan = parse_plan(json.loads(text))
        trial = Trial(plan, blocks(), images, targets, world, TrainConfig(lr=0.1))
        for _ in range(STEPS):
            trial.step()
        if trial.trainer is not None:
            trial.trainer.engine.synchronize_buffers()
            if world.is_main:
                states[name] = {key: one.clone() for key, one in trial.trainer.model.state_dict().items()}
        trial.close()
    return states


def test_plans_that_are_exact_train_the_same_model():
    plans = of_each_kind(searched())
    assert len(plans) >= 8
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

    images, targets = random_batch((3, SIDE, SIDE), BATCH, 5, world.device)
    with pytest.raises(UsageError) as caught:
        Trial(parse_plan(json.loads(text)), blocks(), images, targets, world, TrainConfig())
    return caught.value.what


def test_a_pipeline_on_a_part_of_the_workers_is_refused():
    outcome = next(one for one in searched().ranked if one.candidate.layout.positions == 2)
    text = plan_of(searched(), outcome).to_json()
    assert "a pipeline on 2 of 3 workers" in run_ranks(refused, 3, text)[0]


def turns(world: World) -> tuple[list[str], dict[str, int]]:
    order: list[str] = []
    steps = {name: (lambda name=name: order.append(name)) for name in ("a", "b", "c")}
    times = time_plans(steps, world, rounds=6, seconds=0.0)
    return order, {name: len(values) for name, values in times.items()}


def test_plans_take_turns_and_stop_in_time_but_not_before_three_rounds():
    one, other = run_ranks(turns, 2)
    assert one == other
    order, counts = one
    assert counts == {"a": 3, "b": 3, "c": 3}
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    alone = time_plans({"a": int}, World(), rounds=4)
    assert len(alone["a"]) == 4
