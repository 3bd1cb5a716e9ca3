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
    plain_lines,
    run_doctor,
)
from hybridpar.errors import LaunchError
from hybridpar.machine.cluster import Cluster, Device, Link, host_fingerprint, write_cluster
from tests.runs import ROOT

CPU = Device(kind="cpu", name="a CPU", memory_bytes=8 << 30, cores=2, threads=2, bytes_per_second=2e10)
GPU = Device(kind="cuda", name="a GPU", memory_bytes=80 << 30, bytes_per_second=3e12)
GLOO = Link(backend="gloo", world_size=2, latency_ms=0.31, bytes_per_second=1.5e9)
FINE = Finding("software", "torch", "ok", "2.14")


def cluster(*devices: Device, **fields: object) -> Cluster:
    return Cluster.model_validate(
        {"host": {}, "measured_at": 0.0, "load": 0.0, "devices": devices or (CPU,), "links": (GLOO,), **fields}
    )


@pytest.fixture
def machine(monkeypatch):
    """Sets what the doctor finds."""

    def install(findings: list[Finding], found: Cluster | LaunchError) -> None:
        def probe(*, fresh: bool) -> Cluster:
            if isinstance(found, LaunchError):
                raise found
            return found

        monkeypatch.setattr(doctor, "check_software", lambda: findings)
        monkeypatch.setattr(doctor, "check_tools", lambda: [])
        monkeypatch.setattr(doctor, "check_places", lambda: [])
        monkeypatch.setattr(doctor, "probe_cluster", probe)

    return install


def by_name(found: Cluster) -> dict[str, Finding]:
    return {finding.name: finding for finding in cluster_findings(found)}


def test_a_link_that_default_workers_need_is_a_failure_and_any_other_a_warning():
    broken = "measuring the link between 2 workers over gloo failed: no route"
    assert by_name(cluster(links=(), problems=(broken,)))["between workers"].status == "failed"
    alone = by_name(cluster(CPU, GPU, links=(), problems=(broken,)))["between workers"]
    assert alone.status == "warning", "one GPU trains without a link"
    assert "--workers 1" in alone.fix


def test_a_gpu_that_cannot_be_used_is_a_warning():
    found = by_name(cluster(problems=("GPU 0 (a GPU) cannot be used: out of memory",)))
    assert found["GPU"].status == "warning"
    assert found["GPU"].fix == "nvidia-smi"


def test_figures_of_a_busy_machine_come_with_a_warning():
    assert "load" not in by_name(cluster())
    assert "2.5 per core" in by_name(cluster(load=2.5))["load"].value


def test_a_machine_that_can_train(machine, capsys, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "available_cores", lambda: [0, 1])
    machine([FINE], cluster())
    assert run_doctor(fresh=False, as_json=False) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "ok      software: torch: 2.14"
    assert out[-1].startswith("hybridpar will use: 2 workers on the CPU, gloo, ")
    assert out[-1].endswith("1 thread per worker; off with --no-tune-process")


def test_gpus_are_used_one_by_each_worker(machine):
    machine([FINE], cluster(CPU, GPU, GPU.model_copy(update={"index": 1})))
    assert diagnose(False).use == "2 workers, one GPU each, nccl"
    machine([FINE], cluster(CPU, GPU))
    assert diagnose(False).use == "1 worker, one GPU each"


def test_a_machine_that_cannot_train(machine, capsys):
    machine([Finding("software", "gloo", "failed", "missing", "mend it")], cluster())
    assert run_doctor(fresh=False, as_json=False) == 1
    out = capsys.readouterr().out
    assert "FAILED  software: gloo: missing -> mend it" in out
    assert "Training cannot run here: see gloo above." in out


def test_without_torch_nothing_is_measured(machine, monkeypatch):
    def never(**options: object) -> None:
        raise AssertionError("there is nothing to measure with")

    machine([Finding("software", "torch", "failed", "missing")], cluster())
    monkeypatch.setattr(doctor, "probe_cluster", never)
    diagnosis = diagnose(False)
    assert not diagnosis.ready
    assert diagnosis.cluster is None
    assert "Nothing was measured." in plain_lines(diagnosis)


def test_a_cpu_that_cannot_be_measured_is_a_failure(machine):
    machine([FINE], LaunchError("measuring the devices failed: killed by signal 4", fix="see the doctor"))
    diagnosis = diagnose(False)
    assert not diagnosis.ready
    assert diagnosis.findings[-1].value == "measuring the devices failed: killed by signal 4"


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
    """The whole path in a process of its own, on figures that are known already."""
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path))
    write_cluster(cluster(host=host_fingerprint(), load=0.0))
    program = (
        "import sys; from hybridpar.commands.doctor.diagnosis import run_doctor; sys.exit(run_doctor(False, True))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=150)
    content = json.loads(out.stdout)
    assert out.returncode == (0 if content["ready"] else 1)
    assert content["cluster"]["devices"][0]["name"] == "a CPU"
    found = {finding["name"]: finding for finding in content["findings"]}
    assert {"Python", "CUDA", "here", "CPU", "2 workers, gloo"} <= set(found)
    assert found["torch"]["status"] == found["backends"]["status"] == "ok"
    assert re.match(r"\d+\.\d+.*, LLVM \d+, ", found["TVM"]["value"]), "TVM was really asked"
