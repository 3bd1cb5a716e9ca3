"""Command `python -m benchmarks.rig`: checks in a minute whether this machine can take the project's tables.

All-reduces of several sizes must run at the link's nominal rate, and DDP is timed with its gradient exchange and
without it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from benchmarks.rig.launch import measure_in_ranks, run_command
from benchmarks.rig.network import Network, bits_per_second
from benchmarks.rig.paired import paired
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.records import wide_console
from benchmarks.rig.rows import row, write_rows
from benchmarks.rig.task import Loop, Setting, bytes_of, fast_ddp

MEGABYTES = (1, 11, 45)
SETTING = Setting("resnet18", 32, 16)
#: How far the wire may be from its nominal rate.
TOLERANCE = 0.06
#: Of an Ethernet frame of 1514 bytes, TCP over IPv4 with time stamps leaves 1448 for payload (RFC 894, 9293, 7323).
FRAME_OVER_PAYLOAD = 1514 / 1448


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the rig's own link, and DDP with and without its gradient exchange on it."""

    ranks: int = 2
    """Number of ranks."""
    rate: str = "1gbit"
    """Each rank's link: loopback, or a rate and perhaps more, as 1gbit or 100mbit+10ms (`benchmarks/README.md`)."""
    rounds: int = 20
    """Rounds to keep."""
    threads: int = 1
    """Threads per rank."""
    output: Path | None = None
    """Table to add the rows to."""


def main(options: Options) -> None:
    """Run the check in the ranks; one of them fails if the link is not what it is said to be."""
    with Network(options.ranks, options.rate) as network:
        arguments = {"rounds": options.rounds, "output": options.output}
        measure_in_ranks(network, "benchmarks.rig.__main__", arguments, timeout=900, threads=options.threads)


def measure(rounds: int, output: str | None) -> None:
    """Run both checks in this rank; rank 0 exits with 1 if the link is not what it is said to be."""
    with process_group() as (rank, ranks):
        is_good = _check_link(rounds, rank, ranks)
        batch = SETTING.noise(rank)
        loops = {"fp32": Loop(SETTING, fast_ddp), "no sync": Loop(SETTING)}
        methods = {name: partial(loop.step, *batch) for name, loop in loops.items()}
        result = paired(methods, rounds)
        sent = {name: bytes_of(method) for name, method in methods.items()}
        if rank == 0:
            setting = f"{SETTING} per rank, DDP"
            common: dict[str, Any] = {"claim": "rig", "setting": setting, "link": link(), "ranks": ranks}
            rows = [row(result, name, "fp32", extra={"sent_bytes_per_step": sent[name]}, **common) for name in methods]
            write_rows(rows, output)
    if rank == 0 and not is_good:  # one rank is enough to say so
        sys.exit(1)


def _check_link(rounds: int, rank: int, ranks: int) -> bool:
    """Time all-reduces of several sizes; whether the largest runs at the link's rate."""
    tensors = {f"{size} MB": torch.zeros(size * 1_000_000 // 4) for size in MEGABYTES}
    # What fits into the shaper's bucket rides free, so that small messages are timed back to back.
    repeats = {name: max(1, 22_000_000 // (4 * tensor.numel())) for name, tensor in tensors.items()}
    methods = {name: partial(dist.all_reduce, tensor) for name, tensor in tensors.items()}
    result = paired(methods, rounds, repeats=repeats)
    nominal = bits_per_second(link())
    table = Table("size", "median ms", "min ms", "wire Mbit/s", "of nominal", title=f"{ranks} ranks on {link()}")
    share = 0.0
    for name, tensor in tensors.items():
        # A ring moves 2(K-1)/K of the tensor over each link (Patarasuk and Yuan 2009).
        wire = 2 * (ranks - 1) / ranks * tensor.nbytes * 8 / (result.median_ms(name) / 1e3) * FRAME_OVER_PAYLOAD
        share = wire / nominal if nominal else 0.0
        times = f"{result.median_ms(name):.2f}", f"{result.min_ms(name):.2f}"
        table.add_row(name, *times, f"{wire / 1e6:.0f}", f"{share:.1%}" if nominal else "-")
    console = wide_console(quiet=rank != 0)
    console.print(table)
    console.print(f"{result.rounds} rounds, {result.dropped} dropped, foreign load {result.load:.2f} cores")
    if nominal is None:
        return True
    is_good = abs(share - 1) <= TOLERANCE
    busy = " The machine was busy, so try again when it is not." if result.loaded and not is_good else ""
    word = "ok" if is_good else "FAILED"
    console.print(f"link: {word}, {share:.1%} of {link()}, {TOLERANCE:.0%} off is allowed.{busy}")
    return is_good


if __name__ == "__main__":
    run_command(main, Options)
