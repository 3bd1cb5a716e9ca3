"""Times the trainer against a hand-written loop (one worker) and DistributedDataParallel (two workers).

It should add no cost of its own.

One worker against a loop written by hand; two workers against DistributedDataParallel, on the loopback and on a shaped
link. Same model, data, optimizer, threads and allocator on both sides. The trainer's guard against non-finite gradients
and its pooled BatchNorm statistics are on, as they are by default; the baselines have neither.

    python -m benchmarks.trainer.main                    # all settings, as root for the shaped link
    python -m benchmarks.trainer.main --links loopback
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rig.command import measure_in_ranks, run_command
from benchmarks.rig.network import Network

RESULTS = Path(__file__).parent / "results" / "trainer.csv"
PARITY = 1.03
#: Model, side of the images, and images per rank.
SETTINGS = (("resnet18", 32, 32), ("resnet18", 32, 16), ("mobilenet_v2", 96, 16))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the trainer against a loop written by hand and against DDP."""

    links: tuple[str, ...] = ("none", "loopback", "1gbit")
    """`none` for one worker, and links for two."""
    rounds: int = 30
    """Rounds to keep."""
    output: Path = RESULTS
    """Table to add the rows to."""


def main(options: Options) -> int:
    """Start the ranks for every link."""
    for link in options.links:
        ranks = 1 if link == "none" else 2
        with Network(ranks, "loopback" if link == "none" else link) as network:
            told = {"link": link, "rounds": options.rounds, "output": str(options.output.resolve())}
            measure_in_ranks(network, "benchmarks.trainer.main", told)
    return 0


def measure(link: str, rounds: int, output: str) -> None:
    """Measure every setting in this rank, and write the rows in rank 0."""
    from benchmarks.rig.paired import paired
    from benchmarks.rig.rank import process_group
    from benchmarks.rig.rows import row
    from benchmarks.rig.table import append_rows, check_csv, print_rows
    from hybridpar.comm.world import World

    with process_group() as (rank, ranks):
        for model, side, batch in SETTINGS:
            with_network = World.join(lanes=2) if ranks > 1 else World()
            methods, close, notes = make_methods(model, side, batch, rank, ranks, with_network)
            result = paired(methods, rounds)
            close()
            if rank == 0:
                baseline = "ddp" if ranks > 1 else "loop by hand"
                target = PARITY if ranks > 1 else 1.02
                common: dict[str, Any] = {
                    "claim": "trainer",
                    "setting": f"{model}, {side}x{side} images, batch {batch} per rank",
                    "link": link,
                    "ranks": ranks,
                    "extra": notes,
                }
                rows = [
                    row(result, name, baseline, target=target if name.startswith("hybridpar") else None, **common)
                    for name in methods
                ]
                append_rows(Path(output), rows)
                check_csv(Path(output))
                print_rows(rows)


def make_methods(
    name: str, side: int, batch: int, rank: int, ranks: int, world: Any
) -> tuple[dict[str, Callable[[], object]], Callable[[], None], dict[str, Any]]:
    """One step of each method, something that closes them, and facts for the table."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from hybridpar.config import TrainConfig
    from hybridpar.models import build_model, seed_everything
    from hybridpar.train.trainer import Trainer

    seed_everything(rank)
    images, labels = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))
    criterion = nn.CrossEntropyLoss()

    def build() -> nn.Module:
        seed_everything(0)
        return build_model(name, 10)

    def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)

    def by_hand(model: nn.Module) -> Callable[[], object]:
        optimizer = optimizer_for(model)

        def step() -> None:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()

        return step

    trainers: list[Trainer] = []

    def ours(**options: Any) -> Callable[[], object]:
        trainer = Trainer(build(), optimizer_for, criterion, TrainConfig(**options), world=world)
        trainers.append(trainer)
        return lambda: trainer.step((images, labels))

    methods: dict[str, Callable[[], object]] = {}
    if ranks == 1:
        methods["loop by hand"] = by_hand(build())
    else:
        methods["ddp"] = by_hand(DistributedDataParallel(build(), gradient_as_bucket_view=True))
        methods["ddp, buckets apart"] = by_hand(DistributedDataParallel(build()))
        methods["no sync"] = by_hand(build())
    methods["hybridpar"] = ours()
    methods["hybridpar, no guard, local BatchNorm"] = ours(guard=False, batch_norm="local")

    def close() -> None:
        for trainer in trainers:
            trainer.close()

    return methods, close, {"transport": world.transport, "optimizer": "SGD, momentum 0.9, fused"}


if __name__ == "__main__":
    run_command(main, Options)
