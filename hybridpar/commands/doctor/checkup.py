"""Checks of `hybridpar doctor`: software, tools of the system, and directories.

Every check returns `Finding`s and never raises. What training
cannot do without is `failed` when missing; what a default run misses is a `warning`; the rest is just `absent`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybridpar.errors import LaunchError
from hybridpar.formats.cache import cache_directory
from hybridpar.machine.probe import Programs, program_of

Status = Literal["ok", "absent", "warning", "failed"]

#: The oldest torch that hybridpar supports.
OLDEST_TORCH = (2, 11)

#: Free bytes below which a directory is too full for data, checkpoints or the loader's shared memory.
LOW_SPACE = 1 << 30

_TVM_INSTALL = "python -m pip install 'apache-tvm>=0.27,<0.28' apache-tvm-ffi-orcjit"

#: A program, not an import: `import tvm` takes seconds, and a broken one can crash.
_TVM_PROGRAM = """
import json, sys, tvm, tvm.support
info = tvm.support.libinfo()
facts = {"version": tvm.__version__, "llvm": None, "cuda_build": info.get("USE_CUDA", "OFF") not in ("OFF", "")}
if tvm.runtime.enabled("llvm"):
    facts["llvm"] = tvm.target.codegen.llvm_version_major()
facts["cuda_device"] = bool(tvm.runtime.enabled("cuda")) and bool(tvm.cuda(0).exist)
json.dump(facts, open(sys.argv[1], "w"))
"""

#: Optional packages: what each is for, and whether a default run needs it.
_EXTRAS = (
    ("scikit-learn", "the default data set `digits`", True),
    ("matplotlib", "pictures of plans and timelines", False),
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
    status: Status
    value: str
    fix: str = ""


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
            fix = "python -m pip install --force-reinstall torch torchvision"
            findings.append(Finding("software", "torch", "failed", error.what, fix))
        findings.append(_tvm_finding(tvm))
    return findings + [_extra_finding(*extra) for extra in _EXTRAS], gpus


def _torch_findings(facts: dict[str, Any]) -> list[Finding]:
    group = "software"
    version = facts["torch"]
    build = f"built for CUDA {facts['cuda_build']}" if facts["cuda_build"] else "built for the CPU only"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        fix = f"python -m pip install 'torch>={oldest}' torchvision"
        findings = [Finding(group, "torch", "failed", f"{version} is older than {oldest}", fix)]
    else:
        findings = [Finding(group, "torch", "ok", f"{version}, {build}")]
    if facts["torchvision"] is None:
        fix = "python -m pip install --force-reinstall torchvision"
        findings.append(Finding(group, "torchvision", "failed", "missing, or built for another torch", fix))
    else:
        findings.append(Finding(group, "torchvision", "ok", facts["torchvision"]))
    findings += _gpu_findings(facts)
    has = facts["backends"]
    listed = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in has.items())
    # Gloo is what CPU workers talk over, and what control messages of GPU workers go over.
    status: Status = "ok" if has["gloo"] else "failed"
    fix = "" if has["gloo"] else "python -m pip install --force-reinstall torch"
    return [*findings, Finding(group, "backends", status, listed, fix)]


def _gpu_findings(facts: dict[str, Any]) -> list[Finding]:
    if facts["gpus"] and facts["cuda_error"] is None:
        findings = [Finding("software", "CUDA", "ok", ", ".join(name for name, _ in facts["gpus"]))]
        for index, (name, error) in enumerate(facts["gpus"]):
            if error is not None:
                value = f"{name} cannot be used: {error}"
                findings.append(Finding("software", f"GPU {index}", "warning", value, "nvidia-smi"))
        return findings
    status: Status = "warning"
    reason = facts["cuda_error"] or "torch sees no device"
    value, fix = f"there is a driver, but torch cannot use it: {reason}", "nvidia-smi"
    if not (Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")):
        status, value, fix = "absent", "no NVIDIA driver; training runs on the CPU", ""
    elif facts["cuda_build"] is None:
        fix = "python -m pip install --force-reinstall torch torchvision"
        value = "there is a driver, but torch is built for the CPU only"
    elif os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        value, fix = "CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES"
    return [Finding("software", "CUDA", status, value, fix)]


def _tvm_finding(probe: Programs) -> Finding:
    without = "convolutions use stock kernels"
    try:
        facts = json.loads(probe.answer())
    except LaunchError as error:
        return Finding("software", "TVM", "warning", f"{error.what}; {without}", _TVM_INSTALL)
    if _version("apache-tvm-ffi-orcjit") is None:
        return Finding("software", "TVM", "warning", f"apache-tvm-ffi-orcjit is missing; {without}", _TVM_INSTALL)
    if facts["llvm"] is None:
        return Finding("software", "TVM", "warning", f"{facts['version']} is built without LLVM", _TVM_INSTALL)
    if not facts["cuda_build"]:
        cuda = "no CUDA"
    else:
        cuda = "CUDA" if facts["cuda_device"] else "builds CUDA kernels, but there is no GPU to run them"
    return Finding("software", "TVM", "ok", f"{facts['version']}, LLVM {facts['llvm']}, {cuda}")


def _extra_finding(package: str, purpose: str, by_default: bool) -> Finding:
    version = _version(package)
    if version is not None:
        return Finding("optional packages", package, "ok", f"{version}, {purpose}")
    status: Status = "warning" if by_default else "absent"
    return Finding("optional packages", package, status, f"for {purpose}", f"python -m pip install {package}")


def check_tools() -> list[Finding]:
    """Programs and rights of the system that parts of hybridpar and its benchmarks need."""
    compiler = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    nvcc = shutil.which("nvcc")
    return [
        Finding("system", "C++ compiler", "ok", compiler)
        if compiler
        else Finding("system", "C++ compiler", "absent", "for `--compile`", _install("g++")),
        Finding("system", "nvcc", "ok", nvcc)
        if nvcc
        else Finding("system", "nvcc", "absent", "for building CUDA kernels", _install("nvidia-cuda-toolkit")),
        _network_finding(),
    ]


def _network_finding() -> Finding:
    name, purpose = "network namespaces", "for benchmarks on emulated links"
    if sys.platform != "linux":
        return Finding("system", name, "absent", f"{purpose}; only on Linux")
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return Finding("system", name, "absent", f"{purpose}; ip and tc are missing", _install("iproute2"))
    if not _may_administer():
        return Finding("system", name, "absent", f"{purpose}; needs root", "sudo -E python -m benchmarks.rig")
    return Finding("system", name, "ok", purpose)


def _may_administer(status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process may make network namespaces. Root in a container often may not."""
    net_admin, sys_admin = 12, 21  # capabilities(7)
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status.read_text(), re.MULTILINE)
    held = int(found[1], 16) if found else 0
    return bool(held >> net_admin & held >> sys_admin & 1)


