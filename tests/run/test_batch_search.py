"""Which batch size is selected, by CNTK's procedure, what a step means when it changes, and runs in which it does."""

from __future__ import annotations

import json
import math

import pytest
import torch

from hybridpar.config import OptimizerConfig
from hybridpar.formats.checkpoint_files import list_checkpoints
from hybridpar.observe.metrics import read_metrics
from hybridpar.optim.schedule import Leg, Pace, rate_factor
from hybridpar.run import batch_search
from hybridpar.run.batch_search import search_batch_size
from tests.ranks import run_ranks
from tests.runs import assert_same_state, saved_state, train, train_rank


def search(losses: dict[int, float], **options) -> tuple[int, list[int]]:
    """The size that is chosen, and those that are tried, where larger sizes have the loss of the last that is given."""
    chosen, seen = search_batch_size(
        lambda size: losses.get(size, losses[max(losses)]), min(losses), **{"largest": 1 << 20, **options}
    )
    return chosen, list(seen)


def test_sizes_grow_by_the_root_of_two_in_multiples():
    assert search({256: 1.0}, largest=2048) == (1472, [256, 384, 512, 704, 1024, 1472])


@pytest.mark.parametrize(
    ("losses", "options", "chosen"),
    [
        ({256: 1.0, 384: 1.009, 512: 1.02, 704: 0.5}, {}, 384),
        ({256: 1.0, 384: 1.009, 512: 1.02, 704: 3.0}, {"margin": 0.05}, 512),
        ({256: 1.0, 384: 0.5, 512: 0.9, 704: 2.0}, {}, 512),  # the first size sets the loss to compare with
        ({256: 1.0, 384: math.nan, 512: 0.1}, {}, 256),
        ({256: 1.0, 384: math.inf, 512: 0.1}, {}, 256),
        ({256: math.nan, 384: 0.1}, {}, 256),
    ],
)
def test_the_last_size_that_is_as_good_is_chosen(losses, options, chosen):
    assert search(losses, **options)[0] == chosen


CONFIG = OptimizerConfig(lr=0.1, lr_schedule="cosine:warmup=1")


def test_one_batch_size_is_the_usual_schedule():
    pace = Pace(4, [Leg(0, 0, 64, 10)])
    for step in range(40):
        assert pace.factor(step, CONFIG) == rate_factor(step, 40, 10, CONFIG)
    assert pace.total_steps() == 40


def test_rates_follow_samples():
    pace = Pace(4, [Leg(0, 0, 64, 10)])
    pace.begin(Leg(20, 2, 128, 5))
    assert pace.total_steps() == 30
    assert pace.samples == 2
    for step in range(10):
        # A step of twice the samples is two of the old, at the rate that the first of these would have had.
        assert pace.factor(20 + step, CONFIG) == pytest.approx(2 * rate_factor(20 + 2 * step, 40, 10, CONFIG))
    assert pace.factor(19, CONFIG) == rate_factor(19, 40, 10, CONFIG)
    again = Pace.of(4, pace.plain())
    assert again == pace
    pace.begin(Leg(20, 2, 96, 7))
    assert pace.legs == [Leg(0, 0, 64, 10), Leg(20, 2, 96, 7)]


# ------------------------------------------------------------------------------------------------------------- runs

#: Twelve steps an epoch of batches of 8.
SEARCHING = {"batch_size": 8, "epochs": 3, "checkpoints": "epoch,keep=9", "lr": 0.02}


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.parametrize("stages", [1, 2])
def test_trials_leave_no_trace(stages, tmp_path, monkeypatch):
    """Dropout, BatchNorm, momentum and the order of samples are as if nothing had been tried."""
    tried = []

    def search(trial, smallest, largest, **options):
        losses = [trial(size) for size in (8, 16, 8)]
        assert losses[0] == losses[2], "a trial depends on the one before"
        tried.append((smallest, largest))
        return 8, {8: losses[0]}

    monkeypatch.setattr(batch_search, "search_batch_size", search)
    train(tmp_path / "searched", "dropping", select_batch=1, stages=stages, **SEARCHING)
    train(tmp_path / "plain", "dropping", stages=stages, **SEARCHING)
    assert tried == [(8, 16), (8, 16)]
    assert_same_state(tmp_path / "searched", tmp_path / "plain")


def test_a_larger_batch_is_fewer_steps_at_a_higher_rate(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(batch_search, "search_batch_size", lambda *_, **__: (16, {16: 1.0}))
    train(tmp_path / "run", select_batch=1, **{**SEARCHING, "lr_schedule": "constant:warmup=0"})
    summary = summary_of(tmp_path / "run")
    assert (summary["batch_size"], summary["final_batch_size"], summary["epochs"]) == (8, 16, 3)
    steps = read_metrics(tmp_path / "run").steps
    assert steps["samples"].tolist() == [8] * 12 + [16] * 12
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines.index("trying batch sizes ...") == lines.index("batch size 16 from epoch 2 on (loss at 16: 1.0000)") - 1
    )
    assert steps["lr"].tolist() == pytest.approx([0.02] * 12 + [0.04] * 12)


def test_a_resumed_run_goes_on_with_what_was_selected(tmp_path):
    options = {**SEARCHING, "select_batch": 1}
    train(tmp_path / "run", **options)
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    for step in steps[:2]:
        start = tmp_path / "run" / "checkpoints" / f"step-{step}"
        train(tmp_path / f"from-{step}", resume_from=start, **options)
        assert_same_state(tmp_path / "run", tmp_path / f"from-{step}")
        assert (
            summary_of(tmp_path / f"from-{step}")["final_batch_size"]
            == summary_of(tmp_path / "run")["final_batch_size"]
        )


def test_a_search_may_begin_where_a_run_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_search, "search_batch_size", lambda *_, **__: (16, {16: 1.0}))
    train(tmp_path / "plain", **{**SEARCHING, "epochs": 1})
    start = tmp_path / "plain" / "checkpoints"
    train(tmp_path / "run", resume_from=start, select_batch=1, **SEARCHING)
    assert read_metrics(tmp_path / "run").steps["samples"].tolist() == [16] * 12
    assert summary_of(tmp_path / "run")["epochs"] == 3


def test_the_whole_recipe_over_stages(tmp_path):
    """1-bit SGD as in the paper, where every replica is a pipeline; and its resumption."""
    options = {**SEARCHING, "select_batch": 1, "sync": "onebit-sgd:late=half", "tune_process": False}
    options |= {"stages": 2, "replicas": 2, "lr": 0.001, "epochs": 2}
    assert run_ranks(train_rank, 4, tmp_path / "run", "dropping", None, options, shared_memory=False) == [0] * 4
    summary = summary_of(tmp_path / "run")
    assert (summary["sync"], summary["stages"]) == ("onebit-sgd:late=half", 2)
    assert summary["final_batch_size"] > summary["batch_size"]
    assert summary["staleness"]["most"] == 1
    assert summary["compression_ratio"] > 1
    assert summary["predicted_step_ms"] is None
    options["resume_from"] = list_checkpoints(tmp_path / "run" / "checkpoints")[-2]
    assert run_ranks(train_rank, 4, tmp_path / "again", "dropping", None, options, shared_memory=False) == [0] * 4
    whole, resumed = saved_state(tmp_path / "run"), saved_state(tmp_path / "again")
    assert whole.keys() == resumed.keys()
    assert not [name for name in whole if not torch.equal(whole[name], resumed[name])]
