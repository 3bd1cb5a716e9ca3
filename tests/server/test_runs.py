"""Tests whole runs with parameter servers: their files, processes that die, and resuming in any layout."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar.errors import UsageError
from hybridpar.observe.metrics import read_metrics
from hybridpar.run.served_trainer import ServedTrainer
from hybridpar.server.serve import ShardServer
from hybridpar.train.checkpoint import load_checkpoint
from hybridpar.train.results import StepResult
from tests.ranks import run_ranks
from tests.runs import assert_same_state, check_run, saved_state, train, train_rank
from tests.server.jobs import ends, job, pids, replacement, store, train_process
from tests.waiting import eventually, saved


def run(run_dir: Path, size: int, model: str = "plain", **options):
    with store() as port:
        assert run_ranks(train_process, size, port, run_dir, model, options) == [0] * size


def parameters(run_dir: Path) -> dict[str, torch.Tensor]:
    return {name: own for name, own in saved_state(run_dir).items() if "running" not in name and "num_" not in name}


def average(run_dir: Path) -> dict[str, torch.Tensor]:
    found = load_checkpoint(run_dir).average
    assert found is not None
    return {name: own for name, own in found.items() if "running" not in name}


def test_sync_servers_train_what_an_all_reduce_trains(tmp_path):
    options = {"model_ema": "0.9,warmup"}
    options |= {"mix": "mixup=0.2,cutmix=1", "loss": "ce:smoothing=0.1"}
    assert run_ranks(train_rank, 2, tmp_path / "plain", "plain", None, {**options, "plan": "none"}) == [0, 0]
    run(tmp_path / "served", 3, sync="ps", **options)
    run(tmp_path / "masters", 2, sync="ps:servers=0", **options)
    for name, own in average(tmp_path / "plain").items():
        torch.testing.assert_close(average(tmp_path / "served")[name], own, rtol=1e-5, atol=1e-6)
        assert not torch.equal(own, saved_state(tmp_path / "plain")[name]) or "num_batches" in name
    tested = zip(*(read_metrics(tmp_path / name).epochs for name in ("plain", "served")), strict=True)
    for one, other in tested:
        assert other.ema_test_loss == pytest.approx(one.ema_test_loss, rel=0.01)
        assert other.ema_test_loss != pytest.approx(one.test_loss, rel=0.01)
    plain, served, masters = (parameters(tmp_path / name) for name in ("plain", "served", "masters"))
    assert plain.keys() == served.keys() == masters.keys()
    for name in plain:
        torch.testing.assert_close(served[name], plain[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(served[name], masters[name])
    summary = check_run(tmp_path / "served", steps=12)
    assert (summary["sync"], summary["servers"], summary["workers"]) == ("ps", 1, 2)
    assert summary["staleness"] == {"mean": 0.0, "most": 0, "histogram": {"0": 24}}
    assert summary["bytes_sent_per_step"] > 4 * 1000
    assert summary["bytes_pulled_per_step"] > 4 * 1000


def test_servers_begin_with_the_weights_that_worker_0_reads(tmp_path):
    train(tmp_path / "source")
    options = {"weights": str(tmp_path / "source"), "freeze": ("body.[01]",), "steps": 2, "checkpoints": "2"}
    options |= {"optimizer": "sgd:layer_decay=0.5,head_lr=2", "shares": "1,3"}
    run(tmp_path / "served", 3, sync="ps", **options)
    assert run_ranks(train_rank, 2, tmp_path / "plain", "plain", None, {**options, "plan": "none"}) == [0, 0]
    source, served, plain = (saved_state(tmp_path / name) for name in ("source", "served", "plain"))
    for name in ("body.0.weight", "body.1.weight", "body.1.running_mean"):
        assert torch.equal(served[name], source[name])
    for name, value in parameters(tmp_path / "plain").items():
        torch.testing.assert_close(served[name], value, rtol=1e-5, atol=1e-6)
    assert not torch.equal(plain["head.weight"], source["head.weight"])


def test_a_head_that_does_not_fit_the_classes_is_refused(tmp_path):
    with pytest.raises(UsageError, match="fixed has 1,000 outputs, and the data has 10 classes"):
        train(tmp_path / "run", "fixed", sync="ps:servers=0")
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """What a codec left out, momentum, dropout's generators and the place in the data are all in the checkpoint."""
    options = {"sync": "ps", "compress": "onebit:least=1", "lr_schedule": "plateau:patience=0,warmup=0"}
    options |= {"data": "synthetic:samples=32", "epochs": 6, "clip_grad": 1.0}  # two steps an epoch
    options |= {"model_ema": "0.9", "amp": "fp16"}
    run(tmp_path / "whole", 3, "dropping", **options)
    run(tmp_path / "halves", 3, "dropping", steps=7, **options)
    run(tmp_path / "halves", 3, "dropping", resume=True, **options)
    assert_same_state(tmp_path / "halves", tmp_path / "whole")
    for name, own in average(tmp_path / "whole").items():
        assert torch.equal(average(tmp_path / "halves")[name], own)
    summary = check_run(tmp_path / "halves", steps=12)
    assert summary["resumed_from"] == 7
    rates, norms = (read_metrics(tmp_path / "halves").steps[key] for key in ("lr", "grad_norm"))
    assert list(rates) == list(read_metrics(tmp_path / "whole").steps["lr"])
    assert min(rates[:7]) < rates[0]
    assert all(norm > 0 for norm in norms)


