"""`hybridpar doctor`: shows what this machine offers and hybridpar will use, or where a run stands still.

Software is examined in processes of its own, which a broken installation may crash; hosts and links are measured by
workers, as before a search for a plan.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hybridpar.commands import register_command
from hybridpar.errors import LaunchError, check, counted
from hybridpar.formats.cache import cache_directory
from hybridpar.machine.devices import has_gpu_driver, machine_load
from hybridpar.machine.launch import in_job, prepare_worker
from hybridpar.machine.probe import Programs, program_of
from hybridpar.machine.process import available_cores, describe, usable_memory
from hybridpar.machine.supervise import launch_workers
from hybridpar.spec import Options

if TYPE_CHECKING:
    from hybridpar.comm.flight import Flight
    from hybridpar.machine.cluster_file import ClusterSpec

#: Free bytes of a directory below which they may run out.
LOW_SPACE = 1 << 30

#: Load per core above which a measurement is not to be trusted.
BUSY_LOAD = 0.5

_TORCH_INSTALL = "python -m pip install --force-reinstall torch torchvision"
_TVM_INSTALL = "python -m pip install 'apache-tvm>=0.27,<0.28' apache-tvm-ffi-orcjit"

#: A program, not an import: `import tvm` takes seconds, and a broken one can crash.
_TVM_PROGRAM = """
import sys, tvm, tvm.support, tvm_ffi_orcjit
cuda = tvm.support.libinfo().get("USE_CUDA", "OFF") not in ("OFF", "")
llvm = tvm.target.codegen.llvm_version_major()  # fails where it is built without
open(sys.argv[1], "w").write(f"{tvm.__version__}, LLVM {llvm}{', CUDA' if cuda else ''}")
"""

#: Optional packages.
_EXTRAS = (
    *("scikit-learn", "timm", "datasets", "onnx", "plotly", "tensorboard", "wandb", "mlflow-skinny"),
    *("lightning", "accelerate"),
)


class Doctor(Options):
    """Show what this machine offers, what hybridpar will use, and how to mend what is missing; or where a run hangs.

    Attributes:
        fresh: Measure again instead of using cached figures.
        hang: Directory of a run that stands still: list what every worker is in, and what it did last.
    """

    fresh: bool = False
    hang: Path | None = None


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        name: What was looked at.
        status: `absent`: optional and not there; `warning`: training runs, but worse; `FAILED`: it cannot run.
        value: What was found.
        fix: One command that mends it; empty where there is nothing to mend.
    """

    name: str
    status: Literal["ok", "absent", "warning", "FAILED"]
    value: str
    fix: str = ""


@register_command("doctor", Doctor)
def run_doctor(command: Doctor, arguments: Sequence[str]) -> int:
    """Look at software and directories, and start the workers that measure, or be one of them; or look at a run."""
    if command.hang is not None:
        return run_hang(command.hang)
    if in_job():
        prepare_worker(tune=True)
        return _measure(command.fresh)
    software, gpus = check_software()
    findings = [*software, *check_directories()]
    _print(findings)
    if failed := [finding.name for finding in findings if finding.status == "FAILED"]:
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
            where = f" on the CPU, {describe()}" if world.device.type == "cpu" else ", a GPU each"
            print(f"hybridpar will use: {counted(world.size, 'worker')}{where}", flush=True)
    return 0


def _print(findings: Iterable[Finding]) -> None:
    for name, status, value, fix in findings:
        print(f"{status:8}{name}: {value}{f' -> {fix}' if fix else ''}", flush=True)


