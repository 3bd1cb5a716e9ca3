"""Why: a time holds for the device and the versions it was measured with, and for no others."""

from __future__ import annotations

import hashlib
import importlib.metadata
from functools import cache
from pathlib import Path

from hybridpar.machine.cluster import cpu_name

#: Raised where the same parameters come to mean other code, so that old times say nothing any more.
SCHEDULES = 2


@cache
def cpu_fingerprint() -> str:
    """The CPU's name and eight digits over its instruction sets: what tells two kinds of CPU apart."""
    features: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                features.update(value.split())
    except OSError:
        pass
    digest = hashlib.sha256(" ".join(sorted(features)).encode()).hexdigest()[:8]
    return f"{cpu_name()} {digest}"


@cache
def installed_versions() -> tuple[tuple[str, str], ...]:
    """Versions that a kernel's time and that of its rival depend on, by name."""
    found = {"schedules": str(SCHEDULES)}
    for name, distribution in (("tvm", "apache-tvm"), ("torch", "torch")):
        try:
            found[name] = importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return tuple(sorted(found.items()))
