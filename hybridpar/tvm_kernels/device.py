"""The instruction sets and the fingerprint of a CPU; records of kernels hold for one fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
from functools import cache
from pathlib import Path

from hybridpar.machine.cluster import cpu_name


@cache
def cpu_features() -> frozenset[str]:
    """The instruction sets of the CPU, as Linux names them; empty where they are not known."""
    features: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                features.update(value.split())
    return frozenset(features)


@cache
def cpu_fingerprint() -> str:
    """The CPU's name and eight digits over its instruction sets, which differ between kinds of CPU."""
    digest = hashlib.sha256(" ".join(sorted(cpu_features())).encode()).hexdigest()[:8]
    return f"{cpu_name()} {digest}"
