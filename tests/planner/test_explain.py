"""What is told: parts of a step add up, what a plan lost to is named, and the command prints and writes it all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridpar.commands.plan.request import PlanRequest
from hybridpar.commands.plan.search import run_plan
from hybridpar.errors import HybridparError, PlanError, UsageError
from hybridpar.machine.cluster_file import parse_cluster
from hybridpar.plan import read_plan
from hybridpar.planner.codecs import FIDELITIES, STEPS_TO_TARGET, WITHOUT_ENDS
from hybridpar.planner.explain import notes, rows, what_ifs
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.record import plan_of
from hybridpar.planner.scaling import curve_lines, scaling_curve
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


def test_what_leaving_a_machine_out_would_cost_is_told():
    hosts = [{"throughput": one, "name": f"x{one}", "kind": "cuda"} for one in (1, 3)]
    for bandwidth, told in ((1e12, "loses"), (1e4, "gains nothing")):  # on a slow link the slow machine is idle
        spec = parse_cluster({"hosts": hosts, "between": {"bandwidth": bandwidth, "latency_ms": 0.01}})
        asked = inputs(chain([(1, 2), (2, 4)], [(64, 64), (64, 64)]), spec, batch=24, most_stages=1)
        found = dict(line.split(": ", 1) for line in what_ifs(asked, find_plan(asked)))
        assert told in found["without x1 (1 device)"]
        assert "loses" in found["without x3 (1 device)"]


def test_a_baseline_that_does_not_fit_is_told():
    profile = chain([(5, 10)] * 3, [(512, 512)] * 3, 40_000_000, batch_norm=False)
    wide = find_plan(inputs(profile, cluster(2, 1e9), batch=8, most_micro_batches=8))
    assert wide.baselines["one device"] is not None
    least = min(one.memory_bytes for one in wide.ranked)
    narrow = find_plan(inputs(profile, cluster(2, 1e9, memory=int(least) + 1), batch=8, most_micro_batches=8))
    assert narrow.baselines["one device"] is None
    assert rows(narrow)[-1].verdict == "does not fit into memory"


def test_what_would_help_is_asked_of_the_search_itself():
    asked = inputs(spec=cluster(2, 1e7))
    answer = find_plan(asked)
    found = dict(line.split(": ", 1) for line in what_ifs(asked, answer))
    assert found.keys() == {"--fidelity close", "--fidelity lossy", "a link 10 times as fast", "another host"}
    faster = find_plan(asked.on(cluster(2, 1e8))).fastest.score
    assert f"gains {answer.fastest.score - faster:,.1f} ms a step ({faster:,.1f} ms" in found["a link 10 times as fast"]
    alone = inputs(spec=cluster(1), rates={})
    told = what_ifs(alone, find_plan(alone))
    assert "a link 10 times as fast: there is no link" in told
    assert "--fidelity close: no codec was timed" in told
    assert len(what_ifs(replace(asked, fidelity="lossy"), answer)) == 2


def test_notes_say_what_the_figures_are_worth():
    asked = inputs(spec=cluster(4), batch=2, fidelity="lossy")
    profile = replace(asked.profile, source="analytic", batch_norm=True, noise=0.4)
    asked = replace(asked, profile=profile)
    text = "\n".join(notes(asked, find_plan(asked)))
    for told in ("feeds 2 of 4 workers", "not measured", "BatchNorm", "noise is 40 %", "only 3 % apart"):
        assert told in text


def interpolated_steps(curve: Sequence[tuple[int, float]], loss: float) -> float:
    """Where a falling curve of losses reaches a loss, on the line between two of its points.

    Args:
        curve: Steps and losses, by steps.
        loss: Between two losses of the curve.

    Raises:
        ValueError: The curve does not reach it.
    """
    for (step, before), (later, after) in itertools.pairwise(curve):
        if after <= loss <= before:
            return step + (later - step) * (before - loss) / (before - after)
    raise ValueError(f"no part of the curve passes {loss}")


def test_steps_to_a_target_are_those_of_the_committed_table():
    import csv
    import json

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
            steps = 100 / interpolated_steps(plain, max(loss, plain[-1][1]))
            assert factor == pytest.approx(steps, abs=5e-4)


# ------------------------------------------------------------------ the command

CLUSTER = 'name = "two"\n[[hosts]]\ncount = 2\n[between]\nbandwidth = "100Mbit/s"\nlatency_ms = 0.1\n'


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


def request(place: Path, **options: Any) -> PlanRequest:
    asked = {"cluster": place / "cluster.toml", "measure": False, "input": "3x16x16", "classes": 10, **options}
    return PlanRequest(**{"model": "examples.user_model:small_net", **asked})


def test_the_command_explains_and_writes_a_plan_that_it_can_make_again(place, capsys):
    out = place / "plan.json"
    assert run_plan(request(place, batch_size=8, fidelity="lossy", output=out)) == 0
    told = capsys.readouterr().out
    for part in ("fidelity lossy", "chosen", "exposed sync", "what would help", "numbers of workers", str(out)):
        assert part in told
    plan = read_plan(out)
    assert plan.model.name == "examples.user_model:small_net"
    assert plan.inputs is not None

    again = place / "again.json"
    recorded = {"inputs": out, "classes": 1000}  # which is the default, so not given
    assert run_plan(request(place, cluster=None, output=again, **recorded)) == 0
    assert again.read_text() == out.read_text(), "the fidelity too is that of the recorded inputs"

    (place / "cluster.toml").write_text(CLUSTER.replace("count = 2", "count = 3"))
    assert run_plan(request(place, output=again, fidelity="exact", **recorded)) == 0
    told = capsys.readouterr().out
    assert "3 workers" in told
    assert "fidelity exact" in told, "what is named wins"
    with pytest.raises(PlanError, match="not of resnet18"):
        run_plan(replace(request(place, **recorded), model="resnet18"))
    with pytest.raises(PlanError, match="for inputs of 3x16x16, not 3x32x32"):
        run_plan(request(place, **{**recorded, "input": "3x32x32"}))
    with pytest.raises(PlanError, match=r"no plan fits into 0\.1 MB"):
        run_plan(request(place, cluster=None, memory="100kB", **recorded))


def test_what_a_run_recorded_is_planned_again_for_any_number_of_workers(place, capsys):
    out = place / "plan.json"
    assert run_plan(request(place, batch_size=8, output=out)) == 0
    plan = read_plan(out)
    assert plan.inputs is not None
    # A run uses all workers of its job, and records that this was decided.
    plan.model_copy(update={"inputs": {**plan.inputs, "fixed": {"workers": 2}}}).save(out)
    capsys.readouterr()
    recorded = PlanRequest(inputs=out)  # the plan names its model
    recorded.check()
    assert run_plan(recorded) == 0
    curve = capsys.readouterr().out.partition("numbers of workers")[2].splitlines()
    assert [line.split()[0] for line in curve[2:4]] == ["1", "2"]
    for count in (1, 3):
        (place / "cluster.toml").write_text(CLUSTER.replace("count = 2", f"count = {count}"))
        with pytest.raises(HybridparError, match="No space left"):  # the report is printed all the same
            run_plan(request(place, inputs=out, classes=1000, output=Path("/dev/full")))
        assert f"{count} workers" in capsys.readouterr().out


def test_what_is_decided_and_leaves_no_plan_is_said():
    with pytest.raises(PlanError, match=r"leaves no plan for 2 worker\(s\): workers 3"):
        find_plan(inputs(spec=cluster(2), fixed=Fixed(workers=3)))


def test_numbers_of_workers_are_compared_at_one_result_of_batch_norm():
    net = chain([(20, 40)] * 2, [(64, 64)] * 2, 2_000_000, samples=4, batch_norm=True)
    asked = inputs(net, cluster(6, 1e10, memory="100MB"), batch=24, most_stages=2, most_micro_batches=8)
    answer, points = find_plan(asked), scaling_curve(asked)
    assert points[-1].step_ms == answer.fastest.score
    steps = [point.step_ms for point in points]
    assert None not in steps, "one worker takes small micro-batches too, and so they fit"
    assert steps == sorted(steps, reverse=True), "more workers are never slower: those that do not help are left out"
    lines = curve_lines(points)
    assert any("BatchNorm: all of these normalise over 1/6 of the batch" in line for line in lines)
    (another,) = [line for line in what_ifs(asked, answer) if line.startswith("another host: ")]
    assert "gains" in another, "a worker that is of no use is left out"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"workers": 2}, "--workers is 2"),
        ({"cluster": None, "workers": 0}, "--workers is 0"),
        ({"inputs": Path("plan.json"), "batch_size": 8}, "--inputs with --batch-size"),
    ],
)
def test_contradictions_are_found_before_anything_is_measured(place, options, told):
    with pytest.raises(UsageError) as caught:
        request(place, **options).check()
    assert told in caught.value.what
    assert caught.value.fix


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
    points = scaling_curve(asked)
    assert [point.workers for point in points] == [1 << power for power in range(13)]
    best = [point.step_ms for point in points]
    assert best[0] > best[3] > best[-1]
    assert str(plan_of(answer).layout.replicas) in "\n".join(curve_lines(points))
