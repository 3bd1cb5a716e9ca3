"""Times `--shares auto` against equal parts of a batch, on two workers of which one has a part of a core.

Worker 0 is in a control group that may use a core for a half or a third of the time; worker 1 has a whole core. The
same two processes take, in interleaved rounds, steps with equal parts, with parts that `auto` finds and goes on
checking, and steps of DistributedDataParallel, which has equal parts.

    python -m benchmarks.unequal.main                     # as root, for the quota
    python -m benchmarks.unequal.main --speeds 2 --quick  # small, and nothing is written: does it run?
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig.command import measure_in_ranks, run_command
from benchmarks.rig.network import LOOPBACK, Network
from hybridpar.errors import UsageError

RESULTS = Path(__file__).parent / "results" / "unequal.csv"
#: How many times as fast worker 1 is: time over that of equal parts, at most, and part of the ideal speed-up, at least.
TARGETS = {1: (1.03, None), 2: (1 / 1.4, 0.95), 3: (1 / 1.9, 0.93)}
#: Length of a period of the quota, in microseconds: far below a step.
_PERIOD = 10_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure shares on unequal workers."""

    speeds: tuple[int, ...] = (1, 2, 3)
    """How many times as fast worker 1 is as worker 0."""
    batch_size: int = 128
    """Samples of a step."""
    rounds: int = 30
    """Rounds to keep."""
    quick: bool = False
    """Small steps, busy rounds kept, nothing written."""
    output: Path = RESULTS
    """Table to add the rows to."""


def main(options: Options) -> int:
    """Start the ranks for every ratio of speeds."""
    for speed in options.speeds:
        if speed not in TARGETS:
            raise UsageError(f"--speeds {speed}", f"One of {', '.join(map(str, TARGETS))}.")
        with Network(2, LOOPBACK) as network, _slowed(speed) as group:
            told = {
                "speed": speed,
                "group": group,
                "batch_size": 32 if options.quick else options.batch_size,
                "rounds": options.rounds,
                "output": None if options.quick else str(options.output.resolve()),
            }
            measure_in_ranks(network, "benchmarks.unequal.main", told)
    return 0


@contextlib.contextmanager
def _slowed(speed: int) -> Iterator[str | None]:
    """A control group that may use one core for 1 / speed of the time; the name of the file that processes join by."""
    if speed == 1:
        yield None
        return
    name, quota = f"hybridpar-unequal-{os.getpid()}", _PERIOD // speed
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    if (old / "cpu.cfs_quota_us").exists():
        group = old / name
        limits = {"cpu.cfs_period_us": str(_PERIOD), "cpu.cfs_quota_us": str(quota)}
    else:
        group, limits = new / name, {"cpu.max": f"{quota} {_PERIOD}"}
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


def measure(speed: int, group: str | None, batch_size: int, rounds: int, output: str | None) -> None:
    """Measure one ratio of speeds in this rank, and write the rows in rank 0."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.rig.paired import FOREIGN_LOAD, paired
    from benchmarks.rig.rank import process_group
    from benchmarks.rig.rows import row
    from benchmarks.rig.table import append_rows, check_csv, print_rows
    from hybridpar.comm.world import World
    from hybridpar.config import TrainConfig
    from hybridpar.data import Batch
    from hybridpar.machine.process import available_cores
    from hybridpar.models import build_model, seed_everything
    from hybridpar.run.shares import LEFT_OUT, WATCHED, ShareTuner
    from hybridpar.train.results import StepResult
    from hybridpar.train.trainer import Trainer

    def build() -> nn.Module:
        seed_everything(0)
        return build_model("resnet18", 10)

    with process_group() as (rank, ranks):
        if len(available_cores()) >= ranks:  # a core for each
            os.sched_setaffinity(0, {available_cores()[rank]})
        if rank == 0 and group is not None:
            Path(group).write_text(str(os.getpid()))
        world = World.join(lanes=2)
        seed_everything(1)
        images, labels = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
        criterion = nn.CrossEntropyLoss()

        def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)

        trainer = Trainer(build(), optimizer_for, criterion, TrainConfig(), world=world)
        tuner = ShareTuner(
            world, [[one] for one in range(ranks)], batch_size, 1, idle=True, in_pairs=False, wait=trainer.wait
        )
        busy: list[float] = []

        def step(counts: list[int]) -> StepResult:
            start = sum(counts[:rank])
            mine = slice(start, start + counts[rank])
            parts = ((images[mine], labels[mine]),) if counts[rank] else ()
            return trainer.step(Batch(parts, counts[rank], batch_size))

        def equal() -> None:
            busy.append(step([batch_size // ranks] * ranks).compute_ms)

        def auto() -> None:
            tuner.note(step(tuner.counts).compute_ms, batch_size)

        peer = DistributedDataParallel(build(), gradient_as_bucket_view=True)
        optimizer = optimizer_for(peer)
        half = slice(rank * batch_size // ranks, (rank + 1) * batch_size // ranks)

        def ddp() -> None:
            optimizer.zero_grad()
            criterion(peer(images[half]), labels[half]).backward()
            optimizer.step()

        for _ in range(3 * LEFT_OUT + 7 * WATCHED):  # three decisions
            auto()
        methods: dict[str, Callable[[], object]] = {"equal": equal, "auto": auto, "ddp": ddp}
        result = paired(methods, rounds, foreign_load=FOREIGN_LOAD if output is not None else 99.0)
        trainer.close()
        rates = [1 / float(time) for time in world.gather(statistics.median(busy[3:]))]  # type: ignore[arg-type]
        world.close()
        if rank == 0:
            ideal = statistics.mean(rates) / min(rates)
            reached = 1 / result.ratio("auto", "equal").median
            most, part = TARGETS[speed]
            facts = {
                "samples": list(tuner.counts),
                "speeds": round(rates[1] / rates[0], 3),
                "speed_up": round(reached, 3),
                "ideal": round(ideal, 3),
                "of_ideal": round(reached / ideal, 3),
                "of_ideal_promised": part,
            }
            rows = [
                row(
                    *(result, name, "equal"),
                    claim="unequal",
                    setting=f"resnet18, 32x32 images, batch {batch_size}, worker 0 has 1/{speed} of a core",
                    link=LOOPBACK,
                    ranks=ranks,
                    target=most if name == "auto" else None,
                    extra=facts | {"transport": world.transport},
                )
                for name in methods
            ]
            if output is not None:
                append_rows(Path(output), rows)
                check_csv(Path(output))
            print_rows(rows)
            print(facts, flush=True)


if __name__ == "__main__":
    run_command(main, Options)
