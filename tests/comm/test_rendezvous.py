"""Workers meet again and again in one program, on interfaces that reach each other, and find out who is missing."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hybridpar import TrainConfig, Trainer
from hybridpar.comm import rendezvous
from hybridpar.comm.rendezvous import RollCall, WorkerAddress, address_towards, interface_of, reachable_address
from hybridpar.errors import HybridparError, LaunchError, UsageError
from hybridpar.machine.launch import VERDICT_VARIABLE, record_failure

ROOT = Path(__file__).parents[2]


def new_trainer() -> Trainer:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    return Trainer(model, config=TrainConfig(plan="none", timeout=30))


def step(trainer: Trainer) -> bool:
    return trainer.step((torch.randn(4, 3, 2, 2), torch.arange(4))).loss > 0


def several_trainers() -> list[str]:
    """One program of a job of two: what became of each of its trainers, as this worker saw it."""
    rank, seen = int(os.environ["RANK"]), []

    def train(name: str, fails_on: int | None = None) -> None:
        try:
            with new_trainer() as trainer:
                step(trainer)
                if rank == fails_on:
                    if name == "fewer batches":
                        return
                    if name == "failing":
                        raise KeyError(name)
                    for _ in range(2):  # an error that the loop takes for that of a sample
                        with pytest.raises((IndexError, HybridparError)) as caught:
                            trainer.step((torch.randn(4, 3, 2, 2), torch.arange(4) + 1))
                    raise caught.value
                step(trainer)
            seen.append(name)
        except (KeyError, HybridparError) as error:
            seen.append(f"{name}: {str(error).splitlines()[0]}")
        assert dist.is_initialized() == (name == "own group")

    train("first")
    train("second")
    train("failing", fails_on=1)
    train("fewer batches", fails_on=1)
    train("bad label", fails_on=1)
    train("after the error")
    left_open, other = new_trainer(), new_trainer()
    assert step(left_open)
    assert step(other)
    left_open.close()
    assert step(other)
    other.close()
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    train("own group")
    number = torch.ones(1)
    dist.all_reduce(number)
    seen.append(f"sum {number.item():g}")
    dist.destroy_process_group()
    train("last")
    step(new_trainer())  # nobody closes it
    return seen


def expected(rank: int) -> list[str]:
    stopped = ", so worker 0 of 2 stopped while"
    counting = f"{stopped} exchanging sample counts"
    bad = "left step 2 with UsageError: targets go from 1 to 4, and the model has 4 outputs: Target 4 is out of bounds"
    failing = [
        "failing: " + (f"worker 1 left after step 1 with KeyError: 'failing'{counting}" if rank == 0 else "'failing'")
    ]
    fewer = [f"fewer batches: worker 1 left in good order after step 1{counting}"] if rank == 0 else []
    label = "bad label: " + (
        f"worker 1 {bad}{stopped} exchanging statistics of stage 0"
        if rank == 0
        else f"this worker {bad}, and took part in no step since"
    )
    return ["first", "second", *failing, *fewer, label, "after the error", "own group", "sum 2", "last"]


def test_several_trainers_in_one_program_under_torchrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, pathlib, sys\n"
        "from tests.comm.test_rendezvous import several_trainers\n"
        "seen = several_trainers()\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(json.dumps(seen))\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program, tmp_path]
    job = subprocess.run(
        run,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert job.returncode == 0, job.stderr
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [expected(0), expected(1)]


@pytest.fixture
def listening(monkeypatch):
    """The environment of worker 1 of a job whose worker 0 serves the store."""
    limit = datetime.timedelta(seconds=30)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_stores", {})
    return server


def test_what_another_job_or_attempt_writes_to_the_store_is_not_seen(monkeypatch, listening):
    def store(job: str, attempt: str):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        monkeypatch.setenv("HYBRIDPAR_ATTEMPT", attempt)
        return rendezvous.job_store(datetime.timedelta(seconds=30))

    store("a", "0").set("place-0", "here")
    assert store("a", "0").check(["place-0"])
    assert not store("a", "1").check(["place-0"])
    assert not store("b", "0").check(["place-0"])


def test_a_port_in_use_is_a_verdict_as_it_would_be_in_use_again(monkeypatch, tmp_path, listening):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="the port is in use") as caught:
        rendezvous.initialise(torch.device("cpu"), 30.0)
    monkeypatch.setenv(VERDICT_VARIABLE, str(tmp_path / "verdict.json"))
    assert record_failure(caught.value, debug=False)


# ------------------------------------------------------------------------------------------------- network interfaces


def test_a_master_that_is_the_loopback_of_every_node_is_refused_before_anybody_waits(monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.1.1", "MASTER_PORT": "1"}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        rendezvous.initialise(torch.device("cpu"), 3000.0)
    assert caught.value.what.startswith("worker 1 of 2 cannot join the job at 127.0.1.1:1: ")
    assert "--local-addr" in caught.value.fix


HERE, THERE = "here", "there"


@pytest.mark.parametrize(
    ("places", "address"),
    [
        ([WorkerAddress(HERE, "10.0.0.1", "10.0.0.1"), WorkerAddress(THERE, "10.0.0.2", "10.0.0.2")], "10.0.0.1"),
        # Debian's 127.0.1.1; MASTER_ADDR is an address.
        ([WorkerAddress(HERE, "127.0.1.1", "10.0.0.1"), WorkerAddress(THERE, "127.0.1.1", "10.0.0.2")], "10.0.0.1"),
        # MASTER_ADDR is the name of the first host, which stands for its loopback there alone.
        ([WorkerAddress(HERE, "127.0.1.1", "127.0.1.1"), WorkerAddress(THERE, "127.0.1.1", "10.0.0.2")], "10.0.0.2"),
        # Of a worker on the same host nothing is to be learned.
        ([WorkerAddress(HERE, "127.0.1.1", "127.0.1.1"), WorkerAddress(HERE, "10.9.9.9", "10.9.9.9")], None),
        ([WorkerAddress(HERE, "127.0.1.1", "127.0.0.1"), WorkerAddress(THERE, "127.0.1.1", "127.0.0.1")], None),
        ([WorkerAddress(HERE, "::1", "127.0.0.1"), WorkerAddress(THERE, "fe80::1%eth0", "127.0.0.1")], "fe80::1%eth0"),
    ],
)
def test_an_address_that_leads_to_the_other_hosts(places, address):
    assert reachable_address(places, 0) == address


def test_hosts_that_listen_on_the_loopback_are_refused_before_anybody_waits(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    places = [WorkerAddress(HERE, "10.0.0.1", "127.0.0.1"), WorkerAddress(THERE, "127.0.1.1", "127.0.0.1")]
    rendezvous._use_reachable_interface(places, 0)
    hidden = [WorkerAddress(HERE, "127.0.1.1", "127.0.0.1"), WorkerAddress(THERE, "127.0.1.1", "127.0.0.1")]
    with pytest.raises(LaunchError, match=r"worker 0 would listen on 127\.0\.1\.1.*\n.*\nSet GLOO_SOCKET_IFNAME"):
        rendezvous._use_reachable_interface(hidden, 1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rendezvous._use_reachable_interface(hidden, 1)


@pytest.mark.parametrize("towards", ["10.0.0.1", "127.0.1.1"])
def test_gloo_is_given_the_interface_that_leads_to_the_other_hosts(monkeypatch, towards):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "to be restored")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(rendezvous, "address_towards", {"10.0.0.1": "10.0.0.1", "10.0.0.2": "10.0.0.1"}.get)
    monkeypatch.setattr(rendezvous, "interface_of", {"10.0.0.1": "eth7"}.get)
    places = [WorkerAddress(HERE, "127.0.1.1", towards), WorkerAddress(THERE, "10.0.0.2", "10.0.0.2")]
    rendezvous._use_reachable_interface(places, 1)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    rendezvous._use_reachable_interface(places, 0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_loopbacks_interface_is_found_by_its_address():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


# --------------------------------------------------------------------------------------------------------- lost peers


def test_a_roll_call_finds_who_does_not_answer():
    store = dist.HashStore()
    first, second = RollCall(store, 0, 4), RollCall(store, 2, 4)
    assert first.missing(0.0) == [1, 2, 3]
    assert second.missing(0.1) == [1, 3]
    assert first.missing(0.0) == [1, 2, 3], "the first answer stays"
    store.set("here-3", "")
    assert RollCall(store, 1, 4).missing(30) == []


def live_store(signs):
    """A store in which each worker's sign has another number whenever it is read."""
    numbers = itertools.count()
    store = Mock()
    store.check = lambda keys: int(keys[0].removeprefix("sign-")) in signs
    store.get = lambda key: json.dumps([next(numbers), signs[int(key.removeprefix("sign-"))]]).encode()
    return store


@pytest.mark.parametrize(
    ("signs", "busy"),
    [
        ({1: "testing"}, True),
        ({1: None, 2: "testing"}, True),  # worker 1 waits for worker 2
        ({1: None, 2: None}, False),  # everybody waits for others: nothing will come
        ({}, False),
    ],
)
def test_a_live_worker_that_waits_for_nobody_is_busy(signs, busy, caplog):
    assert RollCall(live_store(signs), 0, 3, beat=0.05).is_busy() == busy
    said = [f"worker 0 waits for worker {rank}, which is alive: {doing}" for rank, doing in signs.items() if doing]
    assert [record.getMessage() for record in caplog.records] == said


def test_who_is_late_to_join_is_named():
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(milliseconds=50))
    with pytest.raises(RuntimeError, match="no sign of workers 1, 2"):
        rendezvous._exchange_addresses(store, 0, 3)
