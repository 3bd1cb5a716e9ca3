"""A run without options searches for its plan, follows it, keeps it, and is held against what it predicted."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from hybridpar import Trainer, partition_model
from hybridpar.comm.world import World
from hybridpar.compress import read_policy
from hybridpar.config import TrainConfig
from hybridpar.errors import PlanError, UsageError
from hybridpar.machine.cluster_file import ClusterSpec
from hybridpar.observe.metrics import read_metrics
from hybridpar.plan import Compute, Pipeline, Plan, Stage, StepFigures, Sync, read_plan
from hybridpar.planner import decide, probes, trials
from hybridpar.planner.fixed import Fixed, decided_options, fixed_by, not_modelled
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.record import plan_of
from hybridpar.planner.resolve import join_workers, resolve
from hybridpar.planner.search import find_plan
from hybridpar.planner.ways import Way, Worth
from hybridpar.run.reporting import wire_format_lines
from hybridpar.sync.figures import LayerBytes, WireFormat
from tests.planner.small import chain, cluster, inputs
from tests.ranks import run_ranks
from tests.runs import check_run, saved_state, train, train_rank
from tests.small_nets import plain

#: Modules that ask on which host they are.
IDENTIFIED = ("comm.world", "compress.nodes", "run.kernel_use")
IDENTIFIED += tuple(f"planner.{name}" for name in ("links", "probes", "rates"))
#: What was predicted, by the keys of the summary.
PREDICTED = ("step_ms", "compute_ms", "exposed_sync_ms", "bubble", "bytes_sent_per_step", "memory_bytes")


@contextmanager
def always_planned(noise: float = math.inf) -> Iterator[None]:
    """Runs of tests are far too short to be worth a plan.

    Measurements are kept up to a noise: of any, by default.
    """
    stored = mock.patch.object(trials, "MOST_NOISE", noise)
    with mock.patch.object(probes, "LEAST_STEPS", 1), mock.patch.object(probes, "WORTH", 1e9), stored:
        yield


@contextmanager
def never_searched() -> Iterator[None]:
    with mock.patch.object(decide, "find_plan", side_effect=AssertionError("searched")):
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "cache"))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def planned(run_dir: Path, model: str = "plain", **options) -> Plan:
    with always_planned():
        assert train(run_dir, model, **options) == 0
    return read_plan(run_dir / "plan.json")


@pytest.fixture(scope="module")
def first_plan(tmp_path_factory) -> Path:
    """The plan's file of a run that several tests follow."""
    place = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDPAR_CACHE", str(place / "cache"))
        planned(place, steps=3)
    return place / "plan.json"


# ------------------------------------------------------------------------------------------------- alone


def test_a_run_is_planned_kept_and_held_against_its_prediction(tmp_path, capsys):
    plan = planned(tmp_path / "run", steps=6)
    shown = capsys.readouterr().out
    assert "planning took" in shown
    summary = check_run(tmp_path / "run", steps=6)
    assert plan.inputs is not None
    assert plan.predicted is not None
    for key in PREDICTED:
        assert summary[f"predicted_{key}"] is not None, key
    assert summary["predicted_step_ms"] == plan.predicted.step_ms
    busy = summary["step_ms_median"] - summary["data_ms"]
    assert "predicted" in shown
    assert f"{busy:.2f} ms" in shown
    apart = abs(busy / plan.predicted.step_ms - 1) > 0.15
    assert (summary["prediction_warning"] is not None) >= apart


def test_the_next_run_measures_nothing(tmp_path, capsys):
    first = planned(tmp_path / "one", steps=3)
    with mock.patch.object(probes, "profile_model", side_effect=AssertionError("measured")):
        second = planned(tmp_path / "two", steps=3)
    assert "planning took" in capsys.readouterr().out
    assert first.inputs == second.inputs
    assert first.predicted == second.predicted


def test_a_short_run_is_not_planned_and_is_as_without_a_planner(tmp_path, capsys):
    with never_searched():
        train(tmp_path / "auto", steps=4)
        train(tmp_path / "none", steps=4, plan="none")
    auto, none = saved_state(tmp_path / "auto"), saved_state(tmp_path / "none")
    assert all(torch.equal(value, none[name]) for name, value in auto.items())
    summary = check_run(tmp_path / "auto", steps=4)
    assert {summary[f"predicted_{key}"] for key in PREDICTED} == {None}
    assert summary["prediction_warning"] is None
    said = "plan     none: a run of 4 steps is over before planning pays, which is from 100 on"
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan  ")] == [said]