def check_places() -> list[Finding]:
    """Whether the directories that hybridpar writes to can be written, and how much room they have."""
    here, cache = Path.cwd(), cache_directory()
    findings = [
        _place_finding("here", here, "failed", "runs and checkpoints go here", "mkdir -p ~/runs && cd ~/runs"),
        _place_finding(
            "cache", cache, "warning", "without it, every run measures again", "export HYBRIDPAR_CACHE=/tmp/hybridpar"
        ),
    ]
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < LOW_SPACE:
        room = f"{shutil.disk_usage(shared).free / 2**20:,.0f} MiB free; loader processes and NCCL may run out of it"
        findings.append(Finding("directories", "/dev/shm", "warning", room, "mount -o remount,size=8g /dev/shm"))
    return findings


def _place_finding(name: str, place: Path, missing: Status, purpose: str, fix: str) -> Finding:
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Asking for permission is not enough: a full or read-only disk grants it too.
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return Finding("directories", name, missing, f"{place} cannot be written ({error.strerror}); {purpose}", fix)
    free = shutil.disk_usage(place).free
    room = f"{place}, {free / 2**30:,.1f} GiB free"
    if free < LOW_SPACE:
        return Finding("directories", name, "warning", room, f"du -xh --max-depth=1 {place} | sort -h")
    return Finding("directories", name, "ok", room)


def _install(package: str) -> str:
    """The command that installs a package of the system, in Debian's name where no manager is known."""
    managers: Iterable[tuple[str, str]] = (("apt-get", "install -y"), ("dnf", "install -y"), ("brew", "install"))
    for manager, verb in managers:
        if shutil.which(manager):
            sudo = "" if manager == "brew" or os.geteuid() == 0 else "sudo "
            return f"{sudo}{manager} {verb} {package}"
    return f"apt-get install -y {package}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
