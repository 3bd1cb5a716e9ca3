"""Examines this machine for `hybridpar doctor`, and shows what was found.

Each thing looked at gives one `Finding`. What training cannot do without is `failed` when missing; what a default run
misses is a `warning`; the rest is just `absent`. Software is examined in processes of its own, which a broken
installation may crash; hosts and links are measured by workers, as before a search for a plan.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybridpar.errors import LaunchError
from hybridpar.formats.cache import cache_directory
from hybridpar.machine.cluster_file import ClusterSpec
from hybridpar.machine.devices import has_gpu_driver, machine_load
from hybridpar.machine.launch import in_job, prepare_worker
from hybridpar.machine.probe import Programs, program_of
from hybridpar.machine.process import available_cores, describe, usable_memory
from hybridpar.machine.supervise import launch_workers

#: Free bytes below which a directory is too full for data, checkpoints or the loader's shared memory.
LOW_SPACE = 1 << 30

#: Load per core above which a measurement is not to be trusted.
BUSY_LOAD = 0.5

_TORCH_INSTALL = "python -m pip install --force-reinstall torch torchvision"
_TVM_INSTALL = "python -m pip install 'apache-tvm>=0.27,<0.28' apache-tvm-ffi-orcjit"

#: A program, not an import: `import tvm` takes seconds, and a broken one can crash.
_TVM_PROGRAM = """
import json, sys, tvm, tvm.support
cuda = tvm.support.libinfo().get("USE_CUDA", "OFF") not in ("OFF", "")
llvm = tvm.target.codegen.llvm_version_major() if tvm.runtime.enabled("llvm") else None
json.dump({"version": tvm.__version__, "llvm": llvm, "cuda": cuda}, open(sys.argv[1], "w"))
"""

#: Optional packages: what each is for, and whether a default run needs it.
_EXTRAS = (
    ("scikit-learn", "the default data set `digits`", True),
    ("tensorboard", "TensorBoard logs", False),
    ("wandb", "Weights & Biases logs", False),
    ("mlflow-skinny", "MLflow logs", False),
    ("lightning", "the Lightning integration", False),
    ("accelerate", "the Accelerate integration", False),
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        group: Heading it belongs under.
        name: What was looked at.
        status: `ok`; `absent`: optional and not there; `warning`: training runs, but worse; `failed`: it cannot run.
        value: What was found.
        fix: One command that mends it; empty where there is nothing to mend.
    """

    group: str
    name: str
    status: Literal["ok", "absent", "warning", "failed"]
    value: str
    fix: str = ""


def run_doctor(fresh: bool, arguments: Sequence[str]) -> int:
    """Look at software and directories, and start the workers that measure, or be one of them."""
    if in_job():
        prepare_worker(tune=True)
        return _measure(fresh)
    software, gpus = check_software()
    findings = [*software, *check_directories()]
    _print(findings)
    if failed := [finding.name for finding in findings if finding.status == "failed"]:
        print(f"Training cannot run here: see {', '.join(failed)} above.")
        return 1
    return launch_workers(arguments, gpus or min(2, len(available_cores())), restarts=0)


def _measure(fresh: bool) -> int:
    """Measure hosts and links with the other workers, and print them on the first."""
    from hybridpar.comm.world import World
    from hybridpar.planner.links import measure_cluster

    load = machine_load()
    with closing(World.join(lanes=1)) as world:
        cluster = measure_cluster(world, fresh=fresh)
        if world.is_main:
            _print(cluster_findings(cluster, load))
            workers = _count(world.size)
            use = f"{workers} on the CPU, {describe()}" if world.device.type == "cpu" else f"{workers}, a GPU each"
            print(f"hybridpar will use: {use}", flush=True)
    return 0


def _print(findings: Sequence[Finding]) -> None:
    for finding in findings:
        word = "FAILED" if finding.status == "failed" else finding.status
        fix = f" -> {finding.fix}" if finding.fix else ""
        print(f"{word:8}{finding.group}: {finding.name}: {finding.value}{fix}", flush=True)


# ----------------------------------------------------------------------------------------------------------- software


def check_software() -> tuple[list[Finding], int]:
    """Python, torch, TVM, and the optional packages; and the number of GPUs that torch sees, -1 without torch."""
    findings = [Finding("software", "Python", "ok", f"{platform.python_version()}, {sys.executable}")]
    asked, gpus = program_of("hybridpar.machine.probe", "torch_facts"), -1
    # Both take seconds to import, so they do it at the same time.
    with (
        Programs([asked], "importing torch", workers=1) as torch,
        Programs([_TVM_PROGRAM], "importing tvm", workers=1) as tvm,
    ):
        try:
            facts = json.loads(torch.answer())
            findings += _torch_findings(facts)
            gpus = len(facts["gpus"])
        except LaunchError as error:
            findings.append(Finding("software", "torch", "failed", error.what, _TORCH_INSTALL))
        findings.append(_tvm_finding(tvm))
    for package, purpose, by_default in _EXTRAS:
        fix, status = f"python -m pip install {package}", "warning" if by_default else "absent"
        found = _version(package)
        findings.append(_found("packages", package, found and f"{found}, {purpose}", status, f"for {purpose}", fix))
    return findings, gpus


