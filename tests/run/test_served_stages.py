"""Tests runs whose replicas are pipelines and meet at parameter servers, each stage's at shards of its own."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.run.served_run import join_replica
from hybridpar.run.served_stages import Replica
from hybridpar.server.place import Place
from tests.ranks import run_ranks
from tests.runs import assert_same_state, check_run, saved_state, train, train_rank
from tests.server.jobs import ends, job, pids, store, train_process
from tests.waiting import eventually, saved

STAGES = {"stages": 2, "micro_batches": 2}


def run(run_dir, size, **options):
    with store() as port:
        given = (port, run_dir, "dropping", {**STAGES, **options})
        assert run_ranks(train_process, size, *given) == [0] * size


def run_without_servers(run_dir, size, **options):
    assert run_ranks(train_rank, size, run_dir, "dropping", None, {**STAGES, "plan": "none", **options}) == [0] * size


def test_one_replica_over_a_server_is_the_pipeline(tmp_path):
    """To the bit, with running statistics of BatchNorm, momentum and dropout."""
    run_without_servers(tmp_path / "plain", 2, steps=3)
    run(tmp_path / "served", 3, sync="ps", steps=3)
    assert_same_state(tmp_path / "served", tmp_path / "plain")
    summary = check_run(tmp_path / "served", steps=3)
    assert (summary["stages"], summary["replicas"], summary["workers"], summary["servers"]) == (2, 1, 2, 1)
    assert summary["bytes_pulled_per_step"] < 4 * 2122  # a worker is given its own stage's weights


def test_replicas_of_a_pipeline_train_what_an_all_reduce_trains(tmp_path):
    run_without_servers(tmp_path / "plain", 4, steps=7)
    run(tmp_path / "served", 4, sync="ps", servers=0, steps=7)
    plain, served = (saved_state(tmp_path / name) for name in ("plain", "served"))
    assert plain.keys() == served.keys()
    for name, own in plain.items():
        if "running_var" not in name:  # servers keep the mean of the replicas'
            torch.testing.assert_close(served[name], own, rtol=1e-5, atol=1e-6)
    summary = check_run(tmp_path / "served", steps=7)
    assert summary["staleness"] == {"mean": 0.0, "most": 0, "histogram": {"0": 14}}


def test_a_resumed_pipeline_over_servers_equals_an_uninterrupted_one(tmp_path):
    options = {"sync": "ps", "servers": 0, "compress": "onebit:least=1", "lr_schedule": "constant"}
    options |= {"warmup_epochs": 0.0, "synthetic_samples": 32, "epochs": 3}  # two steps an epoch
    run(tmp_path / "whole", 4, steps=5, **options)
    run(tmp_path / "halves", 4, steps=3, **options)
    run(tmp_path / "halves", 4, steps=5, resume=True, **options)
    assert_same_state(tmp_path / "halves", tmp_path / "whole")


def test_replicas_of_a_pipeline_that_do_not_wait_for_each_other(tmp_path):
    run(tmp_path / "run", 4, sync="ps-async", servers=0, max_staleness=1, checkpoint_every="2", steps=6)
    summary = check_run(tmp_path / "run", steps=6)
    assert sum(summary["staleness"]["histogram"].values()) == 12  # one gradient of a replica, not of a worker
    assert train(tmp_path / "run", "dropping", steps=7, resume=True, sync="allreduce", servers=None, stages=1) == 0


def test_kill_9_of_a_worker_is_an_error_on_all_that_wait_for_it(tmp_path):
    """Of its replica, whose stages wait for it, and of the server."""
    options = {"sync": "ps", "epochs": 500, "checkpoint_every": "2", "timeout": 20, **STAGES}
    with job(3, tmp_path / "run", model="plain", **options) as answers:
        started = pids(answers, 3)
        eventually(lambda: saved(tmp_path / "run"))
        os.kill(started[1], signal.SIGKILL)
        found = ends(answers, 2)
    assert found.keys() == {0, 2}
    assert all(str(said).startswith("SyncError") for said in found.values())


def test_what_clips_by_the_norm_of_all_stages_is_refused(tmp_path):
    with pytest.raises(UsageError, match="timm/lamb, which clips by the norm of all gradients"):
        train(tmp_path / "run", sync="ps", servers=0, optimizer="timm/lamb", **STAGES)


def test_server_processes_beside_stages_on_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("hybridpar.run.served_run.default_device", lambda: torch.device("cuda"))
    config = TrainConfig(sync="ps", stages=2, servers=2)
    with pytest.raises(UsageError, match="--servers 2 with --stages on GPUs"):
        join_replica(config, Place(0, 4, 2, None, "token"), ExitStack())


def test_the_workers_of_all_replicas_meet_at_the_shard_of_the_first_stage(monkeypatch):
    said = {0: ["a0", "a1"], 2: ["c0", "c1"]}  # the second of three replicas is gone
    monkeypatch.setattr(
        "hybridpar.run.served_stages.exchange", lambda link, tag, mine: ([*said], [*said.values()]) if mine else None
    )
    world = SimpleNamespace(gather=lambda item: said[0], from_main=lambda decide: decide())
    replica = Replica(Place(0, 6, 1, None, "token", positions=2), world, nn.Linear(1, 1))
    met = replica.meet(SimpleNamespace(links=[None]), "test/0", "a0")
    assert met == ([0, 2, 3, 5], ["a0", "c0", "a1", "c1"])
