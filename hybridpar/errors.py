"""Why: every error a user can meet says three things - the value, the rule it breaks, and what to do.

One base class carries them, so the command line can print any failure in the same three lines and pick its exit
code, and tests can assert on the parts instead of on prose. This module imports nothing of the package.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HybridparError(Exception):
    """A failure that the user can understand and act on.

    Args:
        what: What happened, with the offending value.
        why: The rule that the value breaks; empty where `what` says it all.
        fix: One thing to do next; empty where nothing helps.
    """

    #: What the command line exits with: 1 for a failed run, 2 for wrong usage.
    exit_code = 1

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.fix) if part)


class UsageError(HybridparError):
    """The request itself is wrong: an unknown name, an impossible number, a contradiction between options."""

    exit_code = 2


class PlanError(UsageError):
    """A plan is damaged, of another version, or made for another model."""


class TraceError(UsageError):
    """A model cannot be traced into a graph."""


class PartitionError(UsageError):
    """No partition satisfies what was asked for."""


class ScheduleError(UsageError):
    """A pipeline schedule is impossible, incomplete, or does not fit the stages."""


class DataError(HybridparError):
    """A data set is missing, corrupt, or too small for the job."""


class CheckpointError(HybridparError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class RunDirectoryError(HybridparError):
    """The run directory cannot be written."""


class LaunchError(HybridparError):
    """Workers could not be started, or did not find each other."""


class SyncError(HybridparError):
    """Workers disagree, or one of them did not take part in a collective."""


class LaneError(HybridparError):
    """Work was ordered on lanes in a way that a device would not honour."""


class TrainingError(HybridparError):
    """Training cannot go on, for instance because the loss stays non-finite."""


class KernelError(HybridparError):
    """A kernel that was demanded cannot be had."""


def nearest(name: str, choices: Iterable[str], most: int = 3) -> str:
    """A sentence that names the valid choices closest to a wrong name.

    Args:
        name: What the user typed.
        choices: The valid names.
        most: How many near misses to name.

    Returns:
        "Did you mean a, b?" where something is close, else "Valid: ..." with at most twelve choices.
    """
    valid = sorted(choices)
    close = difflib.get_close_matches(name, valid, n=most, cutoff=0.5)
    if close:
        return f"Did you mean {', '.join(close)}?"
    shown = ", ".join(valid[:12])
    return f"Valid: {shown}, ..." if len(valid) > 12 else f"Valid: {shown}."