def test_measuring_that_takes_longer_than_it_can_gain_is_left(tmp_path, capsys):
    with mock.patch.object(probes, "LEAST_STEPS", 1), never_searched():
        train(tmp_path / "run", steps=4)
    assert "more than half of 4 steps" in capsys.readouterr().out
    assert read_plan(tmp_path / "run" / "plan.json").inputs is None


def test_a_model_that_cannot_be_measured_is_trained_all_the_same(tmp_path, capsys):
    def fail(*given, **options):
        raise RuntimeError("no such layer")

    with mock.patch.object(probes, "profile_model", fail):
        planned(tmp_path / "run", steps=3)
    assert "plan     none: RuntimeError: no such layer" in capsys.readouterr().out
    check_run(tmp_path / "run", steps=3)


def test_options_that_nothing_predicts_are_obeyed_and_not_planned(tmp_path, capsys):
    with never_searched():
        planned(tmp_path / "run", steps=3, stages=2, micro_batches=2, recompute=(0,))
    assert "no prediction knows --recompute" in capsys.readouterr().out
    assert not_modelled(TrainConfig(recompute=(0,))) == "--recompute"
    assert not_modelled(TrainConfig()) == ""


# ------------------------------------------------------------------------------------------------- what is decided


def test_every_option_that_was_set_is_fixed():
    names = ["a.weight", "b.weight"]
    config = TrainConfig(stages=2, replicas=1, micro_batches=4, schedule="gpipe", placement="loop", compress="fp16")
    fixed = fixed_by(config, decided_options(config), 2, names)
    assert fixed == Fixed(2, 2, 1, 4, "gpipe", "loop", dict.fromkeys(names, "fp16"), every_step=True)
    assert fixed_by(TrainConfig(), decided_options(TrainConfig()), 2, names) == Fixed(workers=2)
    given = TrainConfig(given=frozenset({"stages", "micro_batches", "memory_format", "kernels", "compress"}))
    assert fixed_by(given, decided_options(given), 2, names) == Fixed(
        workers=2, stages=1, micro_batches=1, codecs={}, every_step=True
    )
    named = frozenset({"compress", "memory_format"})
    auto = TrainConfig(compress="auto", memory_format="auto", fidelity="lossy", given=named)
    assert decided_options(auto) == {"fidelity"}, "auto leaves it to the search"
    timed = replace(TrainConfig(), timeline=Path("trace.json"))
    assert fixed_by(timed, decided_options(timed), 2, names).equal
    rules = TrainConfig(compress="a.* -> fp16")
    assert fixed_by(rules, decided_options(rules), 2, names).codecs == {"a.weight": "fp16"}


def whole_plan() -> Plan:
    """A plan that says something of everything."""
    return Plan.model_validate(
        {
            "version": 2,
            "model": {"name": "plain", "fingerprint": "0" * 16, "parameters": 10},
            "partition": {"stages": [{"units": ["a"]}, {"units": ["b"]}]},
            "placement": {"layout": ["0,2", "1,3"]},
            "pipeline": {"schedule": "gpipe", "micro_batches": 4, "recompute": [0]},
            "sync": {
                "bucket_bytes": 1 << 20,
                "policy": [{"pattern": "a.*", "codec": "fp16"}, {"pattern": "*", "codec": "none"}],
            },
            "compute": {"kernels": "auto", "memory_format": "channels_last", "amp": "bf16", "threads": 3},
        }
    )


