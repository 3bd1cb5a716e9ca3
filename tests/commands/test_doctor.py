from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from hybridpar.commands.doctor import diagnosis as doctor
from hybridpar.commands.doctor.checkup import Finding
from hybridpar.commands.doctor.diagnosis import (
    Diagnosis,
    cluster_findings,
    diagnose,
    run_doctor,
)
from hybridpar.errors import LaunchError
from hybridpar.machine.cluster_file import ClusterSpec, Hosts, LinkLevel, parse_cluster
from tests.runs import ROOT

CPU = Hosts(devices=2, name="a CPU", memory=4 << 30, memory_bandwidth=1e10)
GPU = Hosts(devices=2, kind="cuda", name="a GPU", memory=80 << 30, memory_bandwidth=3e12, host_link=2e10)
LINK = LinkLevel(bandwidth=1.5e9, latency_ms=0.31)
FINE = Finding("software", "torch", "ok", "2.14")


def cluster(hosts: Hosts = CPU) -> ClusterSpec:
    return ClusterSpec(name="a job over shared memory", hosts=(hosts,), inside=LINK)


@pytest.fixture
def machine(monkeypatch):
    """Sets what the doctor finds."""

    def install(
        findings: list[Finding], found: ClusterSpec | LaunchError, gpus: int = 0, load: float = 0.0
    ) -> list[int]:
        started: list[int] = []

        def probe(workers: int, fresh: bool) -> ClusterSpec:
            started.append(workers)
            if isinstance(found, LaunchError):
                raise found
            return found

        monkeypatch.setattr(doctor, "check_software", lambda: (findings, gpus))
        monkeypatch.setattr(doctor, "check_tools", lambda: [])
        monkeypatch.setattr(doctor, "check_places", lambda: [])
        monkeypatch.setattr(doctor, "probe_cluster", probe)
        monkeypatch.setattr(doctor, "available_cores", lambda: [0, 1])
        monkeypatch.setattr(doctor, "machine_load", lambda: load)
        return started

    return install


def by_name(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnosis.findings}


def test_links_that_workers_need_and_that_cannot_be_measured_are_a_failure(machine):
    machine([FINE], LaunchError("measuring with 2 workers failed: no route"))
    found = by_name(diagnose(False))["2 workers"]
    assert found == Finding(
        "links",
        "2 workers",
        "failed",
        "measuring with 2 workers failed: no route",
        "hybridpar train resnet18 --nproc 1",
    )


def test_hosts_and_links_are_shown_as_the_planner_measures_them():
    values = {finding.name: finding.value for finding in cluster_findings(cluster())}
    assert values["CPU"].startswith("a CPU, ")
    assert values["CPU"].endswith("copies 20.0 GB/s"), "of both workers"
    assert values["2 workers"] == (
        "a job over shared memory: 0.31 ms latency; per worker sums 1,500 MB/s, messages 1,500 MB/s"
    )
    values = {finding.name: finding.value for finding in cluster_findings(cluster(GPU))}
    assert values["GPUs: 2"] == "a GPU, 80.0 GiB each; copies 6,000 GB/s, 20.0 GB/s each to the host"


def test_figures_of_a_busy_machine_come_with_a_warning(machine):
    machine([FINE], cluster())
    assert "load" not in by_name(diagnose(False))
    machine([FINE], cluster(), load=2.5)
    assert "2.5 per core" in by_name(diagnose(False))["load"].value


def test_a_machine_that_can_train(machine, capsys, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert machine([FINE], cluster()) == []
    assert run_doctor(fresh=False, as_json=False) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "ok      software: torch: 2.14"
    assert out[-1].startswith("hybridpar will use: 2 workers on the CPU, ")
    assert out[-1].endswith("1 thread per worker; off with --no-tune-process")


def test_gpus_are_used_one_by_each_worker(machine):
    started = machine([FINE], cluster(GPU), gpus=2)
    assert diagnose(False).use == "2 workers, a GPU each"
    machine([FINE], ClusterSpec(hosts=(GPU.model_copy(update={"devices": 1}),)), gpus=1)
    assert diagnose(False).use == "1 worker, a GPU each"
    assert started == [2]


def test_a_machine_that_cannot_train(machine, capsys):
    machine([Finding("software", "gloo", "failed", "missing", "mend it")], cluster())
    assert run_doctor(fresh=False, as_json=False) == 1
    out = capsys.readouterr().out
    assert "FAILED  software: gloo: missing -> mend it" in out
    assert "Training cannot run here: see gloo above." in out


def test_without_torch_nothing_is_measured(machine):
    started = machine([Finding("software", "torch", "failed", "missing")], cluster(), gpus=-1)
    diagnosis = diagnose(False)
    assert not diagnosis.ready
    assert diagnosis.cluster is None
    assert not started, "there is nothing to measure with"


@pytest.mark.parametrize("width", [60, 120])
def test_the_screen_fits_and_nothing_is_cut(width):
    long = "a value that is far too long for one line of a screen " * 3
    findings = (
        FINE,
        Finding("software", "TVM", "warning", long, "pip install [it]"),
        Finding("links", "2 workers, gloo", "failed", "no route"),
    )
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    doctor._show_screen(console, Diagnosis(findings, cluster(), "2 workers"))
    shown = console.file.getvalue()
    assert max(len(line) for line in shown.splitlines()) <= width
    assert " ".join(shown.split()).count("far too long for one line") >= 2
    assert "→ pip install [it]" in shown, "brackets are no markup"
    assert "…" not in shown
    assert "✗ 2 workers, gloo no route" in " ".join(shown.split())


def test_the_real_thing(monkeypatch, tmp_path):
    """The whole path, in processes of their own."""
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path))
    program = (
        "import sys; from hybridpar.commands.doctor.diagnosis import run_doctor; sys.exit(run_doctor(False, True))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=150)
    content = json.loads(out.stdout)
    assert out.returncode == (0 if content["ready"] else 1)
    found = {finding["name"]: finding for finding in content["findings"]}
    assert {"Python", "CUDA", "here"} <= set(found)
    cluster = parse_cluster(content["cluster"])
    assert {finding["name"] for finding in content["findings"] if finding["group"] == "devices"} >= {
        finding.name for finding in cluster_findings(cluster) if finding.group == "devices"
    }
    assert found["torch"]["status"] == found["backends"]["status"] == "ok"
    assert re.match(r"\d+\.\d+.*, LLVM \d+, ", found["TVM"]["value"]), "TVM was really asked"
