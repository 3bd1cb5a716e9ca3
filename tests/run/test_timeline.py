"""Tests what a pipeline run writes of itself: plan, summary and timeline agree, and errors there do not end the run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from unittest import mock

import pytest

from hybridpar.config import TrainConfig
from hybridpar.errors import RunDirectoryError, UsageError
from hybridpar.machine.launch import StopRequest
from hybridpar.observe.metrics import read_metrics
from hybridpar.plan import read_plan
from hybridpar.run import run as run_module
from hybridpar.run.step_timeline import StepTimeline
from hybridpar.schedule.actions import COMPUTE, Kind
from tests.observe.test_timeline import check_events
from tests.ranks import run_ranks
from tests.runs import check_run, read_timeline, train, train_rank

PIPELINE = {"stages": 2, "micro_batches": 2, "replicas": 1}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Two lanes of one worker, six steps."""
    place = tmp_path_factory.mktemp("one")
    assert train(place / "run", steps=6, timeline=place / "trace.json", **PIPELINE) == 0
    return place


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two workers, eight steps, and sums of gradients in none of them."""
    place = tmp_path_factory.mktemp("two")
    options = {"steps": 8, "timeline": place / "trace.json", **PIPELINE}
    assert run_ranks(train_rank, 2, place / "run", "plain", None, options) == [0, 0]
    return place


@pytest.fixture
def place(request):
    return request.getfixturevalue(request.param)


both = pytest.mark.parametrize("place", ["one", "two"], indirect=True)


# ------------------------------------------------------------------------------------------------------- the timeline


@both
def test_a_timeline_shows_the_steps_after_the_first(place):
    check_events(json.loads((place / "trace.json").read_text()))
    timeline = read_timeline(place / "trace.json")
    assert timeline.steps == [4, 5, 6]
    workers = check_run(place / "run")["workers"]
    for step in timeline.steps:
        measured, predicted = timeline.at(step, predicted=False), timeline.at(step, predicted=True)
        assert [row.worker for row in measured] == [row.worker for row in predicted] == list(range(workers))
        for ran, foretold in zip(measured, predicted, strict=True):
            done = sorted(str(span.action) for span in ran.spans.spans)
            assert done == sorted(str(span.action) for span in foretold.spans.spans), "the same actions, at other times"
            assert sum(span.action.kind is Kind.STEP for span in ran.spans.spans) == 2 // workers
            assert sum(span.action.kind in COMPUTE for span in ran.spans.spans) == 8 // workers
    assert timeline.facts["model"] == "tests.small_nets:plain"
    assert timeline.facts["micro_batches"] == 2
    assert timeline.facts["clocks"] == "one for all workers"
    assert timeline.facts["prediction"] == "times of the stages alone"


def test_stages_wait_for_each_other_in_what_was_recorded(two):
    """On one clock a micro-batch leaves the first stage before it comes to the second, and its gradient later."""
    timeline = read_timeline(two / "trace.json")
    for step in timeline.steps:
        ends, starts = {}, {}
        for row in timeline.at(step, predicted=False):
            for span in row.spans.spans:
                starts[str(span.action)] = row.spans.origin + span.start_ms / 1e3
                ends[str(span.action)] = row.spans.origin + span.end_ms / 1e3
        for batch in range(2):
            assert ends[f"0F{batch}"] <= starts[f"1F{batch}"]
            assert ends[f"1B{batch}"] <= starts[f"0B{batch}"]


def test_a_model_that_is_not_cut_has_a_timeline_without_a_prediction(tmp_path):
    options = {"steps": 6, "timeline": tmp_path / "trace.json"}
    assert run_ranks(train_rank, 2, tmp_path / "run", "plain", None, options) == [0, 0]
    check_events(json.loads((tmp_path / "trace.json").read_text()))
    timeline = read_timeline(tmp_path / "trace.json")
    assert timeline.steps == [4, 5, 6]
    for row in (row for step in timeline.steps for row in timeline.at(step, predicted=False)):
        done = {"0F0", "0REPORT0", "0B0", "0SYNC0", "0REPORT1", "0DECIDE", "0STEP"}
        assert {str(span.action) for span in row.spans.spans} == done
    assert not any(row.predicted for row in timeline.rows)
    assert check_run(tmp_path / "run").get("predicted_step_ms") is None


def test_equal_replicas_that_are_placed_by_hand_have_a_timeline(tmp_path):
    options = {"steps": 6, "timeline": tmp_path / "trace.json", "stages": 2, "placement": "0,0;1,1"}
    assert run_ranks(train_rank, 2, tmp_path / "run", "plain", None, options) == [0, 0]
    timeline = read_timeline(tmp_path / "trace.json")
    assert [row.worker for row in timeline.at(6, predicted=False)] == [0, 1]
    assert [row.worker for row in timeline.at(6, predicted=True)] == [0], "of the first replica"


class StopsBeforeStep4(StopRequest):
    """A signal that comes when the fourth step is about to begin."""

    asked = 0

    @property
    def wanted(self):
        type(self).asked += 1
        self.signal = signal.SIGTERM if self.asked >= 4 else None
        return self.signal is not None


def test_a_run_that_is_stopped_shows_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "StopRequest", StopsBeforeStep4)
    assert train(tmp_path / "run", timeline=tmp_path / "trace.json", **PIPELINE) == 143
    summary = check_run(tmp_path / "run", ended="interrupted")
    assert 4 <= summary["steps"] < 6
    assert read_timeline(tmp_path / "trace.json").steps == list(range(4, summary["steps"] + 1))


# --------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("timeline", "said"),
    [(Path("nowhere/trace.json"), ["no directory", "mkdir -p"]), (Path(), ["is a directory", "Name a file"])],
)
def test_a_timeline_that_cannot_be_written_is_refused(tmp_path, monkeypatch, timeline, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        train(tmp_path / "run", timeline=timeline, **PIPELINE)
    assert all(part in str(caught.value) for part in (f"--timeline {timeline}", *said))
    assert not (tmp_path / "run").exists()


def test_several_devices_of_one_worker_have_no_timeline(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    run = mock.Mock(config=TrainConfig(timeline=Path("trace.json")))
    run.world.configure_mock(**{"size": 1, "device.type": "cuda", "from_main": lambda decide: decide()})
    with pytest.raises(UsageError, match=r"with 4 GPUs[\s\S]*--nproc 4[\s\S]*Nsight"):
        StepTimeline(run)


def test_a_full_disk_does_not_lose_the_run(tmp_path, monkeypatch, capsys):
    def full(path, timeline):
        raise RunDirectoryError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("hybridpar.observe.timeline.write_timeline", full)
    assert train(tmp_path / "run", steps=6, timeline=tmp_path / "trace.json", **PIPELINE) == 0
    check_run(tmp_path / "run", steps=6)
    shown = capsys.readouterr().out
    assert sum(line.startswith("warning: there is no timeline") for line in shown.splitlines()) == 1
    assert "there is no timeline: cannot write" in shown.splitlines()[-1]


# ------------------------------------------------------------------------------------------------ plan and summary


@both
def test_the_plan_of_a_run_is_what_it_did(place):
    plan, summary = read_plan(place / "run" / "plan.json"), check_run(place / "run")
    assert [bool(stage.units) for stage in plan.partition.stages] == [True, True]
    assert plan.layout.texts() == (("0,0.1",) if summary["workers"] == 1 else ("0,1",))
    assert (plan.pipeline.schedule, plan.pipeline.micro_batches) == ("greedy", 2)
    assert plan.measured.profile == "measured"
    assert plan.measured.seed == 0
    assert plan.predicted is None
    assert summary["predicted_step_ms"] is None, "only a search predicts"


def test_another_run_follows_the_plan(one, tmp_path):
    train(tmp_path / "run", steps=6, micro_batches=2, plan=one / "run" / "plan.json")
    first, again = read_plan(one / "run" / "plan.json"), read_plan(tmp_path / "run" / "plan.json")
    assert again.partition == first.partition
    assert again.placement == first.placement
    losses = [read_metrics(place / "run").steps["loss"].tolist() for place in (one, tmp_path)]
    assert losses[0] == losses[1]
