"""`hybridpar find-lr`: tries growing learning rates for some steps of a run, and suggests one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from hybridpar.commands import register_command
from hybridpar.commands.train import SHOWN, check_names
from hybridpar.commands.train import Train as TrainOptions
from hybridpar.config.files import FileOptions, expand
from hybridpar.config.train import GROUPS
from hybridpar.errors import UsageError
from hybridpar.machine.launch import import_torchvision, in_job, leaving_at_once, prepare_worker


@dataclass(frozen=True, kw_only=True)
class RangeOptions:
    """The learning-rate range test."""

    lowest: float = 1e-6
    """Learning rate of the first step."""
    highest: float = 10.0
    """Learning rate of the last step; the test ends before it where the loss has grown to 4 times the lowest."""
    test_steps: int = 100
    """Steps of the test."""
    json: bool = False
    """Print rates, losses and the suggestion as JSON, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class FindLr(TrainOptions, RangeOptions):
    """Train some steps at growing learning rates, and suggest one for `hybridpar train`. Nothing is written.

    It takes the options of `hybridpar train`: model, data, batch, optimizer, augmentation. For all of them:
    `hybridpar find-lr --help-all`.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The model, as `hybridpar train` takes it."""


_OF_INTEREST = ("workers", "stages", "replicas", "micro_batches", "amp", "memory_format", "recipe", "seed")
_SHOWN = (
    *("lowest", "highest", "test_steps", "json"),
    *SHOWN[: SHOWN.index("epochs")],
    *("optimizer", "weight_decay", "clip_norm", *_OF_INTEREST),
)


@register_command(
    "find-lr",
    "Try growing learning rates for some steps of a run, and suggest one.",
    FindLr,
    groups={"Range test": (RangeOptions,), "Configuration files": (FileOptions,), **GROUPS},
    shown=_SHOWN,
    expand=expand,
)
def run_find_lr(command: FindLr, _: Sequence[str]) -> int:
    """Make the test, and print what it found.

    Args:
        command: The options.

    Returns:
        The exit code, 0.

    Raises:
        HybridparError: The request is wrong, or the model cannot be trained.
    """
    command.check()
    if in_job():
        raise UsageError(
            "hybridpar find-lr as a worker of a job",
            "One process computes what all workers of a run would.",
            "Start it without torchrun, with the options of the run and --workers.",
        )
    check_names(command)
    from hybridpar.machine.cluster import default_workers

    workers = command.workers or command.workers_wanted or default_workers()
    if not command.json:
        print(f"testing learning rates for {command.model} on {command.data}\nloading torch ...", flush=True)
    prepare_worker(command.tune_process)
    with leaving_at_once():
        import_torchvision()
        from hybridpar.observe.live import open_progress
        from hybridpar.observe.progress import Progress
        from hybridpar.run.directory import before_the_start
        from hybridpar.run.find_rate import find_rate

    with Progress() if command.json else open_progress() as progress, before_the_start():

        def show(step: int, loss: float) -> None:
            if step % max(1, command.test_steps // 5) == 0:
                progress.prepare(f"step {step} of {command.test_steps}, loss {loss:.4f}")

        found = find_rate(
            command,
            command.model,
            workers=workers,
            lowest=command.lowest,
            highest=command.highest,
            steps=command.test_steps,
            tell=progress.message,
            on_step=show,
        )
    if command.json:
        print(json.dumps({"suggestion": found.suggestion, "rates": found.rates, "losses": found.smoothed}))
        return 0
    print()
    print("\n".join(found.table()))
    print()
    if found.lowest is None or found.suggestion is None:
        print("no rate is suggested: the smoothed loss never fell. Try a smaller --lowest, or another optimizer.")
        return 0
    lowest = f"{found.smoothed[found.lowest]:.4f} at {found.rates[found.lowest]:.2e}"
    ended = "where the loss had grown" if found.diverged else "at the highest rate"
    if not found.diverged and found.lowest == len(found.rates) - 1:
        ended += ", where the loss still fell: try a higher --highest"
    print(f"suggested  --lr {found.suggestion:.2g}")
    print(f"rule       a tenth of the rate with the lowest smoothed loss, {lowest}")
    print(f"ended      after {len(found.rates)} of {command.test_steps} steps, {ended}")
    return 0
