"""Times the step of Lightning's trainer with `HybridparStrategy` against hybridpar's own trainer, and with DDP.

Two workers train ResNet-18 by the same optimizer, fused SGD with momentum. Each of Lightning's `fit` runs in a thread
of its own and waits at its loader until the round comes to it; a step is the time from one batch to the call for the
next, with all hooks between.

    python -m benchmarks.trainer.lightning      # needs hybridpar[integrations]; four minutes
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rig.command import measure_in_ranks, run_command
from benchmarks.rig.network import Network

RESULTS = Path(__file__).parent / "results" / "lightning.csv"
TARGET = 1.02
#: Side of the images, and images per rank.
SETTINGS = ((32, 32), (64, 32), (112, 32))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the strategy for Lightning against hybridpar's trainer and Lightning's DDP strategy."""

    rounds: int = 24
    """Rounds to keep."""
    output: Path = RESULTS
    """Table to add the rows to."""


def main(options: Options) -> int:
    """Start two ranks."""
    with Network(2, "loopback") as network:
        told = {"rounds": options.rounds, "output": str(options.output.resolve())}
        measure_in_ranks(network, "benchmarks.trainer.lightning", told)
    return 0


def measure(rounds: int, output: str) -> None:
    """Measure every setting in this rank, and write the rows in rank 0."""
    from benchmarks.rig.paired import paired
    from benchmarks.rig.rank import process_group
    from benchmarks.rig.rows import row
    from benchmarks.rig.table import append_rows, check_csv, print_rows

    with process_group() as (rank, ranks):
        for side, batch in SETTINGS:
            methods, close, notes = make_methods(side, batch, rank, ranks)
            result = paired(methods, rounds)
            close()
            if rank == 0:
                common: dict[str, Any] = {
                    "claim": "lightning",
                    "setting": f"resnet18, {side}x{side} images, batch {batch} per rank",
                    "link": "loopback",
                    "ranks": ranks,
                    "extra": notes,
                }
                rows = [
                    row(result, name, "hybridpar.Trainer", target=TARGET if "Hybridpar" in name else None, **common)
                    for name in methods
                ]
                append_rows(Path(output), rows)
                check_csv(Path(output))
                print_rows(rows)


class Fit:
    """A `fit` of Lightning's that takes one step for each call.

    Args:
        strategy: What it trains with.
        module: What it trains.
        batch: The batch of every step.
        rank: Of this process.
        ranks: Of all.
    """

    def __init__(self, strategy: Any, module: Any, batch: Any, rank: int, ranks: int) -> None:
        self._batch, self._go, self._done = batch, queue.Queue[bool](), queue.Queue[BaseException | None]()
        self._thread = threading.Thread(target=self._run, args=(strategy, module, rank, ranks), daemon=True)
        self._thread.start()
        self._answer()

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._done.put(None)
            if not self._go.get():
                return
            yield self._batch

    def step(self) -> None:
        """Take one step: from a batch to the call for the next one."""
        self._go.put(True)
        self._answer()

    def close(self) -> None:
        """End the `fit`."""
        self._go.put(False)
        self._thread.join()

    def _answer(self) -> None:
        error = self._done.get()
        if error is not None:
            raise error

    def _run(self, strategy: Any, module: Any, rank: int, ranks: int) -> None:
        from lightning.pytorch import Trainer
        from lightning.pytorch.plugins.environments import LightningEnvironment

        class Environment(LightningEnvironment):  # type: ignore[misc]
            """Processes that are there already."""

            creates_processes_externally = True

            def world_size(self) -> int:
                """Processes of the job."""
                return ranks

            def global_rank(self) -> int:
                """This process."""
                return rank

            def local_rank(self) -> int:
                """This process."""
                return rank

            def set_world_size(self, size: int) -> None:
                """It is known."""

            def set_global_rank(self, rank: int) -> None:
                """It is known."""

        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        try:
            place = {"accelerator": "cpu", "devices": ranks, "plugins": [Environment()]}
            trainer = Trainer(strategy=strategy, max_epochs=1, use_distributed_sampler=False, **place, **quiet)
            trainer.fit(module, self)
        except BaseException as error:
            self._done.put(error)


def make_methods(
    side: int, batch: int, rank: int, ranks: int
) -> tuple[dict[str, Callable[[], object]], Callable[[], None], dict[str, Any]]:
    """One step of each method, something that closes them, and facts for the table."""
    import torch
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import DDPStrategy
    from torch import nn

    from hybridpar.comm.world import World
    from hybridpar.config import TrainConfig
    from hybridpar.integrations.lightning import HybridparStrategy
    from hybridpar.models import build_model, seed_everything
    from hybridpar.train.trainer import Trainer

    seed_everything(rank)
    given = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))
    criterion = nn.CrossEntropyLoss()

    def build() -> nn.Module:
        seed_everything(0)
        return build_model("resnet18", 10)

    def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)

    class Module(LightningModule):  # type: ignore[misc]
        """The same training, as Lightning has it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            """The loss of a batch."""
            loss: torch.Tensor = criterion(self.model(batch[0]), batch[1])
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """SGD with momentum."""
            return optimizer_for(self)

    world = World.join(lanes=2)
    trainers = {
        "hybridpar.Trainer": Trainer(build(), optimizer_for, criterion, TrainConfig(), world=world),
        "hybridpar.Trainer, no guard": Trainer(
            build(), optimizer_for, criterion, TrainConfig(guard=False), world=world
        ),
    }
    fits: dict[str, Fit] = {
        "Lightning, HybridparStrategy": Fit(HybridparStrategy(), Module(), given, rank, ranks),
        "Lightning, DDPStrategy": Fit(DDPStrategy(gradient_as_bucket_view=True), Module(), given, rank, ranks),
    }
    methods: dict[str, Callable[[], object]] = {
        name: lambda trainer=trainer: trainer.step(given)  # type: ignore[misc]
        for name, trainer in trainers.items()
    }
    methods |= {name: fit.step for name, fit in fits.items()}

    def close() -> None:
        for fit in fits.values():
            fit.close()
        for trainer in trainers.values():
            trainer.close()
        world.close()

    return methods, close, {"transport": world.transport, "optimizer": "SGD, momentum 0.9, fused"}


if __name__ == "__main__":
    run_command(main, Options)