def test_a_plan_says_everything_that_nobody_decided():
    plan = whole_plan()
    followed = resolve(TrainConfig(plan=Path("p.json")), 4, plan, frozenset())
    assert followed.placement == plan.placement
    assert followed.pipeline == plan.pipeline
    assert followed.sync == plan.sync
    assert followed.sync.codec == "a.* -> fp16; * -> none"
    assert followed.channels_last
    assert followed.compute == plan.compute
    assert followed.checksum == plan.digest
    mine = {"micro_batches", "compress", "memory_format", "kernels", "replicas"}
    kept = resolve(TrainConfig(micro_batches=8, memory_format="contiguous"), 4, plan, mine)
    assert (kept.pipeline.micro_batches, kept.sync.codec, kept.channels_last) == (8, "none", False)
    assert (kept.compute.kernels, kept.compute.amp, kept.compute.threads) == ("off", "bf16", 3)
    assert (kept.layout.replicas, kept.sync.bucket_bytes) == (2, 1 << 20)
    with pytest.raises(UsageError, match="--stages 1 with a plan of 2 stages"):
        resolve(TrainConfig(), 4, plan, {"stages"})
    with pytest.raises(UsageError, match="--stages 3 with a plan of 2 stages"):
        resolve(TrainConfig(stages=3), 4, plan, {"stages"})


def test_workers_join_by_what_a_plans_file_says_of_the_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(World, "join", lambda **how: how)
    whole_plan().save(tmp_path / "plan.json")
    asked = TrainConfig(plan=tmp_path / "plan.json", batch_norm="sync")
    assert join_workers(asked) == {"lanes": 3, "timeout": 120.0, "device": None}
    assert join_workers(TrainConfig(plan=tmp_path / "missing.json"))["lanes"] == 2


# ------------------------------------------------------------------------------------------------- what was asked for

#: Options that act on what replicas exchange, and on stages.
ON_REPLICAS = [{"compress": "fp16"}, {"sync": "local:2"}, {"sync": "allreduce:late=half"}, {"batch_norm": "sync"}]
ON_REPLICAS += [{"shares": "auto"}, {"sync": "onebit-sgd"}]
ON_STAGES = [{"schedule": "gpipe"}, {"placement": "loop"}, {"recompute": (0,)}]


@pytest.mark.parametrize("options", [*ON_REPLICAS, *ON_STAGES])
def test_only_plans_in_which_a_named_option_has_an_effect_are_open(options):
    (option,) = options
    config, names = TrainConfig(**options), ["a.weight"]
    fixed = fixed_by(config, {option}, 2, names, {option})
    assert (fixed.exchanged, fixed.staged) == (options in ON_REPLICAS, options in ON_STAGES)
    fixed = fixed_by(config, {option}, 2, names)
    assert (fixed.exchanged, fixed.staged) == (False, False), "of a loop of one's own nothing else can be chosen"


@pytest.mark.parametrize("options", [*ON_REPLICAS, *ON_STAGES])
def test_an_option_that_would_have_no_effect_is_refused_before_the_run(tmp_path, options):
    # One worker has nobody to exchange with, whatever is planned; lanes may hold stages, where a run is long enough.
    planning = always_planned() if options in ON_REPLICAS else contextlib.nullcontext()
    with never_searched(), planning, pytest.raises(UsageError) as caught:
        train(tmp_path / "run", steps=3, **options)
    said = "has no effect with one replica on 1 worker(s)" if options in ON_REPLICAS else "without stages has no effect"
    assert said in caught.value.what
    assert "--nproc 2" in caught.value.fix or "--stages 2" in caught.value.fix
    assert not (tmp_path / "run").exists()


def test_a_codec_that_fits_no_layer_is_told_and_not_named():
    row = LayerBytes("fc.weight", "linear", 100, "none", 400, 400)
    wire_format = WireFormat(read_policy("hylo"), [row])
    assert str(wire_format.applied) == "none"
    assert wire_format_lines(wire_format, None) == [
        "warning: --compress hylo changes nothing: it fits no layer of this model"
    ]
    sent = WireFormat(read_policy("hylo"), [row, replace(row, codec="hylo", bytes_after=50)])
    assert str(sent.applied) == "hylo"
    assert wire_format_lines(sent, None)[0].startswith("codec    hylo: ")


# ------------------------------------------------------------------------------------------------- files and resuming