def _found(group: str, name: str, value: str | None, status: Any, missing: str, fix: str = "") -> Finding:
    """What was found, or that it is missing."""
    return Finding(group, name, "ok", value) if value else Finding(group, name, status, missing, fix)


def _torch_findings(facts: dict[str, Any]) -> list[Finding]:
    build = f"CUDA {facts['cuda_build']}" if facts["cuda_build"] else "the CPU only"
    vision = _found(
        "software", "torchvision", facts["torchvision"], "failed", "missing, or built for another torch", _TORCH_INSTALL
    )
    return [Finding("software", "torch", "ok", f"{facts['torch']}, built for {build}"), vision, _gpu_finding(facts)]


def _gpu_finding(facts: dict[str, Any]) -> Finding:
    if not has_gpu_driver():
        reason = "CUDA_VISIBLE_DEVICES is empty" if "CUDA_VISIBLE_DEVICES" in os.environ else "no driver of a GPU"
        return Finding("software", "CUDA", "absent", f"{reason}; training runs on the CPU")
    if facts["cuda_build"] is None:
        return Finding("software", "CUDA", "warning", "there is a driver, and torch is for the CPU", _TORCH_INSTALL)
    names = [name if error is None else f"{name} (cannot be used: {error})" for name, error in facts["gpus"]]
    value = facts["cuda_error"] or ", ".join(names) or "torch sees no device"
    works = names and not facts["cuda_error"] and all(error is None for _, error in facts["gpus"])
    return Finding("software", "CUDA", "ok" if works else "warning", value, "" if works else "nvidia-smi")


def _tvm_finding(probe: Programs) -> Finding:
    value, missing = None, ""
    try:
        facts = json.loads(probe.answer())
        missing = f"{facts['version']} is built without LLVM"
        if _version("apache-tvm-ffi-orcjit") is None:
            missing = "apache-tvm-ffi-orcjit is missing"
        elif facts["llvm"] is not None:
            value = f"{facts['version']}, LLVM {facts['llvm']}{', CUDA' if facts['cuda'] else ''}"
    except LaunchError as error:
        missing = error.what
    return _found("software", "TVM", value, "warning", f"{missing}; convolutions use stock kernels", _TVM_INSTALL)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# -------------------------------------------------------------------------------------------------------- directories


def check_directories() -> list[Finding]:
    """Whether the directories that hybridpar writes to can be written, and how much room they have."""
    again, elsewhere = "without it, every run measures again", "export HYBRIDPAR_CACHE=/tmp/hybridpar"
    findings = [
        _directory_finding(
            "here", Path.cwd(), "failed", "runs and checkpoints go here", "mkdir -p ~/runs && cd ~/runs"
        ),
        _directory_finding("cache", cache_directory(), "warning", again, elsewhere),
    ]
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < LOW_SPACE:
        room = f"{free / 2**20:,.0f} MiB free; loader processes and NCCL may run out of it"
        findings.append(Finding("directories", "/dev/shm", "warning", room, "mount -o remount,size=8g /dev/shm"))
    return findings


def _directory_finding(name: str, path: Path, status: Any, purpose: str, fix: str) -> Finding:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Asking for permission is not enough: a full or read-only disk grants it too.
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return Finding("directories", name, status, f"{path} cannot be written ({error.strerror}); {purpose}", fix)
    free = shutil.disk_usage(path).free
    room = f"{path}, {free / 2**30:,.1f} GiB free"
    look = f"du -xh --max-depth=1 {path} | sort -h"
    return _found("directories", name, None if free < LOW_SPACE else room, "warning", room, look)


# -------------------------------------------------------------------------------------------------- devices and links


def cluster_findings(cluster: ClusterSpec, load: float) -> list[Finding]:
    """What was measured, as findings; `load` is what other programs made of each core before."""
    host, level = cluster.hosts[0], cluster.inside
    findings = []
    if load > BUSY_LOAD:
        value = f"other programs use the CPU ({load:.1f} per core); rates may be far too low"
        findings.append(Finding("devices", "load", "warning", value, "hybridpar doctor --fresh"))
    copies = f"copies {(host.memory_bandwidth or 0.0) * host.devices / 1e9:,.1f} GB/s"
    if host.kind == "cpu":
        value = f"{host.name}, {len(available_cores())} core(s), {usable_memory() / 2**30:.1f} GiB; {copies}"
    else:
        memory, to_host = (host.memory or 0) / 2**30, (host.host_link or 0.0) / 1e9
        value = f"{host.name}, {memory:.1f} GiB each; {copies}, {to_host:,.1f} GB/s each to the host"
    findings.append(Finding("devices", "CPU" if host.kind == "cpu" else f"GPUs: {host.devices}", "ok", value))
    if level is not None:
        sums, messages = (level.bandwidth * part / 1e6 for part in (level.efficiency.all_reduce, level.efficiency.send))
        value = f"{level.latency_ms:.2f} ms latency; per worker sums {sums:,.0f} MB/s, messages {messages:,.0f} MB/s"
        findings.append(Finding("links", _count(cluster.workers), "ok", f"{cluster.name}: {value}"))
    return findings


def _count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"