def run_without_servers(run_dir: Path, size: int, **options):
    assert run_ranks(train_rank, size, run_dir, "plain", None, options) == [0] * size


def test_a_shard_of_a_worker_ends_by_itself_where_nothing_is_left_to_train(tmp_path, monkeypatch):
    """And not because the worker has waited for it long enough."""
    serve, given_up = ShardServer.run, []

    def served(server: ShardServer, give_up: Callable[[], bool]) -> None:
        serve(server, give_up)
        given_up.append(give_up())

    monkeypatch.setattr(ShardServer, "run", served)
    for resume in (False, True):
        train(tmp_path / "run", sync="ps-async:servers=0", steps=4, timeout=10, resume=resume)
    assert given_up == [False, False]


def test_any_layout_resumes_any_checkpoint(tmp_path):
    """With as many workers as before each worker's own part of the checkpoint is read, with others it is not."""
    place, more = tmp_path / "run", {"resume": True}
    run(place, 3, sync="ps", steps=2)
    run_without_servers(place, 2, steps=4, **more)
    run(place, 2, sync="softsync:1,servers=0", steps=6, **more)
    run_without_servers(place, 2, sync="local:2", steps=8, **more)
    run(place, 4, sync="ps-async", steps=10, **more)
    run_without_servers(place, 2, stages=2, micro_batches=2, steps=12, **more)
    run(place, 3, sync="ps-async:servers=2", steps=14, **more)  # one worker
    assert train(place, steps=16, **more) == 0  # alone, with no servers at all
    steps = read_metrics(place).steps["step"]
    assert [int(step) for step in steps] == list(range(1, 17))


def test_a_run_that_changes_between_servers_and_all_reduce_is_one_run(tmp_path):
    """Moments and their count, the place in the data, weights, their average, loss scale and lowered rate go over."""
    options = {
        "optimizer": "timm/lamb",
        "clip_grad": 0.5,
        "lr_schedule": "plateau:patience=0,warmup=0",
        "data": "synthetic:samples=32",  # two steps an epoch
        "epochs": 3,
        "amp": "fp16",
        "model_ema": "0.9",
    }
    run_without_servers(tmp_path / "whole", 2, steps=6, **options)
    run(tmp_path / "there", 3, sync="ps", steps=3, **options)
    run_without_servers(tmp_path / "there", 2, steps=6, resume=True, **options)
    run_without_servers(tmp_path / "back", 2, steps=3, **options)
    run(tmp_path / "back", 3, sync="ps", steps=6, resume=True, **options)
    whole, no_gradient = (
        parameters(tmp_path / "whole"),
        "body.3.bias",
    )  # of BatchNorm's input: rounding, made large by LAMB
    rates = list(read_metrics(tmp_path / "whole").steps["lr"])
    assert min(rates) < max(rates)
    for place in ("there", "back"):
        assert list(read_metrics(tmp_path / place).steps["lr"]) == rates
        assert load_checkpoint(tmp_path / place).training["loss_scale"] == {"scale": 2.0**16, "steps": 6.0}
        for name, own in average(tmp_path / place).items():
            if not name.startswith(no_gradient):
                torch.testing.assert_close(own, average(tmp_path / "whole")[name], rtol=1e-5, atol=1e-6)
        for name, own in parameters(tmp_path / place).items():
            if not name.startswith(no_gradient):
                torch.testing.assert_close(own, whole[name], rtol=1e-5, atol=1e-6)


