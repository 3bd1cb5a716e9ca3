"""Times training steps with every compression method on links of several rates.

A codec sends fewer bytes but costs CPU time, so the whole step is timed.

All methods run in the same processes and take one step each per round (`benchmarks/README.md`). Before that, each has
taken its first steps untimed: shapes are found, buckets are cut anew, and PowerSGD begins to compress. Two more steps
are counted by the interface, and shown beside the bytes that a method declares.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.rig.paired import paired
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.rows import row, write_rows
from benchmarks.rig.task import TINY, Setting, bytes_of
from benchmarks.sync.methods import WORK, Job, Method, make_methods
from benchmarks.sync.peers import PEERS, checkouts

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
) -> None:
    """Time all methods in this rank, and write the rows in rank 0.

    Args:
        quick: A small net.
        methods: Their names.
        model: What is trained, of torchvision.
        size: Rows and columns of an image.
        rounds: Rounds to keep.
        keep_busy: Keep rounds in which others used the machine.
        output: The table.
        peers: Folder with the peers' checkouts.
    """
    setting = Setting(TINY, 16, 4) if quick else Setting(model, size, 16)
    commits = checkouts(Path(peers) if peers else None)
    # A step of the slowest peer takes 6 s at 100 Mbit/s; four ranks on two cores wait for each other's start as well.
    with process_group(timeout=180) as (rank, ranks):
        job = Job(setting, rank, ranks, Path(peers) if peers else None)
        made = make_methods(methods, job)
        try:
            steps = {name: partial(method.step, *setting.noise(rank)) for name, method in made.items()}
            facts: dict[str, dict[str, Any]] = {}
            for name, step in steps.items():
                for _ in range(_FIRST):
                    step()
                facts[name] = {"work": WORK, "sent_bytes_of_rank_0": bytes_of(step, _COUNTED)}
                facts[name]["declared_bytes"] = made[name].declared_bytes
            result = paired(steps, rounds, warmup=1, keep_busy=keep_busy)
            for name, method in made.items():
                peer = PEERS.get(name)
                facts[name] |= {"replicas_equal": _replicas_equal(method), "note": method.note}
                facts[name]["checkout"] = None if peer is None else commits[peer.project]
        finally:
            for method in made.values():
                method.close()
            job.close()
        if rank == 0:
            # On links on which a step of DDP takes half a minute it may be left out.
            baseline = BASELINE if BASELINE in made else next(iter(made))
            common: dict[str, Any] = {"claim": "sync", "setting": f"{setting} per rank", "link": link(), "ranks": ranks}
            extras = {name: {key: fact for key, fact in facts[name].items() if fact not in (None, "")} for name in made}
            write_rows([row(result, name, baseline, extra=extras[name], **common) for name in made], output)
            for name, extra in extras.items():
                print(f"  {name}: {', '.join(f'{key} {fact}' for key, fact in extra.items() if key != 'work')}")


def _replicas_equal(method: Method) -> bool:
    """Whether all workers hold the same weights, bit for bit; a collective."""
    digest = hashlib.sha256()
    for parameter in method.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1