def test_a_plans_file_is_followed_and_predicts_again(tmp_path, capsys):
    plan = planned(tmp_path / "one", steps=3, memory_format="channels_last")
    assert plan.inputs is not None
    assert plan.measured is not None
    assert plan.inputs["fixed"] == {"workers": 1}, "what was decided stays"
    assert plan.compute is not None
    assert plan.compute.memory_format == "channels_last"
    assert plan.measured.memory_format == "channels_last"
    with never_searched():
        train(tmp_path / "two", steps=3, plan=tmp_path / "one" / "plan.json")
    again = read_plan(tmp_path / "two" / "plan.json")
    assert again.predicted == plan.predicted
    assert again.inputs == plan.inputs
    assert "plan     from" in capsys.readouterr().out
    summary = check_run(tmp_path / "two")
    assert plan.predicted is not None
    assert summary["predicted_step_ms"] == plan.predicted.step_ms


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 8}, "a batch of 16, not 8"),
        ({"optimizer": "sgd:momentum=0"}, "an optimizer with 1 tensors per parameter, not 0"),
    ],
)
def test_the_prediction_of_a_plan_for_other_steps_does_not_count(tmp_path, first_plan, capsys, options, told):
    train(tmp_path / "two", steps=3, plan=first_plan, **options)
    assert f"which was made for {told}: its prediction does not hold here" in capsys.readouterr().out.replace("\n", " ")
    summary = check_run(tmp_path / "two")
    assert (summary["predicted_step_ms"], summary["prediction_warning"]) == (None, None)
    assert read_plan(tmp_path / "two" / "plan.json").inputs is None, "nothing later is corrected by it"


def test_a_plan_made_elsewhere_is_one_error(tmp_path, first_plan):
    plan = read_plan(first_plan)
    assert plan.inputs is not None
    inputs = json.loads(json.dumps(plan.inputs))
    inputs["cluster"]["hosts"][0]["name"] = "Another CPU"
    plan.model_copy(update={"inputs": inputs}).save(tmp_path / "elsewhere.json")
    with pytest.raises(PlanError) as caught:
        train(tmp_path / "two", steps=3, plan=tmp_path / "elsewhere.json")
    assert "hosts.0.name is Another CPU there and" in caught.value.what
    assert "--plan auto" in caught.value.fix
    with pytest.raises(PlanError, match="made for another model"):
        train(tmp_path / "two", "wide", steps=3, plan=first_plan)
    assert not (tmp_path / "two").exists()


def test_a_resumed_run_goes_on_by_its_plan(tmp_path, capsys):
    plan = planned(tmp_path / "run", steps=4, epochs=2)
    with never_searched(), always_planned():
        train(tmp_path / "run", steps=8, epochs=2, resume=True)
    assert "as the run began with, not searched for again" in capsys.readouterr().out
    again = read_plan(tmp_path / "run" / "plan.json")
    assert (again.inputs, again.predicted) == (plan.inputs, plan.predicted)
    check_run(tmp_path / "run", steps=8)


def test_a_run_that_followed_a_file_without_a_prediction_goes_on_by_it(tmp_path, capsys):
    plan = planned(tmp_path / "one", steps=3, memory_format="channels_last")
    plan.model_copy(update={"inputs": None, "predicted": None}).save(tmp_path / "plan.json")
    train(tmp_path / "run", steps=4, epochs=2, plan=tmp_path / "plan.json")
    for steps, options in ((6, {"micro_batches": 2}), (8, {})):
        capsys.readouterr()
        with never_searched(), always_planned():
            train(tmp_path / "run", steps=steps, epochs=2, resume=True, **options)
        assert "plan     as the run began with" in capsys.readouterr().out
        again = read_plan(tmp_path / "run" / "plan.json")
        assert again.measured is not None
        assert again.checksum is not None
        assert again.measured.memory_format == "channels_last"


def test_an_edited_plan_is_followed_without_its_prediction(tmp_path, first_plan, capsys):
    plan = read_plan(first_plan)
    assert plan.pipeline is not None
    assert plan.sync is not None
    for number, edit in enumerate(
        (
            {"pipeline": plan.pipeline.model_copy(update={"micro_batches": 4})},
            {"sync": plan.sync.model_copy(update={"bucket_bytes": 1 << 20})},
            {"partition": plan.partition.model_copy(update={"stages": (Stage(units=("foo",)),)})},
        )
    ):
        plan.model_copy(update=edit).save(tmp_path / "edited.json")
        train(tmp_path / f"two{number}", steps=3, plan=tmp_path / "edited.json")
        assert "which was edited: what was predicted does not hold" in capsys.readouterr().out.replace("\n", " ")
        assert check_run(tmp_path / f"two{number}")["predicted_step_ms"] is None


