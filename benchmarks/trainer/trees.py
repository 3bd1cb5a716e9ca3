"""Times the same training steps in two checkouts of this project, in turns: what a change cost, or gained.

    python -m benchmarks.trainer.trees --before DIR            # all settings, about ten minutes on two cores
    python -m benchmarks.trainer.trees --before DIR --only pipeline

Each checkout has workers of its own. They wait at a pipe while the other's work, so that both meet the same minutes of
the same machine. A round is some steps of each, in changing order; a step takes as long as on the slowest worker.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.rig.load import busy_seconds, own_seconds
from benchmarks.rig.paired import FOREIGN_LOAD, Paired
from benchmarks.rig.rows import Row, row
from benchmarks.rig.table import append_rows, check_csv, print_rows
from hybridpar.machine.process import available_cores, worker_environment

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "trees.csv"
#: What a row is promised to be at most.
PARITY = 1.01


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        name: Of the group it belongs to: `trainer`, `pipeline` or `replicas`.
        model: A torchvision model with the stem that it has for ImageNet.
        side: Height and width of the images.
        batch: Samples of a worker, or of a pipeline, in a step.
        ranks: Number of workers.
        options: Of `TrainConfig`, beside the optimizer's.
    """

    name: str
    model: str
    side: int
    batch: int
    ranks: int
    options: dict[str, object]

    def __str__(self) -> str:
        more = "".join(f", {key} {value}" for key, value in self.options.items())
        return f"{self.model}, {self.side}x{self.side} images, batch {self.batch}{more}"


SETTINGS = [
    *(
        Setting("trainer", model, side, batch, ranks, {})
        for ranks in (1, 2)
        for model, side, batch in (("resnet18", 32, 32), ("resnet18", 32, 16), ("mobilenet_v2", 96, 16))
    ),
    *(
        Setting("pipeline", model, side, 32, 2, {"stages": 2, "micro_batches": 4, "schedule": schedule})
        for model, side in (("resnet18", 32), ("mobilenet_v2", 96))
        for schedule in ("gpipe", "1f1b")
    ),
    Setting("replicas", "resnet18", 32, 16, 4, {"stages": 2, "micro_batches": 4, "schedule": "1f1b"}),
]

#: Runs in a checkout, which is all that it may import: reads numbers of steps, and answers with their milliseconds.
_WORKER = """
import json, sys, time
import torch, torchvision
from torch import nn
from hybridpar import TrainConfig, Trainer

model, side, batch, options = json.loads(sys.argv[1])
torch.manual_seed(0)
net = getattr(torchvision.models, model)(num_classes=10)
data = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))
config = TrainConfig(timeout=120, **options)
example = data[0][: batch // options.get("micro_batches", 1)] if "stages" in options else None

def optimizer(module):
    return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, fused=True)

with Trainer(net, optimizer, nn.CrossEntropyLoss(), config, example=example) as trainer:
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            loss = trainer.step(data).loss
        print((time.perf_counter() - began) * 1e3, flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare training steps of two checkouts."""

    before: Path
    """The checkout to compare this one with."""
    only: str = ""
    """Only settings of this group."""
    rounds: int = 30
    """Rounds of each setting."""
    steps: int = 3
    """Steps of a checkout in a round."""
    output: Path = RESULTS
    """Table to add the rows to."""


class Tree:
    """The workers of a checkout.

    Args:
        root: The checkout.
        setting: What they train.
    """

    def __init__(self, root: Path, setting: Setting) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        task = json.dumps([setting.model, setting.side, setting.batch, setting.options])
        common = worker_environment(setting.ranks, available_cores(), {}) | {
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(setting.ranks),
            "PYTHONPATH": str(root),
        }
        self.workers = [
            subprocess.Popen(
                [sys.executable, "-c", _WORKER, task],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(setting.ranks)
        ]

    def steps(self, count: int) -> float:
        """Take some steps; milliseconds of one, on the slowest worker."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{count}\n")
            worker.stdin.flush()
        answers = []
        for worker in self.workers:
            assert worker.stdout is not None
            answers.append(worker.stdout.readline())
        if not all(answers):
            raise SystemExit("a worker has died; its error is above")
        return max(map(float, answers)) / count

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self.workers:
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                worker.kill()


def measure(setting: Setting, roots: dict[str, Path], rounds: int, steps: int) -> Paired:
    """Rounds of both checkouts, in changing order."""
    trees = {name: Tree(root, setting) for name, root in roots.items()}
    times: dict[str, list[float]] = {name: [] for name in trees}
    loads = []
    try:
        for tree in trees.values():
            tree.steps(8)
        for number in range(rounds):
            clock, busy, own = time.perf_counter(), busy_seconds(), own_seconds()
            for name in list(trees)[:: 1 if number % 2 else -1]:
                times[name].append(trees[name].steps(steps))
            idle = busy_seconds() - busy - (own_seconds() - own)
            loads.append(max(0.0, idle) / (time.perf_counter() - clock))
    finally:
        for tree in trees.values():
            tree.close()
    load = sorted(loads)[len(loads) * 9 // 10]
    return Paired({name: tuple(one) for name, one in times.items()}, 0, load, load > FOREIGN_LOAD)


def main(options: Options) -> int:
    """Measure all settings and write their rows."""
    roots = {"before": options.before.resolve(), "now": ROOT}
    rows: list[Row] = []
    for setting in SETTINGS:
        if options.only not in ("", setting.name):
            continue
        result = measure(setting, roots, options.rounds, options.steps)
        link = "loopback" if setting.ranks > 1 else "none"
        kept = {"claim": "trainer", "setting": str(setting), "link": link, "ranks": setting.ranks}
        extra = {"before": _commit(options.before), "steps per round": options.steps}
        own = [row(result, "before", "before", extra=extra, threads=1, **kept)]  # type: ignore[arg-type]
        own.append(row(result, "now", "before", target=PARITY, extra=extra, threads=1, **kept))  # type: ignore[arg-type]
        print_rows(own)
        rows += own
        append_rows(options.output, own)
    check_csv(options.output)
    return 0


def _commit(root: Path) -> str:
    command: Sequence[str] = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
