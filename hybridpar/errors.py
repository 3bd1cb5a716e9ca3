"""Errors that users see: each has the value, the rule that it breaks, and what to do.

One base class carries them, so the command line can print any failure in the same three lines and pick its exit
code, and tests can assert on the parts instead of on prose. This module imports nothing of the package.
"""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable

#: Characters of a part of a message.
_LONGEST = 2_000


class HybridparError(Exception):
    """A failure that the user can understand and act on.

    Args:
        what: What happened, with the offending value.
        why: The rule that the value breaks; empty where `what` says it all.
        fix: One thing to do next; empty where nothing helps.
    """

    #: What the command line exits with: 1 for a failed run, 2 for wrong usage.
    exit_code = 1

    #: Another worker of the job has the same error and prints it.
    is_repeated = False

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        # Whatever was given by a user, or stands in a file, may be in a message, of any length.
        self.what, self.why, self.fix = (shortened(part, _LONGEST) for part in (what, why, fix))
        super().__init__(self.what, self.why, self.fix)

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


class ExportError(HybridparError):
    """A model cannot be written into a file, or the file computes something else than the model."""


class KernelError(HybridparError):
    """A kernel that was demanded cannot be had."""


def refuse(first: str, second: str, why: str) -> UsageError:
    """The error for two options that contradict each other."""
    return UsageError(f"{first} with {second}", why, "Leave out one of them.")


def check(holds: bool, what: str, why: str = "", fix: str = "") -> None:
    """Refuse a value that breaks its rule."""
    if not holds:
        raise UsageError(what, why, fix)


def cannot_write(path: os.PathLike[str], error: Exception) -> str:
    """What to say of a file that cannot be written."""
    return f"cannot write {path}: {getattr(error, 'strerror', None) or error}"


def not_installed(what: str, extra: str) -> UsageError:
    """The error of a package that is missing."""
    return UsageError(f"{what}, which is not installed", fix=f"Install it: pip install 'hybridpar[{extra}]'")


def shortened(value: object, most: int = 200) -> str:
    """A value as text for a message; of a longer one the middle is left out."""
    text = str(value)
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 3]}...{text[len(text) - tail :]}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 worker`, `2 micro-batches`."""
    plural = "es" if noun.endswith(("batch", "s")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def nearest(name: str, choices: Iterable[str], most: int = 3) -> str:
    """A sentence that names the valid choices closest to a wrong name."""
    valid = sorted(choices)
    close = difflib.get_close_matches(name, valid, n=most, cutoff=0.5)
    if close:
        return f"Did you mean {', '.join(close)}?"
    shown = ", ".join(valid[:12])
    return f"Valid: {shown}, ..." if len(valid) > 12 else f"Valid: {shown}."


def user_frames(error: BaseException) -> list[str]:
    """The last lines of an exception's traceback that lie in the user's own code.

    Left out are the frames up to the last one of hybridpar, and those of installed packages and of Python's library.
    """
    frames = traceback.extract_tb(error.__traceback__)
    package = f"{os.path.dirname(os.path.abspath(__file__))}{os.sep}"
    last = max((index for index, frame in enumerate(frames) if frame.filename.startswith(package)), default=-1)
    paths = sysconfig.get_paths()
    # Names such as <frozen importlib._bootstrap>, <string> and <eval_with_key> are of no file.
    others = ("<", *(f"{paths[kind]}{os.sep}" for kind in ("stdlib", "platstdlib", "purelib", "platlib")))
    users = [frame for frame in frames[last + 1 :] if not frame.filename.startswith(others)]
    return [text.rstrip("\n") for text in traceback.format_list(users[-6:])]


def exception_text(error: BaseException) -> str:
    """The kind and text of an exception; of a syntax error, which has no frame in the file, also the place."""
    return shortened("".join(traceback.format_exception_only(error)).strip(), 800)


def user_error(what: str, error: BaseException, *, fix: str = "") -> UsageError:
    """What failed in the user's own code, with the user's part of the traceback."""
    why = "\n".join(user_frames(error))
    fix = fix or "Mend it there; --debug shows the whole traceback."
    return UsageError(f"{what}: {exception_text(error)}", why, fix)


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, or the error's name."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
