"""Measures the step time of double buffering (gradients applied one step late) on a shaped link.

Stale gradients pay only if they save time that overlap within a step does not already save.

The setting of the paper: a link on which one exchange takes about as long as half a batch is computed. Its rate follows
from a first run on the loopback: bytes of a step, over half the time of computing less what writing and reading take.

A round is `REPEATS` steps of a method as one. With late gradients its first step sends what the last step of the round
before computed, so every round has as many exchanges as steps, and none of them runs in the time of another method.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rig.paired import FOREIGN_LOAD, paired
from benchmarks.rig.rank import link, process_group, sent_bytes
from benchmarks.rig.rows import row
from benchmarks.rig.table import append_rows, print_rows
from benchmarks.sync.methods import TINY, Setting
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.train.trainer import Trainer

#: Samples of a rank. Codecs compute on the very core that the model does, which no delay can hide; the more samples,
#: the less that is beside the time that the link takes.
BATCH = 96
#: Steps that are timed as one.
REPEATS = 8
CODEC = "onebit"
#: The same codec without overlap of buckets: one bucket, which leaves when backward is over.
PLAIN = "one bucket"
#: What the paper's form must gain over that.
TARGET = 1 / 1.3
_STAGES: dict[str, Any] = {"stages": 2, "replicas": 2, "micro_batches": 2}
_METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {"bucket_mb": 4096.0, "sync_lanes": 1},
    "overlapped": {},
    "delay": {"double_buffer": "delay"},
    "half": {"double_buffer": "half"},
    # Both replicas are pipelines of two lanes.
    "2 stages": _STAGES,
    "2 stages, delay": {**_STAGES, "double_buffer": "delay"},
    "2 stages, half": {**_STAGES, "double_buffer": "half"},
}


class _Method:
    """A trainer that takes steps on noise."""

    def __init__(self, setting: Setting, world: World, options: dict[str, Any]) -> None:
        config = TrainConfig(compress=CODEC, lr=setting.rate, momentum=0.9, weight_decay=0.0, **options)
        self._batch = setting.noise(world.rank)
        example = self._batch[0][: setting.batch // config.micro_batches]
        self._trainer = Trainer(setting.build(), config=config, world=world, example=example)
        #: What each step waited for its exchange, in ms.
        self.exposed: list[float] = []

    def step(self) -> None:
        self.exposed.append(self._trainer.step(self._batch).outcome.exposed_sync_ms)

    def steps(self) -> None:
        """So many steps; what the last one leaves to be sent, the next one sends."""
        for _ in range(REPEATS):
            self.step()

    def close(self) -> None:
        self._trainer.close()


def measure(quick: bool, rounds: int, keep_busy: bool, notes: str, probe: bool, output: str | None = None) -> None:
    """Find the link's rate, or time all methods on it; in this rank.

    Args:
        quick: A small net.
        rounds: Rounds to keep.
        keep_busy: Keep rounds in which others used the machine.
        notes: File of the rate, and of what it follows from.
        probe: Find the rate.
        output: Table to add rows to.
    """
    setting = Setting(TINY, 16, 16) if quick else Setting(batch=BATCH)
    with process_group(timeout=180) as (rank, _):
        if probe:
            _probe(setting, rank, Path(notes))
            return
        # Each trainer has groups of its own, as an exchange of one may be on its way when the next one's begins.
        worlds = {
            name: World.join(lanes=options.get("sync_lanes", 2), shared_memory=False)
            for name, options in _METHODS.items()
        }
        made = {name: _Method(setting, worlds[name], options) for name, options in _METHODS.items()}
        try:
            for method in made.values():
                for _ in range(2):  # shapes are found, buckets are cut anew
                    method.steps()
            steps: dict[str, Callable[[], object]] = {name: method.steps for name, method in made.items()}
            limit = float("inf") if keep_busy else FOREIGN_LOAD
            result = paired(steps, rounds, warmup=1, foreign_load=limit)
            exposed = {name: statistics.median(method.exposed) for name, method in made.items()}
        finally:
            for method in made.values():
                method.close()
            for world in worlds.values():
                world.close()
    if rank:
        return
    facts = json.loads(Path(notes).read_text())
    plain_ms = result.median_ms(PLAIN) / REPEATS
    sync_ms = exposed[PLAIN]
    rows = []
    for name in made:
        extra = {
            "steps_as_one": REPEATS,
            "codec": CODEC,
            "exposed_ms": round(exposed[name], 2),
            "sync_over_half_a_batch": round(2 * sync_ms / max(1e-9, plain_ms - sync_ms), 2),
            "compute_ms_when_the_link_was_chosen": facts["compute_ms"],
        }
        rows.append(
            row(
                result,
                name,
                PLAIN,
                claim="asynchronous",
                setting=f"{setting}, {CODEC}",
                link=link(),
                ranks=2,
                target=TARGET if name in ("delay", "half") else None,
                extra=extra,
            )
        )
    print_rows(rows)
    for one in rows:
        print(f"  {one.method}: {one.extra}")
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        append_rows(Path(output), rows)


def _probe(setting: Setting, rank: int, notes: Path) -> None:
    """Time a step without late gradients on the loopback, and count its bytes."""
    world = World.join(lanes=1, shared_memory=False)
    method = _Method(setting, world, _METHODS[PLAIN])
    times, sent = [], []
    for number in range(8):
        before, started = sent_bytes(), time.perf_counter()
        method.step()
        if number >= 3:
            times.append((time.perf_counter() - started) * 1e3)
            sent.append(sent_bytes() - before)
    exposed = statistics.median(method.exposed[3:])
    compute = statistics.median(times) - exposed
    method.close()
    world.close()
    # The loopback counts what both ranks send. Half of the time on it is left for codecs, if they take less than that.
    bits = 8 * statistics.median(sent) / 2
    wire_ms = max(compute / 2 - exposed, compute / 8)
    rate = max(1, round(bits / wire_ms / 1e3))
    if rank == 0:
        notes.write_text(json.dumps({"rate": f"{rate}mbit", "compute_ms": round(compute, 2)}))
        print(f"computing {compute:.1f} ms, {bits / 8e6:.2f} MB to send: a link of {rate} Mbit/s", flush=True)
