"""`hybridpar plan` without a search: cuts a model, prints the partition, writes the plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hybridpar.commands.plan.request import PlanRequest, parse_shape, read_problem
from hybridpar.errors import UsageError

if TYPE_CHECKING:
    import torch

    from hybridpar.partition.cost import Problem
    from hybridpar.partition.planning import PartitionedModel
    from hybridpar.plan import Plan


def run_plan(config: PlanRequest) -> int:
    """Make a plan, print it, write what was asked for; returns the exit code."""
    config.check()
    problem = read_problem(config)
    result = _partition(config, problem)
    # Files first: the table may go to a reader that has left, and the minutes that measuring took must not be lost.
    written = []
    if config.output is not None:
        result.plan.save(config.output)
        written.append(f"plan written to {config.output}")
    if config.draw is not None:
        from hybridpar.partition.draw import draw_partition

        draw_partition(result.graph, result.plan, config.draw)
        written.append(f"picture written to {config.draw}")
    print_plan(result.plan, written)
    return 0


def _partition(config: PlanRequest, problem: Problem) -> PartitionedModel:
    from hybridpar.formats.cache import measurements_directory
    from hybridpar.partition.planning import partition_model

    model, example = _on_device(config, build_to_measure(config))
    with ProgressBar() as bar:
        return partition_model(
            model,
            example,
            problem,
            measure=config.measure,
            passes=config.passes,
            threads=config.threads,
            cache=measurements_directory() if config.cache else None,
            name=config.model,
            progress=bar.advance,
            announce=bar.announce,
        )


def build_to_measure(config: PlanRequest, *, whole: bool = False) -> torch.nn.Module:
    """Build a model that is to be planned, on the meta device where it is large and can be built there."""
    from hybridpar.models import build_model, seed_everything
    from hybridpar.models.deferred import MEASURED_BYTES, DeferredModel

    seed_everything(config.seed)
    if whole:
        return build_model(config.model, config.classes)
    try:
        deferred = DeferredModel(lambda: build_model(config.model, config.classes))
    except UsageError:  # a name that is none is told by building it
        return build_model(config.model, config.classes)
    return deferred.module if deferred.nbytes > MEASURED_BYTES else deferred.whole()


def print_plan(plan: Plan, lines: Sequence[str] = ()) -> None:
    """Print the table of a plan, then some lines."""
    from rich.console import Console

    from hybridpar.partition.table import print_partition

    console = Console()
    with printing("table"):
        print_partition(plan, console)
        for line in lines:
            console.print(line)


@contextmanager
def printing(what: str) -> Iterator[None]:
    """Write all that is printed inside of the block before it ends."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(
            f"cannot print the {what}: {error.strerror}", fix="Send standard output somewhere else."
        ) from error


def _on_device(config: PlanRequest, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.Tensor]:
    import torch

    from hybridpar.models.deferred import is_deferred

    shape, device = parse_shape(config.input), torch.device(config.measured_device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--devices {device}: torch can use {torch.cuda.device_count()} CUDA device(s) on this machine",
            "A model is measured on the first device named.",
            "Plan on the machine that has it, or name cpu first.",
        )
    try:
        example = torch.randn(config.batch, *shape, device=device)
        model = model if is_deferred(model) else model.to(device)
        if config.memory_format == "channels_last":
            example = example.contiguous(memory_format=torch.channels_last)
            model = model.to(memory_format=torch.channels_last)
        return model, example
    except (RuntimeError, TypeError) as error:  # TypeError where a number is too large for torch
        raise UsageError(
            f"cannot put a micro-batch of {config.batch} x {config.input} on {device}: {str(error).splitlines()[0]}",
            "The model and a whole micro-batch must fit into the memory of the device that is measured.",
            "Use a smaller --batch or --input.",
        ) from error


class ProgressBar:
    """A progress bar that names the step it is in, on standard error: what is printed is the table alone."""

    def __init__(self, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take it away. Safe to call twice."""
        self._progress.stop()

    def announce(self, line: str) -> None:
        """Say what is being done."""
        self._progress.update(self._task, description=line)

    def advance(self, done: int, total: int) -> None:
        """Say how far it is."""
        self._progress.update(self._task, completed=done, total=total)
