"""The options of `hybridpar plan`, for one cut of a model and for a search."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import tyro

from hybridpar.errors import UsageError
from hybridpar.partition.request import PlanConfig

#: Options that say how to cut, which the search decides itself.
_DECIDED = ("stages", "batch", "devices", "co_run", "link", "placement", "in_flight", "micro_batches", "strategy")
#: Options that say what is measured.
_RECORDED = ("batch_size", "workers", "classes", "optimizer_copies", "passes", "threads", "memory_format", "seed")


@dataclass(frozen=True)
class PlanRequest(PlanConfig):
    """Cut a model into balanced stages, or search for the fastest way to train it; write the plan."""

    model: tyro.conf.Positional[str] = ""
    """A torchvision classification model, timm/NAME, or your own as package.module:factory. Not with --calibrate."""
    explain: bool = False
    """Search for the fastest plan on this machine or on --cluster: stages, replicas, lanes, micro-batches, schedule,
    cut, codecs, memory format, kernels. Say why the others lost, and what would help."""
    cluster: Path | None = None
    """Plan for the cluster that this TOML file describes; implies --explain. Default: this machine, measured."""
    inputs: Path | None = None
    """Plan again from what this plan recorded, without measuring; implies --explain."""
    workers: int | None = None
    """Workers on this machine; default: all GPUs, else 2 on the CPU. Not with --cluster."""
    batch_size: int = 64
    """Samples per step over all workers together, for the search."""
    calibrate: tuple[str, ...] = ()
    """Fold what these run directories measured back into later predictions; `show` lists what is folded in, `clear`
    removes it."""
    fidelity: Literal["exact", "close", "lossy"] | None = None
    """What the search may change: exact: nothing in the result; close: also casts; lossy: also codecs, by time to the
    same loss. Default: exact, or with --inputs what was recorded."""
    draw: Path | None = None
    """Draw the partition, or of a search the time of a step over the number of workers, into this .svg or .png file."""
    verify: int = 0
    """Run so many of the best plans, and plain data parallelism, for some steps each, in turns, and choose by the
    clock; on the workers of this machine, or of torchrun. Implies --explain."""
    verify_seconds: float = 60.0
    """Of that, at most, after each plan's first steps; three rounds are taken in any case."""

    @property
    def searches(self) -> bool:
        """Whether the fastest plan is wanted, rather than one cut."""
        return self.explain or self.cluster is not None or self.inputs is not None or self.verify > 0

    @property
    def is_here(self) -> bool:
        """Whether the search is for the machine at hand, which is measured."""
        return self.searches and self.cluster is None and self.inputs is None and self.measure

    @property
    def wants_tuned_process(self) -> bool:
        """As for a cut, but where everything was measured before."""
        return super().wants_tuned_process and self.inputs is None and bool(self.model) and not self.calibrate

    def check(self) -> None:
        """Check what can be checked without the model.

        Raises:
            UsageError: A value is out of range, or two options contradict each other.
        """
        super().check()
        if not self.model and not self.calibrate and self.inputs is None:
            raise UsageError("no model was named", "A plan is of a model.", "Name one: `hybridpar plan resnet18`.")
        if self.calibrate and (self.model or self.searches):
            raise UsageError(
                "--calibrate with a model or a search",
                "Runs say themselves what they trained; nothing is planned.",
                "Give run directories alone: `hybridpar plan --calibrate runs/...`.",
            )
        defaults = {field.name: field.default for field in fields(self)}
        if not self.searches:
            for name in ("workers", "batch_size", "fidelity"):
                if getattr(self, name) != defaults[name]:
                    option = f"--{name.replace('_', '-')}"
                    raise UsageError(f"{option} without --explain", "It is an option of the search.", "Add --explain.")
            return
        given = [name for name in _DECIDED if getattr(self, name) != defaults[name]]
        if given:
            option = f"--{given[0].replace('_', '-')}"
            raise UsageError(
                f"{option} with a search", "The search decides it.", f"Leave out {option}, or --explain and --cluster."
            )
        if self.batch_size < 1:
            raise UsageError(f"--batch-size is {self.batch_size}", "A step has at least one sample.", "Use 64.")
        if self.workers is not None and (self.workers < 1 or self.cluster is not None):
            rule = "It is 1 or more." if self.workers < 1 else "A described cluster says how many there are."
            raise UsageError(f"--workers is {self.workers}", rule, "Leave it out, or correct it.")
        if self.verify < 0 or self.verify_seconds <= 0:
            raise UsageError(
                f"--verify {self.verify} --verify-seconds {self.verify_seconds}", "Both are above 0.", "Try --verify 3."
            )
        if self.verify and not self.is_here:
            raise UsageError(
                "--verify with --cluster, --inputs or --no-measure",
                "Plans are run on the machine at hand, which is measured.",
                "Leave out one of them.",
            )
        given = [name for name in _RECORDED if getattr(self, name) != defaults[name]]
        if self.inputs is not None and given:
            option = f"--{given[0].replace('_', '-')}"
            raise UsageError(
                f"--inputs with {option}",
                "What was recorded says it.",
                f"Leave {option} out, or measure again: leave out --inputs.",
            )
