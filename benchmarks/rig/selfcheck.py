"""Checks that the shaped links deliver their nominal bandwidth.

Runs inside the ranks, started by `python -m benchmarks.rig`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rig.network import bits_per_second
from benchmarks.rig.paired import Paired, paired
from benchmarks.rig.rank import link, process_group, sent_bytes
from benchmarks.rig.rows import row
from benchmarks.rig.table import append_rows, check_csv, print_rows, wide_console
from hybridpar.models import build_model, seed_everything

MEGABYTES = (1, 11, 45)
BATCH = 16
#: How far the wire may be from its nominal rate.
TOLERANCE = 0.06
#: Of an Ethernet frame of 1514 bytes, TCP over IPv4 with time stamps leaves 1448 for payload (RFC 894, 9293, 7323).
FRAME_OVER_PAYLOAD = 1514 / 1448


def measure(rounds: int, output: str | None) -> None:
    """Run both checks in this rank; rank 0 exits with 1 if the link is not what it is said to be."""
    with process_group() as (rank, ranks):
        console = wide_console(quiet=rank != 0)
        good = _check_link(rounds, ranks, console)
        result, sent = _measure_ddp(rounds, rank)
        if rank == 0:
            rows = [
                row(
                    result,
                    method,
                    "fp32",
                    claim="rig",
                    setting=f"ResNet-18, 32x32 images, batch {BATCH} per rank, DDP",
                    link=link(),
                    ranks=ranks,
                    extra={"sent_bytes_per_step": sent[method]} if sent else {},
                )
                for method in result.milliseconds
            ]
            print_rows(rows, console)
            for name, count in sent.items():
                console.print(f"rank 0 sends {count / 1e6:.2f} MB per step: {name}")
            if output is not None:
                append_rows(Path(output), rows)
                check_csv(Path(output))
    if rank == 0 and not good:  # one rank is enough to say so
        sys.exit(1)


def _check_link(rounds: int, ranks: int, console: Console) -> bool:
    """Time all-reduces of several sizes; whether the largest runs at the link's rate."""
    tensors = {f"{size} MB": torch.zeros(size * 1_000_000 // 4) for size in MEGABYTES}
    # What fits into the shaper's bucket rides free, so that small messages are timed back to back.
    repeats = {name: max(1, 22_000_000 // (4 * tensor.numel())) for name, tensor in tensors.items()}

    def all_reduce(tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: dist.all_reduce(tensor)

    result = paired({name: all_reduce(tensor) for name, tensor in tensors.items()}, rounds, repeats=repeats)
    nominal = bits_per_second(link())
    table = Table(title=f"all-reduce of {ranks} ranks on {link()}", title_justify="left")
    for column in ("size", "median ms", "min ms", "payload Mbit/s", "wire Mbit/s", "of nominal"):
        table.add_column(column, justify="right")
    share = 0.0
    for name, tensor in tensors.items():
        # A ring moves 2(K-1)/K of the tensor over each link (Patarasuk and Yuan 2009).
        payload = 2 * (ranks - 1) / ranks * tensor.nbytes * 8 / (result.median_ms(name) / 1e3)
        wire = payload * FRAME_OVER_PAYLOAD
        share = wire / nominal if nominal else 0.0
        table.add_row(
            name,
            f"{result.median_ms(name):.2f}",
            f"{result.min_ms(name):.2f}",
            f"{payload / 1e6:.0f}",
            f"{wire / 1e6:.0f}" if nominal else "-",
            f"{share:.1%}" if nominal else "-",
        )
    console.print(table)
    console.print(f"{result.rounds} rounds, {result.dropped} dropped, foreign load {result.load:.2f} cores")
    if nominal is None:
        return True
    good = abs(share - 1) <= TOLERANCE
    busy = " The machine was busy, so try again when it is not." if result.loaded and not good else ""
    console.print(f"link: {'ok' if good else 'FAILED'}, {share:.1%} of {link()}, {TOLERANCE:.0%} off is allowed.{busy}")
    return good


def _measure_ddp(rounds: int, rank: int) -> tuple[Paired, dict[str, int]]:
    """DistributedDataParallel with and without its gradient exchange, and the bytes that this rank sends in a step.

    No bytes on the loopback: its one counter is shared by all processes.
    """
    criterion = nn.CrossEntropyLoss()
    torch.manual_seed(rank)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def step(exchange: bool) -> Callable[[], object]:
        seed_everything(0)
        model = DistributedDataParallel(build_model("resnet18", 10), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def run() -> None:
            optimizer.zero_grad()
            if exchange:
                criterion(model(images), labels).backward()
            else:
                with model.no_sync():
                    criterion(model(images), labels).backward()
            optimizer.step()

        return run

    methods = {"fp32": step(True), "no sync": step(False)}
    result = paired(methods, rounds)
    sent: dict[str, int] = {}
    for name, method in methods.items() if link() != "loopback" else ():
        dist.barrier()
        before = sent_bytes()
        method()
        sent[name] = sent_bytes() - before
    return result, sent
