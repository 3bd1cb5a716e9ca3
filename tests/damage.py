"""Damages good files of every kind at random, and checks that readers refuse them with a short error.

    python -m tests.damage --mutants 100000

Every kind of file that this package reads has a good example and a reader. A reader returns, or raises one error of the
package with a short message; whatever else it raises is printed with the seed that leads to it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hybridpar.comm.world import World
from hybridpar.data.sources import ImageFacts
from hybridpar.errors import HybridparError
from hybridpar.formats import cache
from hybridpar.machine.cluster_file import read_cluster_file
from hybridpar.observe.metrics import read_metrics
from hybridpar.observe.timeline import trace_of
from hybridpar.partition import profile_cache
from hybridpar.partition.profile import UnitTimes
from hybridpar.plan import Partition, Placement, Plan, Stage, Sync, SyncRule, read_plan
from hybridpar.planner.inputs import inputs_of_plan
from hybridpar.run import directory as rundir
from hybridpar.schedule.actions import read_schedule
from hybridpar.schedule.layout import Layout as StageLayout
from hybridpar.train.checkpoint import CheckpointData, load_checkpoint, save_checkpoint
from hybridpar.tvm_kernels.database import read_database
from hybridpar.tvm_kernels.shapes import Direction, Layout
from tests.machine.test_cluster_file import TEXT as CLUSTER
from tests.observe.timelines import a_timeline
from tests.planner import small
from tests.runs import read_timeline
from tests.tvm_kernels.standin import record_of

#: The passes of a schedule, as a plan holds them.
ROWS = b"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"

#: Characters of the longest message.
LONGEST_MESSAGE = 1_500

#: Seconds and bytes of address space of a reader; not looked at in the test suite.
MOST_SECONDS, MOST_MEMORY = 30, 16 << 30


#: The content of a good file, and what reads it.
Kind = tuple[bytes, Callable[[Path], object]]


# ---------------------------------------------------------------------------------------------------------- good files

PROFILE_KEY = {"model": "m", "units": ["a", "b"]}


def _plan() -> bytes:
    inputs = small.inputs().to_data()
    plan = Plan(
        model=small.inputs().profile.info,
        partition=Partition(stages=(Stage(units=("u0",), forward_ms=1.5), Stage(units=("u1",))), micro_batch=8),
        placement=Placement(layout=StageLayout.dealt(2, 2, replicas=2)),
        sync=Sync(policy=(SyncRule(pattern="fc.*", codec="topk:ratio=0.01"), SyncRule())),
        inputs=inputs,
    )
    return plan.to_json().encode()


def _read_plan(path: Path) -> None:
    plan = read_plan(path)
    assert plan.workers is None or plan.workers > 0
    if plan.inputs is not None:
        inputs_of_plan(plan)


def _metrics() -> bytes:
    steps = [{"step": step, "epoch": 0, "loss": 1.5 / step, "step_ms": 20.0, "skipped": False} for step in range(1, 5)]
    end = {"event": "epoch", "epoch": 0, "step": 4, "test_accuracy": 0.5, "test_loss": 1.0, "seconds": 2.0}
    return b"".join(json.dumps(row).encode() + b"\n" for row in [*steps, end])


def _database() -> bytes:
    records = [record_of("2x4x8x8 k3x3 s1x1 p1x1 d1x1", one, Layout.CHANNELS_LAST) for one in Direction]
    return "".join(f"{record.line()}\n" for record in records).encode()


def _read_times(path: Path) -> None:
    with mock.patch.object(cache, "measurement_file", return_value=path):
        cache.load_measurement("units", PROFILE_KEY, profile_cache.TIMES)


def kinds() -> dict[str, Kind]:
    """All kinds of files but checkpoints, by name."""
    timeline = a_timeline(steps=(1,), replicas=1, predicted=False)
    times = UnitTimes((1.0, 2.0), (2.0, 3.0), 9.0, 0.1)
    return {
        "plan.json": (_plan(), _read_plan),
        "cluster.toml": (CLUSTER.encode(), read_cluster_file),
        "run.json": (RUN, _find_run),
        "trace.json": (json.dumps(trace_of(timeline)).encode(), read_timeline),
        "metrics.jsonl": (_metrics(), lambda path: read_metrics(path.parent)),
        "kernels.jsonl": (_database(), read_database),
        "schedule.csv": (ROWS, lambda path: read_schedule(path.read_text(encoding="utf-8", errors="replace"))),
        "units-1.json": (json.dumps({"key": PROFILE_KEY, "data": asdict(times)}).encode(), _read_times),
    }


RUN = b"""{"model": "net", "job": "7", "options": {"lr": 0.1, "nproc": 2, "mean": [0.1, 0.2, 0.3], "amp": "bf16",
"recompute": [1], "data_root": "data", "model_arg": ["a=1"], "plan": "auto"}, "images": {"class_names":
["a", "b"], "sample_shape": [3, 8, 8], "mean": [0.5, 0.5, 0.5], "std": [1, 1, 1], "test_size": 8, "whole": true,
"multi_label": false}}"""


def _find_run(path: Path) -> object:
    facts = rundir.read_facts(path.parent)
    return rundir.recorded_config(facts, path.parent), ImageFacts.read(facts.get("images"))


# -------------------------------------------------------------------------------------------------------------- damage

#: What stands where something else was: in JSON, and mostly in TOML, too.
ODD = (
    *(b"null", b"[]", b"{}", b"-1", b"0", b"1e999", b"-1e999", b"NaN", b"nan", b"inf", b"true", b'""', b'"\\ud800"'),
    *(b"1" * 5_000, b"1" * 400, b"99999999999999999999", b"0.5", b"'", b'"', b"\x00", b"\xff", b"\n", b",", b"]"),
    *(b'"' + b"x" * 20_000 + b'"', b"[" * 3_000, b"[" * 200 + b"]" * 200, b'{"a":' * 2_000, b"a." * 3_000 + b"a=1"),
    *(b'"1e308GB"', b'"' + b"9" * 400 + b'GB"', b"k" * 20_000),
)


def damaged(good: bytes, chance: random.Random) -> bytes:
    """A file with one to three things wrong in it."""
    data = good
    for _ in range(chance.randint(1, 3)):
        data = chance.choice(_DAMAGES)(data, chance)
    return data


def _flip(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def _cut(data: bytes, chance: random.Random) -> bytes:
    first = chance.randint(0, len(data))
    return data[:first] + (b"" if chance.random() < 0.3 else data[chance.randint(first, len(data)) :])


def _repeat(data: bytes, chance: random.Random) -> bytes:
    first = chance.randint(0, len(data))
    last = min(len(data), first + chance.randint(0, 200))
    return data[:last] + data[first:last] * chance.choice((1, 2, 50)) + data[last:]


def _insert(data: bytes, chance: random.Random) -> bytes:
    at = chance.randint(0, len(data))
    return data[:at] + chance.choice(ODD) + data[at:]


def _other_node(data: bytes, chance: random.Random) -> bytes:
    """Another value anywhere in a JSON document or one of its lines, so that it stays JSON."""
    lines = data.split(b"\n") if data.count(b"\n{") else [data]
    number = chance.randrange(len(lines))
    try:
        document = json.loads(lines[number])
    except (ValueError, RecursionError):
        return _flip(data, chance)
    places = list(_places(document))
    if places:
        holder, key = chance.choice(places)
        if chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = chance.choice(_NODES)
    lines[number] = json.dumps(document).encode()
    return b"\n".join(lines)


_NODES: tuple[Any, ...] = (
    *(None, True, [], {}, [[]], "", "x" * 20_000, "\ud800", -1, 0, 10**19, 10**25, 10**400, 1e308, float("inf")),
    *(float("nan"), [1], {"a": 1}, ["a"] * 2, {"x" * 5_000: 1}, 0.5, "1F0", "-1", 2.5, 1 << 17),
)


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(inner):
        yield node, key
        yield from _places(value)


_DAMAGES = (_flip, _cut, _repeat, _insert, _insert, _other_node, _other_node)


# --------------------------------------------------------------------------------------------------------- checkpoints


class _File:
    """A file of a kind, and damaged ones in its place."""

    def __init__(self, folder: Path, name: str) -> None:
        self._good, self._read = kinds()[name]
        self._path = folder / name

    def damage(self, chance: random.Random) -> None:
        """Put a damaged file in its place."""
        self._path.write_bytes(damaged(self._good, chance))

    def read(self) -> None:
        """Read it."""
        self._read(self._path)


class _Checkpoint:
    """A small checkpoint, and damaged copies of its files."""

    def __init__(self, folder: Path) -> None:
        moments = {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}}
        optimizer = {"kind": "AdamW", "groups": [{"names": ["w"], "lr": 0.1, "betas": (0.9, 0.999)}], "state": moments}
        model = {"w": torch.ones(2, 3), "b": torch.arange(3)}
        training = {"optimizer": optimizer, "extra": {"note": [1, None, "a" * 300, 2**70], "set": {1, 2}}}
        sync = {"pipeline": {"orders": {"0": {"order": ["w", "b"]}}}}
        local = {"random": {"torch": torch.get_rng_state()[:8]}, "sync": sync}
        self.path = save_checkpoint(folder, CheckpointData(3, "f" * 16, model, training, local), World())
        self._good = {path.name: path.read_bytes() for path in self.path.iterdir()}

    def damage(self, chance: random.Random) -> None:
        """Damage one file; mostly the manifest follows, so that the file itself is read."""
        name = chance.choice(sorted(self._good))
        data = self._good[name]
        if name == "manifest.json":
            self._write({name: damaged(data, chance)})
            return
        data = damaged(data, chance)
        manifest = json.loads(self._good["manifest.json"])
        if chance.random() < 0.95:
            manifest["files"][name] = hashlib.sha256(data).hexdigest()
        self._write({name: data, "manifest.json": json.dumps(manifest).encode()})

    def read(self) -> None:
        """Read all of it."""
        load_checkpoint(self.path)

    def _write(self, changed: Mapping[str, bytes]) -> None:
        for name, data in {**self._good, **changed}.items():
            path = self.path / name
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)


# ------------------------------------------------------------------------------------------------------------- readers


def complaint(read: Callable[[], object]) -> str | None:
    """What is wrong with how a damaged file was read; None where that is as it should be."""
    try:
        read()
    except HybridparError as error:
        told = str(error)
        if len(told) > LONGEST_MESSAGE:
            return f"a message of {len(told)} characters: {told[:300]}"
        try:
            told.encode()
        except UnicodeEncodeError:
            return f"a message that cannot be printed: {told!r}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "".join(traceback.format_exception(error)[-6:])
    return None


def complaints(name: str, mutants: int, seed: int = 0) -> list[str]:
    """Damage a kind of file in many ways, and say what went wrong.

    Args:
        name: Of the kind; `checkpoint` is one.
        mutants: How many damaged files.
        seed: Of the first.

    Returns:
        The seed of each and what happened.
    """
    found: list[str] = []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # some readers tell what they leave out
    try:
        with tempfile.TemporaryDirectory(dir=memory) as temporary:
            subject = _Checkpoint(Path(temporary)) if name == "checkpoint" else _File(Path(temporary), name)
            for number in range(seed, seed + mutants):
                subject.damage(random.Random(f"{name} {number}"))
                if (wrong := complaint(subject.read)) is not None:
                    found.append(f"{name} {number}: {wrong}")
    finally:
        logging.disable(before)
    return found


def names() -> list[str]:
    """Of all kinds."""
    return ["checkpoint", *kinds()]


def main() -> int:
    """Damage files of every kind, within bounded time and memory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--mutants", type=int, default=100_000, help="damaged files of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--kind", choices=names(), help="only this kind")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    chosen, failed = [options.kind] if options.kind else names(), 0
    each = max(1, options.mutants // len(chosen))
    for name in chosen:
        signal.alarm(MOST_SECONDS * each // 100)
        found = complaints(name, each, options.seed)
        signal.alarm(0)
        print(f"{name}: {each} damaged files, {len(found)} complaint(s)", *found[:10], sep="\n", flush=True)
        failed += len(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