# ------------------------------------------------------------------------------------------------- two workers


def slower(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The same workers on links on which everything takes so many times as long."""
    levels = {name: level for name in ("inside", "between") if (level := getattr(cluster, name)) is not None}
    changed = {
        name: level.model_copy(update={"bandwidth": level.bandwidth / factor, "latency_ms": level.latency_ms * factor})
        for name, level in levels.items()
    }
    return cluster.model_copy(update=changed)


def planned_rank(world: World, run_dir: Path, cache: str, options: dict, planted: float = 1.0) -> Plan:
    """A planned run of one of several workers, on links that are said to be so many times as slow as measured.

    Links are looked at for a moment only.
    """
    os.environ["HYBRIDPAR_CACHE"] = cache
    measured = partial(probes.measure_cluster, seconds=0.002)
    with (
        always_planned(),
        mock.patch.object(probes, "measure_cluster", lambda world, **how: slower(measured(world, **how), planted)),
    ):
        train_rank(world, run_dir, "plain", None, options)
    world.barrier()  # rank 0 has more to write at the end
    return read_plan(run_dir / "plan.json")


def test_two_workers_follow_one_plan_and_a_planted_bandwidth_is_noticed(tmp_path):
    cache = str(tmp_path / "cache")
    plans = run_ranks(planned_rank, 2, tmp_path / "run", cache, {"steps": 4})
    assert plans[0] == plans[1]
    summary = check_run(tmp_path / "run", steps=4)
    assert summary["replicas"] * summary["stages"] >= 2
    assert summary["predicted_bytes_sent_per_step"] > 0
    run_ranks(planned_rank, 2, tmp_path / "slow", cache, {"steps": 4, "replicas": 2}, 1e4)
    assert "ms that were predicted" in check_run(tmp_path / "slow")["prediction_warning"]


def planned_on_hosts(world: World, run_dir: Path, cache: str, hosts: str) -> Plan:
    """Workers of made-up hosts."""
    identified = mock.Mock(return_value=hosts[world.rank])
    world.share_memory = True
    with contextlib.ExitStack() as stack:
        for module in IDENTIFIED:
            stack.enter_context(mock.patch(f"hybridpar.{module}.host_identity", identified))
        stack.enter_context(mock.patch("hybridpar.planner.links.DRIFT", 1e9))
        stack.enter_context(mock.patch.object(probes, "APART", 1e9))  # whatever else runs meanwhile
        return planned_rank(world, run_dir, cache, {"steps": 4, "batch_size": 16})


def test_two_hosts_of_two_workers_are_planned_by_default(tmp_path):
    plans = run_ranks(planned_on_hosts, 4, tmp_path / "run", str(tmp_path / "cache"), "aabb")
    assert plans[0].inputs is not None
    (hosts,) = plans[0].inputs["cluster"]["hosts"]
    assert (hosts["count"], hosts["devices"]) == (2, 2)
    check_run(tmp_path / "run", steps=4)


def test_two_workers_search_within_the_stages_that_they_were_given(tmp_path):
    options = {"steps": 4, "stages": 2, "micro_batches": 2, "schedule": "gpipe"}
    plan = run_ranks(planned_rank, 2, tmp_path / "run", str(tmp_path / "cache"), options)[0]
    assert plan.inputs is not None
    assert plan.inputs["fixed"] == {
        **{"workers": 2, "stages": 2, "micro_batches": 2, "schedule": "gpipe"},
        "staged": True,
    }
    summary = check_run(tmp_path / "run", steps=4)
    assert (summary["stages"], summary["micro_batches"], summary["schedule"]) == (2, 2, "gpipe")
    assert plan.predicted is not None
    assert (plan.predicted.bubble, plan.predicted.peak_saved_bytes) > (0, 0)


def test_two_workers_resume_by_the_plan_and_one_goes_on_without(tmp_path, capsys):
    cache = str(tmp_path / "cache")
    run_ranks(planned_rank, 2, tmp_path / "run", cache, {"steps": 4})
    with never_searched(), always_planned():
        train(tmp_path / "run", steps=8, resume=True)
    assert "the run's own plan is for 2 worker(s), and here are 1" in capsys.readouterr().out
    assert read_metrics(tmp_path / "run").steps["step"].tolist() == list(range(1, 9))
    assert read_plan(tmp_path / "run" / "plan.json").inputs is None


def shown(asked: PlannerInputs, way: Way | None = None) -> list[str]:
    answer = find_plan(asked)
    return list(decide.said(answer, answer.chosen, plan_of(answer), way, 0, 0.1))


def test_a_link_that_makes_the_second_worker_a_loss_is_told():
    lines = shown(inputs(spec=cluster(2, 1e5), fixed=Fixed(workers=2)))
    assert any("fewer would be faster" in line and "--nproc 1" in line for line in lines)
    assert not any("fewer" in line for line in shown(inputs(spec=cluster(2, 1e10), fixed=Fixed(workers=2))))


def test_a_plan_is_shown_with_the_next_best_what_it_won_and_what_it_cost():
    times = [(40, 60), (40, 60)]
    net = chain(times, [(64, 64)] * 2, batch_norm=True)
    fast = inputs(net, cluster(2, 1e10), fixed=Fixed(workers=2))
    (line,) = shown(fast)
    assert re.fullmatch(
        r"plan     data parallel over 2 devices, about 200 ms a step \(next best: 2 stages on 2 devices, "
        r"2 micro-batches, \w+, cut balanced, \+\d+ ms\)",
        line,
    )
    worths = (Worth("channels_last", 0.8, chosen=True), Worth("bf16", why_not="its loss is 3, and 2 in a plain step"))
    way = Way({"memory_format": "channels_last"}, None, (200.0, 190.0), 200.0, 250.0, worths)
    assert shown(fast, way)[1:] == [
        "         a step takes, with channels_last 0.80x, chosen",
        "         not bf16: its loss is 3, and 2 in a plain step",
        "         planning took 0.1 s; without it a step takes about 250 ms",
    ]
    alone = inputs(chain(times, [(64, 64)] * 2), cluster(1), fixed=Fixed(workers=1, stages=1, micro_batches=2))
    assert shown(alone) == ["plan     one device, 2 micro-batches, about 400 ms a step"]


# ------------------------------------------------------------------------------------------------- somebody's own loop


def test_a_loop_of_ones_own_is_planned_within_what_it_decides(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hybridpar")
    images, labels = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))
    with always_planned(), Trainer(plain(), config=TrainConfig(), total_steps=200, example=images) as trainer:
        assert trainer.config == TrainConfig()
        assert (trainer.plan.is_staged, trainer.plan.pipeline.micro_batches) == (False, 1)
        assert trainer.plan.inputs is not None
        assert isinstance(trainer.plan.predicted, StepFigures)
        trainer.step((images, labels))
    assert "a step takes, with channels_last" in caplog.text
    assert "plan.json" not in caplog.text
    with never_searched(), Trainer(plain(), config=TrainConfig(), total_steps=20, example=images) as trainer:
        assert trainer.plan.checksum is None
        assert trainer.plan.predicted is None


def test_a_plan_as_an_object_is_followed_as_its_file_is(tmp_path):
    images = torch.randn(8, 3, 8, 8)
    plan = partition_model(plain(), [images], 2).plan
    plan = plan.model_copy(
        update={
            "pipeline": Pipeline(schedule="gpipe", micro_batches=4),
            "compute": Compute(memory_format="channels_last"),
            "sync": Sync(bucket_bytes=1 << 20),
        }
    )
    plan.save(tmp_path / "plan.json")
    plans = []
    for options, given in ((TrainConfig(), plan), (TrainConfig(plan=tmp_path / "plan.json"), None)):
        with Trainer(plain(), config=options, plan=given, example=images) as trainer:
            plans.append(trainer.plan)
            assert "plan     " in trainer.planned.lines[0]
    assert plans[0] == plans[1]
    assert plans[0].pipeline.model_copy(update={"rows": ()}) == plan.pipeline
    assert (plans[0].partition, plans[0].sync, plans[0].checksum) == (plan.partition, plan.sync, plan.digest)
    assert plans[0].channels_last
    whole = partition_model(plain(), [images], 1).plan
    with Trainer(plain(), plan=whole) as trainer:
        assert not trainer.plan.is_staged
