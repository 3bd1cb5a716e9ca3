"""Chooses what an operation runs on: a tuned kernel where a record says that it is faster than torch on this device.

Everything else runs on torch, and one log line per key says why. Decisions are kept, so a call costs one look into a
dictionary; other records, and another value of `HYBRIDPAR_KERNELS`, count from the next `use_choices` on.

With `HYBRIDPAR_KERNELS=off` everything runs on torch. Tensors on a GPU run on kernels that were measured on such a GPU,
with their dtype.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hybridpar.codegen.cache import KernelsUnavailable, wanted
from hybridpar.tvm_kernels.database import Database, KernelRecord, why_unused
from hybridpar.tvm_kernels.kernel import make_kernels
from hybridpar.tvm_kernels.shapes import KernelKey
from hybridpar.tvm_kernels.space import why_none

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What an operation runs on.

    Attributes:
        key: The operation.
        kernel: The kernel; None for torch.
        record: What the decision rests on, if there is a record.
        why: Why it is torch; empty where it is not.
    """

    key: KernelKey
    kernel: Any
    record: KernelRecord | None
    why: str = ""

    @property
    def text(self) -> str:
        """One line that says what runs and why."""
        times = "" if self.record is None else f" ({self.record.ms:.3f} ms against {self.record.stock_ms:.3f} ms)"
        runs = "a tuned kernel" if self.kernel is not None else f"torch, as {self.why}"
        return f"{self.key.text} runs on {runs}{times}"


#: Makes the kernels of some records; where one cannot be had, it says why instead.
KernelMaker = Callable[[Sequence[KernelRecord]], Sequence[Any]]


class Choices:
    """Decides for each operation whether it runs on a kernel of a database or on torch, and keeps the decisions."""

    def __init__(self, database: Database, make: KernelMaker | None = None) -> None:
        self.database = database
        self._make = make or make_kernels
        self._decided: dict[KernelKey, Decision] = {}
        self._lock = threading.RLock()
        #: What calls run on, by their form; only `op` writes it.
        self.plans: dict[tuple[Any, ...], Any] = {}

    def decide(self, key: KernelKey) -> Decision:
        """Decide what an operation runs on."""
        return self._decided.get(key) or self.prepare([key])[0]

    def prepare(self, keys: Iterable[KernelKey]) -> list[Decision]:
        """Decide for operations before they run, and load their kernels together; each is a line of the log."""
        keys = list(keys)
        with self._lock:
            fresh = [key for key in dict.fromkeys(keys) if key not in self._decided]
            winners: dict[KernelKey, KernelRecord] = {}
            for key in fresh:
                record = self.database.best(key)
                why = self._why_not(key, record)
                if record is None or why:
                    self._enter(Decision(key, None, record if wanted() else None, why))
                else:
                    winners[key] = record
            made = self._make([*winners.values()]) if winners else ()
            for (key, record), kernel in zip(winners.items(), made, strict=True):
                if isinstance(kernel, KernelsUnavailable):
                    _log.warning("no kernel for %s, torch is used: %s", key.text, kernel)
                    self._enter(Decision(key, None, record, f"its kernel cannot be had: {kernel}"))
                else:
                    self._enter(Decision(key, kernel, record))
        return [self._decided[key] for key in keys]

    def _why_not(self, key: KernelKey, record: KernelRecord | None) -> str:
        """Why a key runs on torch, before its kernel was made; empty where it need not."""
        if not wanted():
            return "HYBRIDPAR_KERNELS is off"
        if why := why_none(key):
            return why
        if record is None:
            return why_no_record(self.database, key)
        return "" if record.wins else "the record says that torch is as fast"

    def _enter(self, decision: Decision) -> None:
        self._decided[decision.key] = decision
        _log.info("%s", decision.text)

    @cached_property
    def digest(self) -> str:
        """Eight digits that tell these records, and whether they are used at all, from others."""
        lines = sorted(record.line() for record in self.database.records) if wanted() else []
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def why_no_record(database: Database, key: KernelKey) -> str:
    """Say why there is no record to use: what the nearest record of another key differs in."""
    near: list[tuple[int, str]] = []
    if (record := database.best(key, current=False)) is not None:
        return why_unused(record)
    for other in database:
        if (other.direction, other.dtype) != (key.direction, key.dtype):
            continue
        if replace(other.shape, batch=key.shape.batch) != key.shape:
            continue
        differing = [] if other.shape == key.shape else [f"batch {other.shape.batch}"]
        differing += [] if other.layout == key.layout else [str(other.layout)]
        differing += [] if other.threads == key.threads else [f"{other.threads} thread(s)"]
        differing += [] if other.device == key.device else [other.device]
        near.append((len(differing), ", ".join(differing)))
    return f"its record is for {min(near)[1]}" if near else "there is no record"


_active: Choices | None = None


def active_choices() -> Choices | None:
    """The choices in use; None where no database is in use, and everything runs on torch."""
    return _active


def use_choices(choices: Choices | None) -> Choices | None:
    """Set what the whole process chooses kernels by."""
    global _active
    before, _active = _active, choices
    return before
