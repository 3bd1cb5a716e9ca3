"""What is told: parts of a step add up, what a plan lost to is named, and the command prints and writes it all."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybridpar.errors import PlanError
from hybridpar.machine.cluster_file import parse_cluster
from hybridpar.planner.codecs import FIDELITIES, STEPS_TO_TARGET, WITHOUT_ENDS
from hybridpar.planner.explain import notes, rows
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.search import find_plan
from tests.planner.small import chain, cluster, inputs


def test_the_parts_of_every_step_add_up():
    answer = find_plan(inputs(fidelity="lossy"))
    for outcome in answer.ranked:
        parts = answer.evaluator.parts(outcome.candidate)
        assert parts.step == outcome.step_ms
        assert parts.compute + parts.bubble + parts.sync + parts.codec + parts.update == pytest.approx(parts.step)
        assert min(parts.compute, parts.bubble, parts.sync, parts.update) >= -1e-9
        if not outcome.candidate.codec.codecs:
            assert parts.codec == 0


def test_workers_that_share_a_replica_exchange_nothing_and_update_their_stages_one_after_the_other():
    profile = replace(inputs().profile, update_ms=9.0)
    answer = find_plan(inputs(profile, most_stages=4))
    pipelines = [one for one in answer.ranked if one.candidate.layout.replicas == 1]
    assert {one.candidate.layout.stages for one in pipelines} == {1, 2, 4}
    for outcome in pipelines:
        assert answer.evaluator.parts(outcome.candidate).sync == pytest.approx(0)


def test_a_baseline_that_does_not_fit_is_told():
    profile = chain([(5, 10)] * 3, [(512, 512)] * 3, 40_000_000, batch_norm=False)
    wide = find_plan(inputs(profile, cluster(2, 1e9), batch=8, most_micro_batches=8))
    assert wide.baselines["one device"] is not None
    least = min(one.memory_bytes for one in wide.ranked)
    narrow = find_plan(inputs(profile, cluster(2, 1e9, memory=int(least) + 1), batch=8, most_micro_batches=8))
    assert narrow.baselines["one device"] is None
    assert rows(narrow)[-1].verdict == "does not fit into memory"


def test_notes_say_what_the_figures_are_worth():
    asked = inputs(spec=cluster(4), batch=2, fidelity="lossy")
    profile = replace(asked.profile, source="analytic", batch_norm=True, noise=0.4)
    asked = replace(asked, profile=profile)
    text = "\n".join(notes(find_plan(asked)))
    for told in ("feeds 2 of 4 workers", "not measured", "BatchNorm", "differ by 40 %", "by less than 3 %"):
        assert told in text


def test_steps_to_a_target_are_those_of_the_committed_table():
    table = Path(__file__).parents[2] / "benchmarks/sync/results/loss.csv"
    newest = {row["what"]: row for row in csv.DictReader(table.open()) if "5 seeds" in row["setting"]}

    def curve(row: dict[str, str]) -> list[tuple[int, float]]:
        early = json.loads(row["extra"])["at_step"]
        return [*((int(step), loss) for step, loss in early.items()), (100, float(row["value"]))]

    assert STEPS_TO_TARGET.keys() == {"none", *FIDELITIES["lossy"]}
    plain = curve(newest["loss, ddp"])
    for text, factor in STEPS_TO_TARGET.items():
        if text not in ("none", "fp16", "bf16"):
            policy = f"fc.weight -> none; conv1.weight -> none; * -> {text}" if text in WITHOUT_ENDS else text
            (_, loss) = curve(newest[f"loss, own:{policy}"])[-1]
            reached = np.interp(-max(loss, plain[-1][1]), [-other for _, other in plain], [step for step, _ in plain])
            steps = 100 / reached
            assert factor == pytest.approx(steps, abs=5e-4)


def test_what_is_decided_and_leaves_no_plan_is_said():
    with pytest.raises(PlanError, match=r"leaves no plan for 2 worker\(s\): workers 3"):
        find_plan(inputs(spec=cluster(2), fixed=Fixed(workers=3)))


def test_a_large_cluster_is_searched_without_simulating_its_workers():
    spec = parse_cluster(
        {
            "hosts": [{"count": 512, "devices": 8, "kind": "cuda"}],
            "inside": {"bandwidth": 1e11, "latency_ms": 0.01},
            "between": {"bandwidth": 1.25e9, "latency_ms": 0.05},
        }
    )
    asked = inputs(chain([(20, 40)] * 4, [(512, 512)] * 4, batch_norm=True), spec, batch=4096 * 4, most_stages=4)
    answer = find_plan(asked)
    assert answer.evaluator.space.workers == 4096
    assert answer.chosen.candidate.layout.workers == 4096
