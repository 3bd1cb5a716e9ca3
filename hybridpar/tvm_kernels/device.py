"""The fingerprint of a CPU, by which records of one kind of CPU are told from those of another."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from hybridpar.machine.cluster import cpu_name


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
