"""Tests `hybridpar doctor`: what is said of software, directories, measured links, and runs that hang."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridpar.cli import main
from hybridpar.comm.flight import FLIGHT, FOLDER, Channel, Flight, Note, process_state, read_flights
from hybridpar.commands import doctor
from hybridpar.commands.doctor import (
    Finding,
    check_directories,
    check_software,
    cluster_findings,
    hang_lines,
)
from hybridpar.errors import LaunchError, counted
from hybridpar.machine.cluster_file import ClusterSpec, Hosts, LinkLevel
from hybridpar.machine.process import available_cores
from tests.ranks import start_processes
from tests.runs import ROOT
from tests.waiting import eventually

TORCH: dict[str, Any] = {
    "torch": "2.14.1",
    "torchvision": "0.29.1",
    "cuda_build": "13.0",
    "cuda_error": None,
    "gpus": [],
}
TVM = "0.27.0, LLVM 22, CUDA"
GPUS = [("a GPU", None), ("another", "out of memory")]
FAILED = {"importing torch": "importing torch failed: libcudart.so.13", "importing tvm": "killed by signal 11"}


@pytest.fixture
def software(monkeypatch):
    """Findings of `check_software` by name, with other answers than of this machine; None where a probe fails."""

    def look(torch: dict[str, Any] | None = TORCH, tvm: str | None = TVM, driver: bool = True):
        answers = {"importing torch": torch and json.dumps(torch), "importing tvm": tvm}

        class Answer(contextlib.nullcontext):
            def __init__(self, programs: Any, what: str, **options: Any) -> None:
                super().__init__(self)
                self.what = what

            def answer(self) -> str:
                if (answer := answers[self.what]) is None:
                    raise LaunchError(FAILED[self.what])
                return answer

        monkeypatch.setattr(doctor, "Programs", Answer)
        monkeypatch.setattr(doctor, "has_gpu_driver", lambda: driver)
        findings, gpus = check_software()
        assert gpus == (-1 if torch is None else len(torch["gpus"]))
        return {finding.name: finding for finding in findings}

    return look


@pytest.mark.parametrize(
    ("given", "name", "status", "value"),
    [
        ({"torch": None}, "torch", "FAILED", "libcudart.so.13"),
        ({"torch": None}, "TVM", "ok", "LLVM 22"),
        ({"torch": {**TORCH, "torchvision": None}}, "torchvision", "FAILED", "built for another torch"),
        ({"driver": False}, "CUDA", "absent", "training runs on the CPU"),
        ({"torch": {**TORCH, "cuda_error": "driver too old"}}, "CUDA", "warning", "driver too old"),
        ({"torch": {**TORCH, "cuda_build": None}}, "CUDA", "warning", "torch is for the CPU"),
        ({}, "CUDA", "warning", "torch sees no device"),
        ({"torch": {**TORCH, "gpus": GPUS[:1]}}, "CUDA", "ok", "a GPU"),
        ({"torch": {**TORCH, "gpus": GPUS}}, "CUDA", "warning", "another (cannot be used: out of memory)"),
        ({"tvm": None}, "TVM", "warning", "killed by signal 11; convolutions use stock kernels"),
    ],
)
def test_software_is_judged_by_what_training_needs(software, given, name, status, value):
    found = software(**given)[name]
    assert found.status == status
    assert value in found.value
    assert bool(found.fix) == (status in ("FAILED", "warning"))


def test_missing_packages_are_one_line_with_the_command_that_installs_them(software, monkeypatch):
    def version(package):
        if package in ("wandb", "lightning"):
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.2"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = software()
    assert (found["timm"].status, found["timm"].value) == ("ok", "1.2")
    missing = found["optional packages"]
    assert missing.value == "not installed: wandb, lightning"
    assert missing.fix == "python -m pip install wandb lightning"


@pytest.mark.parametrize(("free", "writable"), [(1 << 40, True), (1 << 20, True), (1 << 40, False)])
def test_directories_are_written_to(monkeypatch, tmp_path, free, writable):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "new" / "cache"))
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)

    def refuse(**options: object) -> None:
        raise OSError(30, "Read-only")

    if not writable:
        monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    found = list(check_directories())
    room = "ok" if free >= 1 << 30 else "warning"
    assert [finding.status for finding in found[:2]] == ([room, room] if writable else ["FAILED", "warning"])
    assert all(bool(finding.fix) == (finding.status != "ok") for finding in found)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "the trial leaves nothing behind"


def test_hosts_and_links_are_shown_as_the_planner_measures_them():
    cpu = Hosts(devices=2, name="a CPU", memory=4 << 30, memory_bandwidth=1e10)
    gpu = Hosts(devices=2, kind="cuda", name="a GPU", memory=80 << 30, memory_bandwidth=3e12, host_link=2e10)
    link, name = LinkLevel(bandwidth=1.5e9, latency_ms=0.31), "a job over shared memory"
    found = list(cluster_findings(ClusterSpec(name=name, hosts=(cpu,), inside=link), 2.5))
    assert [finding.name for finding in found] == [
        "load",
        counted(len(available_cores()), "CPU core"),
        "link of 2 workers",
    ]
    assert "2.5 per core" in found[0].value
    assert found[1].value.endswith("copies 20.0 GB/s"), "of both workers"
    assert found[2].value == f"{name}: 0.31 ms latency; per worker sums 1,500 MB/s, messages 1,500 MB/s"
    (found, _) = cluster_findings(ClusterSpec(name=name, hosts=(gpu,), inside=link), 0.0)
    assert (found.name, found.value) == (
        "2 GPUs",
        "a GPU, 80.0 GiB; copies 6,000.0 GB/s, 20.0 GB/s each to the host",
    )


def test_a_machine_that_cannot_train(monkeypatch, capsys):
    broken = Finding("torch", "FAILED", "missing", "mend it")
    monkeypatch.setattr(doctor, "check_software", lambda: ([broken], -1))
    monkeypatch.setattr(doctor, "launch_workers", lambda *_, **__: pytest.fail("there is nothing to measure with"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAILED  torch: missing -> mend it" in out
    assert "Training cannot run here: see torch above." in out


def test_the_real_thing(tmp_path):
    """The whole path, in processes of their own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HYBRIDPAR_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "hybridpar", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok      TVM: ") for line in lines), "TVM was really asked"
    assert any(re.match(r"ok      \d+ (CPU cores?|GPUs?): ", line) for line in lines)
    assert lines[-1].startswith("hybridpar will use: ")


