"""Measures the throughput of each codec on one core, without links or backward passes.

`hybridpar bench codecs` on ResNet-18, with the target rates: for one core with AVX-512, which `extra` says
of the machine at hand.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.pipeline.checks import Check, write_checks
from hybridpar.commands.bench.codecs import CodecSpeed, measure_in_processes
from hybridpar.commands.bench.request import BenchCodecs

#: GB/s at least of each figure, by codec and code.
TARGETS = {
    ("onebit", "compiled"): {"encode": 10.0, "decode_add": 25.0},
    ("onebit", "torch"): {"encode": 2.0, "decode_add": 6.0},
    ("twobit", "compiled"): {"encode": 6.0},
    ("qsgd_mn:meet=shard", "compiled"): {"encode": 6.0},
}
FIGURES = ("encode", "decode_add", "merge", "decode")


def measure(quick: bool, output: str | None) -> None:
    """Measure, print and write; in processes of its own.

    Args:
        quick: A small net.
        output: The table's file.
    """
    request = BenchCodecs()
    if quick:
        request = BenchCodecs(model="mobilenet_v2", repeats=1, codec=("onebit", "fp16"))
    rows = [
        _row(request, speed, figure)
        for speed in measure_in_processes(request)
        for figure in FIGURES
        if getattr(speed, figure) is not None
    ]
    write_checks(rows, output, title="sync")


def _row(request: BenchCodecs, speed: CodecSpeed, figure: str) -> Check:
    value = getattr(speed, figure)
    return Check(
        setting=f"{request.model}, whole model, one core, {speed.code}",
        link="none",
        what=f"{figure} in GB/s, {speed.codec}",
        value=value,
        low=value,
        high=value,
        at_least=TARGETS.get((speed.codec, speed.code), {}).get(figure),
        extra=f"memcpy {speed.memcpy:.2f} GB/s, {'AVX-512' if _wide() else 'no AVX-512'}",
    )


def _wide() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "avx512f" in cpu.read_text()
