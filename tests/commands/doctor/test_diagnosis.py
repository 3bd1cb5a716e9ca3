"""Tests `hybridpar doctor`: what is said of software, directories and measured links; and the whole command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridpar.commands.doctor import diagnosis
from hybridpar.commands.doctor.diagnosis import Finding, check_directories, check_software, cluster_findings, run_doctor
from hybridpar.errors import LaunchError
from hybridpar.machine.cluster_file import ClusterSpec, Hosts, LinkLevel
from tests.runs import ROOT

TORCH: dict[str, Any] = {
    "torch": "2.14.1+cu130",
    "torchvision": "0.29.1",
    "cuda_build": "13.0",
    "cuda_error": None,
    "gpus": [],
}
TVM = {"version": "0.27.0", "llvm": 22, "cuda": True}
GPUS = [("a GPU", None), ("another", "out of memory")]
FAILED = {"importing torch": "importing torch failed: libcudart.so.13", "importing tvm": "killed by signal 11"}


@pytest.fixture
def software(monkeypatch):
    """Findings of `check_software` by name, with other answers than of this machine; None where a probe fails."""

    def look(torch: dict[str, Any] | None = TORCH, tvm: dict[str, Any] | None = TVM, driver: bool = True):
        answers = {"importing torch": torch, "importing tvm": tvm}

        class Answer:
            def __init__(self, programs: Any, what: str, **options: Any) -> None:
                self.what = what

            def answer(self) -> str:
                if answers[self.what] is None:
                    raise LaunchError(FAILED[self.what])
                return json.dumps(answers[self.what])

            def __enter__(self) -> Answer:
                return self

            def __exit__(self, *exception: object) -> None:
                pass

        monkeypatch.setattr(diagnosis, "Programs", Answer)
        monkeypatch.setattr(diagnosis, "has_gpu_driver", lambda: driver)
        findings, gpus = check_software()
        assert gpus == (-1 if torch is None else len(torch["gpus"]))
        return {finding.name: finding for finding in findings}

    monkeypatch.setattr(diagnosis, "_version", lambda package: "1.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return look


@pytest.mark.parametrize(
    ("given", "name", "status", "value"),
    [
        ({"torch": None}, "torch", "failed", "libcudart.so.13"),
        ({"torch": None}, "TVM", "ok", "LLVM 22"),
        ({"torch": {**TORCH, "torchvision": None}}, "torchvision", "failed", "built for another torch"),
        ({"driver": False}, "CUDA", "absent", "training runs on the CPU"),
        ({"torch": {**TORCH, "cuda_error": "driver too old"}}, "CUDA", "warning", "driver too old"),
        ({"torch": {**TORCH, "cuda_build": None}}, "CUDA", "warning", "torch is for the CPU"),
        ({}, "CUDA", "warning", "torch sees no device"),
        ({"torch": {**TORCH, "gpus": GPUS[:1]}}, "CUDA", "ok", "a GPU"),
        ({"torch": {**TORCH, "gpus": GPUS}}, "CUDA", "warning", "another (cannot be used: out of memory)"),
        ({"tvm": None}, "TVM", "warning", "killed by signal 11; convolutions use stock kernels"),
        ({"tvm": {**TVM, "llvm": None}}, "TVM", "warning", "without LLVM"),
    ],
)
def test_software_is_judged_by_what_training_needs(software, given, name, status, value):
    found = software(**given)[name]
    assert found.status == status
    assert value in found.value
    assert bool(found.fix) == (status in ("failed", "warning"))


def test_missing_packages_name_their_purpose_and_their_command(software, monkeypatch):
    monkeypatch.setattr(diagnosis, "_version", lambda package: None)
    found = software()
    assert found["scikit-learn"].status == "warning", "the default data set needs it"
    assert found["lightning"] == Finding(
        *("packages", "lightning", "absent", "for the Lightning integration", "python -m pip install lightning")
    )


@pytest.mark.parametrize(
    ("free", "error", "statuses"),
    [(1 << 40, None, ["ok", "ok"]), (1 << 20, None, ["warning"] * 2), (1 << 40, "Read-only", ["failed", "warning"])],
)
def test_directories_are_written_to(monkeypatch, tmp_path, free, error, statuses):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "new" / "cache"))
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda path: usage)

    def refuse(**options: object) -> None:
        raise OSError(30, error)

    if error:
        monkeypatch.setattr(diagnosis.tempfile, "TemporaryFile", refuse)
    here, cache, *shared = check_directories()
    assert [here.status, cache.status] == statuses
    assert [bool(here.fix), bool(cache.fix)] == [status != "ok" for status in statuses]
    assert bool(shared) == (free < 1 << 30 and Path("/dev/shm").is_dir())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "the trial leaves nothing behind"


def test_hosts_and_links_are_shown_as_the_planner_measures_them():
    cpu = Hosts(devices=2, name="a CPU", memory=4 << 30, memory_bandwidth=1e10)
    gpu = Hosts(devices=2, kind="cuda", name="a GPU", memory=80 << 30, memory_bandwidth=3e12, host_link=2e10)
    link, name = LinkLevel(bandwidth=1.5e9, latency_ms=0.31), "a job over shared memory"
    found = cluster_findings(ClusterSpec(name=name, hosts=(cpu,), inside=link), 2.5)
    assert [finding.name for finding in found] == ["load", "CPU", "2 workers"]
    assert "2.5 per core" in found[0].value
    assert found[1].value.endswith("copies 20.0 GB/s"), "of both workers"
    assert found[2].value == f"{name}: 0.31 ms latency; per worker sums 1,500 MB/s, messages 1,500 MB/s"
    (found, _) = cluster_findings(ClusterSpec(name=name, hosts=(gpu,), inside=link), 0.0)
    assert (found.name, found.value) == (
        "GPUs: 2",
        "a GPU, 80.0 GiB each; copies 6,000.0 GB/s, 20.0 GB/s each to the host",
    )


def test_a_machine_that_cannot_train(monkeypatch, capsys):
    broken = Finding("software", "torch", "failed", "missing", "mend it")
    monkeypatch.setattr(diagnosis, "check_software", lambda: ([broken], -1))
    monkeypatch.setattr(diagnosis, "launch_workers", lambda *_, **__: pytest.fail("there is nothing to measure with"))
    assert run_doctor(False, ["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAILED  software: torch: missing -> mend it" in out
    assert "Training cannot run here: see torch above." in out


def test_the_real_thing(tmp_path):
    """The whole path, in processes of their own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HYBRIDPAR_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "hybridpar", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok      software: TVM: ") for line in lines), "TVM was really asked"
    assert any(line.startswith("ok      devices: ") for line in lines)
    assert lines[-1].startswith("hybridpar will use: ")