def test_an_asynchronous_run_in_figures(tmp_path):
    run(tmp_path / "run", 3, sync="ps-async:staleness=inverse,pull=fp16", checkpoints="4")
    summary = check_run(tmp_path / "run", steps=12)
    ages = summary["staleness"]
    assert sum(ages["histogram"].values()) == 24
    assert 0 <= ages["mean"] <= 1  # one other worker: (lambda - 1) / c, but for what is still on its way
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "event" not in row]
    assert all(row["staleness"] is not None and row["queued"] >= 1 for row in steps)
    assert sum(row["samples"] for row in steps) == 2 * 96


def test_a_run_that_others_end_epochs_ahead_is_tested_once(tmp_path, monkeypatch):
    """The last step of worker 0 is in the first epoch, and the next answer is that all steps are done."""
    step = ServedTrainer.step

    def steps(trainer: ServedTrainer, *given: Any, **more: Any) -> StepResult:
        result = step(trainer, *given, **more)
        while 6 <= result.step < 15:
            result = step(trainer, *given, **more)
        return result

    monkeypatch.setattr(ServedTrainer, "step", steps)
    assert train(tmp_path / "run", sync="ps-async:servers=0", steps=15) == 0
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [(line["epoch"], line["step"]) for line in lines if "event" in line] == [(2, 15)]


def test_kill_9_of_a_worker_leaves_the_others_training(tmp_path):
    with job(3, tmp_path / "run", sync="ps-async", fault="KILL@1:4", timeout=20) as answers:
        assert ends(answers, 2) == {0: 0, 2: 0}
    summary = check_run(tmp_path / "run", steps=12)
    assert summary["staleness"]["histogram"]["0"] > 10  # the last one standing has nobody to make it stale


def test_a_worker_that_died_is_replaced(tmp_path):
    options = {"sync": "ps-async", "checkpoints": "5", "epochs": 500}

    def ages() -> list[float]:
        return list(read_metrics(tmp_path / "run").steps["staleness"])

    with store() as port, job(3, tmp_path / "run", port=port, **options) as answers:
        processes = pids(answers, 3)
        eventually(lambda: saved(tmp_path / "run"))
        os.kill(processes[1], signal.SIGKILL)
        eventually(lambda: ages()[-1] == 0)  # nobody is there to make gradients stale
        alone = len(ages())
        with replacement(1, 3, port, tmp_path / "run", **options) as replaced:
            eventually(lambda: any(age > 0 for age in ages()[alone:]))
            os.kill(processes[0], signal.SIGTERM)
            assert ends(answers, 2) == {0: 143, 2: 0}
            assert ends(replaced, 1) == {1: 0}
    steps = [int(step) for step in read_metrics(tmp_path / "run").steps["step"]]
    assert steps == list(range(1, len(steps) + 1))


def test_kill_9_of_a_server_is_an_error_on_all_workers_and_the_run_resumes(tmp_path):
    options = {"sync": "ps-async:servers=1", "checkpoints": "2", "timeout": 10}
    with job(3, tmp_path / "run", **options, epochs=500) as answers:
        server = pids(answers, 3)[2]
        eventually(lambda: saved(tmp_path / "run"))
        os.kill(server, signal.SIGKILL)
        found = ends(answers, 2)
    for rank in (0, 1):
        assert re.search(r"SyncError: shard \d of \d at .* is gone", found[rank])
    step = load_checkpoint(tmp_path / "run").step
    run(tmp_path / "run", 3, **options, steps=step + 4, resume=True)
    summary = check_run(tmp_path / "run", steps=step + 4)
    assert summary["resumed_from"] == step


def test_a_signal_saves_and_ends_all_workers(tmp_path):
    with job(3, tmp_path / "run", sync="softsync:1", fault="TERM@1:3", epochs=500) as answers:
        found = ends(answers, 3)
    assert found == {0: 0, 1: 143, 2: 0}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit"] == "interrupted"
    assert load_checkpoint(tmp_path / "run").step == summary["steps"]


def test_gradients_that_are_not_finite_are_skipped_and_told(tmp_path):
    run(tmp_path / "run", 2, sync="ps-async", steps=4, fault="NAN@0:3", checkpoints="never")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["skipped_steps"] == 2
