"""Times `--shares auto` against equal parts of a batch, on two workers of which one has a part of a core.

Worker 0 is in a control group that may use a core for a half or a third of the time; worker 1 has a whole core. The
same two processes take, in interleaved rounds, steps with equal parts, with parts that `auto` finds and goes on
checking, and steps of DistributedDataParallel, which has equal parts.

    python -m benchmarks.unequal.main                     # as root, for the quota
    python -m benchmarks.unequal.main --speeds 2 --quick  # small, and nothing is written: does it run?
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rig.launch import measure_in_ranks, run_command
from benchmarks.rig.network import LOOPBACK, Network
from benchmarks.rig.paired import paired
from benchmarks.rig.rank import process_group
from benchmarks.rig.rows import row, write_rows
from benchmarks.rig.task import Loop, Setting
from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.data import Batch
from hybridpar.errors import UsageError
from hybridpar.machine.process import available_cores
from hybridpar.run.shares import LEFT_OUT, WATCHED, ShareTuner
from hybridpar.train.results import StepResult

#: How many times as fast worker 1 is: time over that of equal parts, at most, and part of the ideal speed-up, at least.
TARGETS = {1: (1.03, None), 2: (1 / 1.4, 0.95), 3: (1 / 1.9, 0.93)}
#: Length of a period of the quota, in microseconds: far below a step.
_PERIOD = 10_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure shares on unequal workers."""

    speeds: tuple[int, ...] = (1, 2, 3)
    """How many times as fast worker 1 is as worker 0: 1, 2 or 3."""
    rounds: int = 30
    """Rounds to keep."""
    quick: bool = False
    """Small steps, busy rounds kept, nothing written."""
    output: Path = Path(__file__).parent / "results" / "unequal.csv"
    """Table to add the rows to."""


def main(options: Options) -> None:
    """Start the ranks for every ratio of speeds."""
    for speed in options.speeds:
        if speed not in TARGETS:
            raise UsageError(f"--speeds {speed}", f"One of {', '.join(map(str, TARGETS))}.")
        with Network(2, LOOPBACK) as network, _slowed(speed) as group:
            arguments: dict[str, object] = {
                "speed": speed,
                "group": group,
                "quick": options.quick,
                "rounds": options.rounds,
            }
            arguments["output"] = None if options.quick else options.output
            measure_in_ranks(network, "benchmarks.unequal.main", arguments)


@contextmanager
def _slowed(speed: int) -> Iterator[str | None]:
    """A control group that may use one core for 1 / speed of the time; the name of the file that processes join by."""
    if speed == 1:
        yield None
        return
    name, quota = f"hybridpar-unequal-{os.getpid()}", _PERIOD // speed
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    group, limits = new / name, {"cpu.max": f"{quota} {_PERIOD}"}
    if (old / "cpu.cfs_quota_us").exists():
        group, limits = old / name, {"cpu.cfs_period_us": str(_PERIOD), "cpu.cfs_quota_us": str(quota)}
    try:
        group.mkdir()
    except OSError as error:
        raise UsageError(
            f"no control group for a CPU quota: {error.strerror}", "One worker is slowed by one.", "Run it as root."
        ) from error
    try:
        for file, limit in limits.items():
            (group / file).write_text(limit)
        yield str(group / "cgroup.procs")
    finally:
        group.rmdir()


def measure(speed: int, group: str | None, quick: bool, rounds: int, output: str | None) -> None:
    """Measure one ratio of speeds in this rank, and write the rows in rank 0."""
    setting = Setting("resnet18", 32, 32 if quick else 128)
    with process_group() as (rank, ranks):
        if len(available_cores()) >= ranks:  # a core for each
            os.sched_setaffinity(0, {available_cores()[rank]})
        if rank == 0 and group is not None:
            Path(group).write_text(str(os.getpid()))
        world = World.join(lanes=2)
        images, labels = setting.noise()
        trainer = Trainer(setting.build(), setting.optimizer, nn.CrossEntropyLoss(), TrainConfig(), world=world)
        replicas = [[replica] for replica in range(ranks)]
        tuner = ShareTuner(world, replicas, setting.batch, 1, idle=True, in_pairs=False, wait=trainer.wait)
        busy_ms: list[float] = []

        def step(counts: list[int]) -> StepResult:
            start = sum(counts[:rank])
            mine = slice(start, start + counts[rank])
            parts = ((images[mine], labels[mine]),) if counts[rank] else ()
            return trainer.step(Batch(parts, counts[rank], setting.batch))

        def equal() -> None:
            busy_ms.append(step([setting.batch // ranks] * ranks).compute_ms)

        def auto() -> None:
            tuner.note(step(tuner.counts).compute_ms, setting.batch)

        loop = Loop(setting, lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True))
        part = images.chunk(ranks)[rank], labels.chunk(ranks)[rank]
        for _ in range(3 * LEFT_OUT + 7 * WATCHED):  # three decisions
            auto()
        methods: dict[str, Callable[[], object]] = {"equal": equal, "auto": auto, "ddp": lambda: loop.step(*part)}
        result = paired(methods, rounds, keep_busy=output is None)
        trainer.close()
        rates = [1 / float(time) for time in world.gather(statistics.median(busy_ms[3:]))]  # type: ignore[arg-type]
        world.close()
        if rank == 0:
            ideal, reached = statistics.mean(rates) / min(rates), 1 / result.ratio("auto", "equal").median
            at_most, at_least = TARGETS[speed]
            facts = {
                "samples": list(tuner.counts),
                "speeds": round(rates[1] / rates[0], 3),
                "speed_up": round(reached, 3),
                "ideal": round(ideal, 3),
                "of_ideal": round(reached / ideal, 3),
                "of_ideal_promised": at_least,
                "transport": world.transport,
            }
            common = {"claim": "unequal", "setting": f"{setting}, worker 0 has 1/{speed} of a core"}
            targets = {name: at_most if name == "auto" else None for name in methods}
            write_rows(
                [
                    row(result, name, "equal", **common, link=LOOPBACK, ranks=ranks, target=target, extra=facts)
                    for name, target in targets.items()
                ],
                output,
            )
            print(facts, flush=True)


if __name__ == "__main__":
    run_command(main, Options)