# ------------------------------------------------------------------------------------------------- a run that hangs

NOW = 1000.0


def note(number: int, doing: str, *, order: int = 0, channel: Channel | None = None, end: float | None = None) -> Note:
    return Note(number, order, NOW - 60, end, channel, doing)


def test_each_lane_has_its_stack_and_its_last_note() -> None:
    both = Channel((0, 2))
    lanes = {
        "MainThread": (note(1, "loading", end=NOW - 9), note(2, "0F0"), note(3, "waiting for data")),
        "sync": (note(6, "adding gradients", order=6, channel=both, end=NOW - 50),),
        "idle": (),
    }
    lines = list(hang_lines([Flight(0, 3, "elsewhere", 100, "job", lanes)], NOW))
    assert lines[:3] == [
        "worker 0   process 100 on elsewhere, on another machine",
        "  MainThread: in 0F0 since 0:01:00; in waiting for data since 0:01:00; last done: loading, 9.0 s ago",
        "  sync: last done: adding gradients (number 6 of workers 0, 2), 50.0 s ago",
    ]
    assert "no record here of workers 1, 2" in lines


def test_a_run_without_records(tmp_path, capsys):
    for place in (tmp_path, tmp_path / "no"):
        assert main(["doctor", "--hang", str(place)]) == 2
        assert "no worker has left a record" in capsys.readouterr().err


def stops(rank: int, directory: str, run: str, answers: Any) -> None:
    """Two workers, of which the second stops itself before the third exchange."""
    import torch.distributed as dist

    from hybridpar.comm.world import World

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    world = World.join(lanes=1)
    FLIGHT.open(Path(run) / FOLDER, rank, 2)
    for number in range(3):
        if (number, rank) == (2, 1):
            os.kill(os.getpid(), signal.SIGSTOP)
        world.barrier()
    answers.put("done")


def test_a_worker_that_was_stopped_is_found(tmp_path, capsys):
    with start_processes(stops, 2, str(tmp_path)) as answers:

        def flights() -> dict[int, Any]:
            return {one.rank: one for one in read_flights(tmp_path / FOLDER)}

        eventually(
            lambda: len(flights()) == 2 and [note for note in flights()[0].lanes["MainThread"] if note.end is None]
        )
        stopped = flights()[1].pid
        eventually(lambda: process_state(stopped) == "T (stopped)")

        def orders() -> list[int]:
            return [max(note.order for note in flights()[rank].lanes["MainThread"]) for rank in range(2)]

        eventually(lambda: orders()[0] == orders()[1] + 1)  # what a worker does is written a moment after it began
        assert main(["doctor", "--hang", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert f"process {stopped} on {socket.gethostname()}, T (stopped)" in text
        assert f"(number {orders()[0]} of workers 0, 1) since" in text
        os.kill(stopped, signal.SIGCONT)
        assert {answers.get(timeout=90) for _ in range(2)} == {"done"}