def check_software() -> tuple[list[Finding], int]:
    """Python, torch, TVM, and the optional packages; and the number of GPUs that torch sees, -1 without torch."""
    findings, gpus = [Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")], -1
    # Both take seconds to import, so they do it at the same time.
    with (
        Programs([program_of("hybridpar.machine.probe", "torch_facts")], "importing torch", workers=1) as torch,
        Programs([_TVM_PROGRAM], "importing tvm", workers=1) as tvm,
    ):
        try:
            facts = json.loads(torch.answer())
            findings += _torch_findings(facts)
            gpus = len(facts["gpus"])
        except LaunchError as error:
            findings.append(Finding("torch", "FAILED", error.what, _TORCH_INSTALL))
        try:
            findings.append(Finding("TVM", "ok", tvm.answer()))
        except LaunchError as error:
            findings.append(Finding("TVM", "warning", f"{error.what}; convolutions use stock kernels", _TVM_INSTALL))
    missing = []
    for package in _EXTRAS:
        try:
            findings.append(Finding(package, "ok", importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        value, fix = f"not installed: {', '.join(missing)}", f"python -m pip install {' '.join(missing)}"
        findings.append(Finding("optional packages", "absent", value, fix))
    return findings, gpus


def _torch_findings(facts: dict[str, Any]) -> Iterator[Finding]:
    build = f"CUDA {facts['cuda_build']}" if facts["cuda_build"] else "the CPU only"
    yield Finding("torch", "ok", f"{facts['torch']}, built for {build}")
    if facts["torchvision"]:
        yield Finding("torchvision", "ok", facts["torchvision"])
    else:
        yield Finding("torchvision", "FAILED", "missing, or built for another torch", _TORCH_INSTALL)
    gpus = ", ".join(name if error is None else f"{name} (cannot be used: {error})" for name, error in facts["gpus"])
    if not has_gpu_driver():
        yield Finding("CUDA", "absent", "no driver, or CUDA_VISIBLE_DEVICES hides the GPUs; training runs on the CPU")
    elif facts["cuda_build"] is None:
        yield Finding("CUDA", "warning", "there is a driver, and torch is for the CPU", _TORCH_INSTALL)
    elif facts["cuda_error"] or not gpus or any(error for _, error in facts["gpus"]):
        yield Finding("CUDA", "warning", facts["cuda_error"] or gpus or "torch sees no device", "nvidia-smi")
    else:
        yield Finding("CUDA", "ok", gpus)


def check_directories() -> Iterator[Finding]:
    """Whether the directories that hybridpar writes to can be written, and how much room they have."""
    directories = [
        ("here", Path.cwd(), "cd to a directory of yours"),
        ("cache", cache_directory(), "export HYBRIDPAR_CACHE=/tmp/hybridpar"),
        ("shared memory of loaders and NCCL", Path("/dev/shm"), "mount -o remount,size=8g /dev/shm"),
    ]
    for name, path, fix in directories if directories[-1][1].is_dir() else directories[:-1]:
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Asking for permission is not enough: a full or read-only disk grants it too.
            with tempfile.TemporaryFile(dir=path) as file:
                file.write(b"x" * 4096)
            free = shutil.disk_usage(path).free
            value, has_room = f"{path}, {free / 2**30:,.1f} GiB free", free >= LOW_SPACE
            yield Finding(name, "ok", value) if has_room else Finding(name, "warning", value, fix)
        except OSError as error:
            value = f"{path} cannot be written ({error.strerror})"
            yield Finding(name, "FAILED" if name == "here" else "warning", value, fix)


def cluster_findings(cluster: ClusterSpec, load: float) -> Iterator[Finding]:
    """What was measured, as findings; `load` is what other programs made of each core before."""
    host, level = cluster.hosts[0], cluster.inside
    if load > BUSY_LOAD:
        value = f"other programs use the CPU ({load:.1f} per core); rates may be far too low"
        yield Finding("load", "warning", value, "hybridpar doctor --fresh")
    on_cpu = host.kind == "cpu"
    name = counted(len(available_cores()), "CPU core") if on_cpu else counted(host.devices, "GPU")
    value = f"{host.name}, {(usable_memory() if on_cpu else host.memory or 0) / 2**30:.1f} GiB"
    value += f"; copies {(host.memory_bandwidth or 0.0) * host.devices / 1e9:,.1f} GB/s"
    yield Finding(
        name, "ok", value + (f", {host.host_link / 1e9:,.1f} GB/s each to the host" if host.host_link else "")
    )
    if level is not None:
        sums, messages = (level.bandwidth * part / 1e6 for part in (level.efficiency.all_reduce, level.efficiency.send))
        value = f"{level.latency_ms:.2f} ms latency; per worker sums {sums:,.0f} MB/s, messages {messages:,.0f} MB/s"
        yield Finding(f"link of {counted(cluster.workers, 'worker')}", "ok", f"{cluster.name}: {value}")


# ------------------------------------------------------------------------------------------------- a run that hangs


def run_hang(run: Path) -> int:
    """Print what each worker of the job that wrote last in a run directory is in, and what it did last.

    The workers do the same collectives in the same order, and number them (`hybridpar.comm.flight`): the one whose
    number is behind the others' is the one that they wait for.
    """
    from hybridpar.comm.flight import FOLDER, read_flights

    flights = read_flights(run / FOLDER)
    check(
        bool(flights),
        f"--hang {run}: no worker has left a record there",
        f"Workers keep one in {FOLDER}/ until they end in an orderly way, but for those of parameter servers.",
        "Name the directory of a run that stands still, on the machine of its workers.",
    )
    last = max(flights, key=lambda flight: flight.changed)
    flights = [flight for flight in flights if (flight.job, flight.size) == (last.job, last.size)]
    print("\n".join(hang_lines(flights, time.time())))
    return 0


def hang_lines(flights: Sequence[Flight], now: float) -> Iterator[str]:
    """What the workers of a job are in, and what they did last, a line for each lane."""
    from hybridpar.comm.flight import process_state
    from hybridpar.observe.records import format_duration

    for flight in flights:
        state = process_state(flight.pid) if flight.host == socket.gethostname() else "on another machine"
        yield f"worker {flight.rank}   process {flight.pid} on {flight.host}, {state}"
        for lane, notes in flight.lanes.items():
            parts = [f"in {note.text} since {format_duration(now - note.begin)}" for note in notes if note.end is None]
            if done := [(note.end, note.text) for note in notes if note.end is not None]:
                end, text = max(done)
                parts.append(f"last done: {text}, {format_duration(now - end)} ago")
            yield f"  {lane}: {'; '.join(parts)}"
    if missing := sorted(set(range(flights[0].size)) - {flight.rank for flight in flights}):
        yield f"no record here of workers {', '.join(map(str, missing))}"
    yield "`py-spy dump --pid PID` shows the stack of a process."
