"""Times training steps with every compression method on links of three rates.

A codec sends fewer bytes but costs CPU time, so the whole step is timed.

All methods run in the same processes and take one step each per round (`benchmarks/README.md`). Before that, each has
taken its first steps untimed: shapes are found, buckets are cut anew, and PowerSGD begins to compress. Two more steps
are counted by the interface, and shown beside the bytes that a method declares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rig.network import LOOPBACK
from benchmarks.rig.paired import FOREIGN_LOAD, paired
from benchmarks.rig.rank import link, process_group, sent_bytes
from benchmarks.rig.rows import Row, row
from benchmarks.rig.table import append_rows, check_csv, print_rows
from benchmarks.sync.methods import TINY, WORK, Method, Setting, Workplace, make_method
from benchmarks.sync.peers import PEERS
from hybridpar.errors import UsageError

BASELINE = "ddp"
#: Untimed steps, and steps that the interface counts. PowerSGD of epfml sends its two factors in turn.
_FIRST, _COUNTED = 3, 2


def measure(
    quick: bool,
    methods: list[str],
    model: str,
    size: int,
    rounds: int,
    keep_busy: bool,
    output: str | None,
    peers: str | None,
    commits: dict[str, str],
) -> None:
    """Time all methods in this rank, and write the rows in rank 0.

    Args:
        quick: A small net.
        methods: Their names.
        model: What is trained, of torchvision.
        size: Rows and columns of an image.
        rounds: Rounds to keep.
        keep_busy: Keep rounds in which others used the machine.
        output: Folder for the tables.
        peers: Folder with the peers' checkouts.
        commits: Of each peer's project that is there.
    """
    setting = Setting(TINY, 16, 4) if quick else Setting(model, size)
    # A step of the slowest peer takes 6 s at 100 Mbit/s; four ranks on two cores wait for each other's start as well.
    with process_group(timeout=180) as (rank, ranks):
        place = Workplace(setting, rank, ranks, Path(peers) if peers else None)
        batch = setting.noise(rank)
        made: dict[str, Method] = {}
        facts: dict[str, dict[str, Any]] = {}
        try:
            for name in methods:
                try:
                    made[name] = make_method(name, place)
                except UsageError as error:  # the same on all ranks, before anything was sent
                    if rank == 0:
                        print(f"{link()}: no row for {name}: {error.what}", flush=True)
                    continue
                facts[name] = _count(made[name], batch)
            limit = float("inf") if keep_busy else FOREIGN_LOAD
            steps = {name: _step_of(method, batch) for name, method in made.items()}
            result = paired(steps, rounds, warmup=1, foreign_load=limit)
            for name, method in made.items():
                facts[name]["replicas_equal"] = _replicas_equal(method)
        finally:
            for method in made.values():
                method.close()
            place.close()
        if rank:
            return
        common: dict[str, Any] = {"claim": "sync", "setting": str(setting), "link": link(), "ranks": ranks}
        rows = []
        # On links on which a step of DDP takes half a minute it may be left out.
        baseline = BASELINE if BASELINE in made else next(iter(made))
        for name in made:
            extra = {"work": WORK} | facts[name]
            if made[name].note:
                extra["note"] = made[name].note
            if name in PEERS:
                extra["checkout"] = commits[PEERS[name].project]
            rows.append(row(result, name, baseline, extra=extra, **common))
        _show(rows)
        if output is not None:
            append_rows(Path(output) / "links.csv", rows)
            check_csv(Path(output) / "links.csv")


def _step_of(method: Method, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    return lambda: method.step(*batch)


def _count(method: Method, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Take the first steps, and count bytes of rank 0; on the loopback only those that the method declares."""
    for _ in range(_FIRST):
        method.step(*batch)
    facts: dict[str, Any] = {}
    if link() != LOOPBACK:
        dist.barrier()
        before = sent_bytes()
    declared = []
    for _ in range(_COUNTED):
        method.step(*batch)
        declared.append(method.declared_bytes)
    if link() != LOOPBACK:
        facts["sent_bytes_of_rank_0"] = (sent_bytes() - before) // _COUNTED
    if (last := declared[-1]) is not None:
        facts["declared_bytes"] = last
    return facts


def _replicas_equal(method: Method) -> bool:
    """Whether all workers hold the same weights, bit for bit; a collective."""
    digest = hashlib.sha256()
    for parameter in method.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


def _show(rows: list[Row]) -> None:
    print_rows(rows)
    for entry in rows:
        note = f" ({entry.extra['note']})" if "note" in entry.extra else ""
        print(f"  {entry.method}: {_bytes(entry.extra)}, replicas equal: {entry.extra['replicas_equal']}{note}")


def _bytes(extra: Mapping[str, Any]) -> str:
    parts = [
        f"{words} {extra[key] / 1e6:.3f} MB"
        for key, words in (("sent_bytes_of_rank_0", "interface"), ("declared_bytes", "declared"))
        if key in extra
    ]
    return ", ".join(parts) or "bytes not counted"
