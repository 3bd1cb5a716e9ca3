"""Chooses what an operation runs on: a tuned kernel where a record says that it is faster than torch on this device.

Everything else runs on torch, and one log line per key says why. Decisions are kept, so a call costs one look into a
dictionary; other records, and another value of `HYBRIDPAR_KERNELS`, count from the next `use_choices` on.

With `HYBRIDPAR_KERNELS=off` everything runs on torch; with `strict` it is an error where a convolution or norm in
float32 on the CPU has no record, or its kernel cannot be built. Where a record says that torch is faster, torch is used
in all modes. Tensors on a GPU run on kernels that were measured on such a GPU, with their dtype.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hybridpar.codegen.cache import KernelsUnavailable, wanted
from hybridpar.errors import KernelError
from hybridpar.tvm_kernels.conv_bench import DTYPES
from hybridpar.tvm_kernels.database import Database
from hybridpar.tvm_kernels.kernel import AnyKernel, make_kernels
from hybridpar.tvm_kernels.machine import cpu_fingerprint, gpu_at
from hybridpar.tvm_kernels.measure import torch_threads
from hybridpar.tvm_kernels.operation import KernelKey, find_operation, operation_of
from hybridpar.tvm_kernels.operations.batch_norm import norm_key
from hybridpar.tvm_kernels.record import Record, why_unused
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout, NormShape, ShapeError

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
    record: Record | None
    why: str = ""

    @property
    def text(self) -> str:
        """One line that says what runs and why."""
        times = ""
        if self.record is not None and None not in self.record.times:
            times = " ({:.3f} ms against {:.3f} ms)".format(*self.record.times)
        runs = "a tuned kernel" if self.kernel is not None else f"torch, as {self.why}"
        return f"{self.key.text} runs on {runs}{times}"


#: Makes the kernels of some records; where one cannot be had, it says why instead.
KernelMaker = Callable[[Sequence[Record]], Sequence[Any]]


class Choices:
    """Decides for each operation whether it runs on a kernel of a database or on torch, and keeps the decisions.

    Args:
        database: The records.
        make: Makes kernels of records; None for `kernel.make_kernels`, which compiles them and keeps what it compiled.
    """

    def __init__(self, database: Database, make: KernelMaker | None = None) -> None:
        self.database = database
        self._make = make or make_kernels
        self._decided: dict[KernelKey, Decision] = {}
        self._lock = threading.RLock()
        #: Kernels by the arguments of a call; only `find` and `choose_norm` write it.
        self.found: dict[tuple[Any, ...], AnyKernel | None] = {}
        #: What calls run on, by their form; only `call_plan.plan_of` writes it.
        self.plans: dict[tuple[Any, ...], Any] = {}

    def find(self, call: tuple[Any, ...]) -> AnyKernel | None:
        """Find the kernel of a convolution's call, and remember it.

        Args:
            call: Direction, sizes of the input, taps, stride, padding, dilation, layout; then on the CPU threads, on a
                GPU its number and the dtype.

        Returns:
            The kernel; None where torch is to compute.

        Raises:
            KernelError: There is none, and HYBRIDPAR_KERNELS is `strict`.
        """
        direction, sizes, taps, stride, padding, dilation, layout, *where = call
        try:
            batch, channels, height, width = sizes
            shape = ConvShape(batch, channels, height, width, taps, stride, padding, dilation)
        except (ShapeError, TypeError):  # an empty batch, or what torch refuses, too
            self.found[call] = None
            return None
        own = (where[0], cpu_fingerprint()) if len(where) == 1 else (1, gpu_at(where[0]).fingerprint, where[1])
        kernel: AnyKernel | None = self.decide(KernelKey(direction, shape, layout, *own)).kernel
        self.found[call] = kernel
        return kernel

    def decide(self, key: KernelKey) -> Decision:
        """Decide what an operation runs on.

        Args:
            key: The operation.

        Returns:
            The decision.

        Raises:
            KernelError: There is no kernel, and HYBRIDPAR_KERNELS is `strict`.
        """
        decision = self._decided.get(key) or self.prepare([key])[0]
        missing = decision.kernel is None and (decision.record is None or decision.record.wins)
        strict = os.environ.get("HYBRIDPAR_KERNELS", "").strip().lower() == "strict"
        operation = find_operation(key)
        possible = operation is not None and operation.required and not operation.without_kernels(key)
        if missing and strict and possible:
            raise KernelError(
                f"no kernel for {key.text}: {decision.why}",
                "HYBRIDPAR_KERNELS is strict, so every operation that kernels can do needs a record and its kernel.",
                how_to_tune(key),
            )
        return decision

    def prepare(self, keys: Iterable[KernelKey]) -> list[Decision]:
        """Decide for operations before they run, and load their kernels together; each decision is one line of the log.

        Args:
            keys: The operations.

        Returns:
            What each of them runs on.
        """
        keys = list(keys)
        with self._lock:
            fresh = [key for key in dict.fromkeys(keys) if key not in self._decided]
            winners: dict[KernelKey, Record] = {}
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

    def _why_not(self, key: KernelKey, record: Record | None) -> str:
        """Why a key runs on torch, before its kernel was made; empty where it need not."""
        if not wanted():
            return "HYBRIDPAR_KERNELS is off"
        operation = find_operation(key)
        if operation is None or (why := operation.without_kernels(key)):
            return f"there are no kernels of {key.op} for {key.device}" if operation is None else why
        if record is None:
            return why_no_record(self.database, key)
        if not record.wins:
            return f"the record says that {operation.words[2]} is as fast"
        parts = self.prepare(operation.parts(key))
        return next((f"{part.key.direction} runs on torch" for part in parts if part.kernel is None), "")

    def _enter(self, decision: Decision) -> None:
        self._decided[decision.key] = decision
        _log.info("%s", decision.text)

    @cached_property
    def digest(self) -> str:
        """Eight digits that tell these records, and whether they are used at all, from others."""
        lines = sorted(record.line() for record in self.database.records) if wanted() else []
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]

    def measure_saving(self, keys: Mapping[KernelKey, int]) -> float:
        """Measure how much time kernels save over some operations.

        Args:
            keys: Operations, and how often each one runs; those that are left to torch save nothing.

        Returns:
            Milliseconds.
        """
        saved = 0.0
        for key, count in keys.items():
            kernel = self.decide(key).kernel
            if kernel is not None:
                operation = operation_of(key)
                parts = [self.decide(part).kernel for part in operation.parts(key)]
                with torch_threads(key.threads):
                    bench = operation.bench(key, 0, parts)
                    timing = bench.compare(kernel, 0.0, 5, bench.instead)
                saved += count * (timing.stock_ms - timing.ms)
        return saved


def why_no_record(database: Database, key: KernelKey) -> str:
    """Say why there is no record to use: what the nearest record of another key differs in.

    Args:
        database: It has no record of the key that may be used.
        key: What is to be computed.

    Returns:
        A reason in words.
    """
    near: list[tuple[int, str]] = []
    if (own := database.best(key, current=False)) is not None:
        return why_unused(own)
    if key in set(database):
        return "its candidates were compiled and not measured; tune on this device"
    for other in database:
        if (other.op, other.direction, other.dtype) != (key.op, key.direction, key.dtype):
            continue
        if database.best(other, current=False) is None or (unlike := other.shape.unlike(key.shape)) is None:
            continue
        differing = [unlike] if unlike else []
        differing += [] if other.layout == key.layout else [str(other.layout)]
        differing += [] if other.threads == key.threads else [f"{other.threads} thread(s)"]
        differing += [] if other.device == key.device else [other.device]
        near.append((len(differing), ", ".join(differing)))
    return f"its record is for {min(near)[1]}" if near else "there is no record"


def how_to_tune(key: KernelKey) -> str:
    """Say how to get a record, for an error.

    Args:
        key: What is to be computed.

    Returns:
        Sentences.
    """
    layout = "" if key.layout is Layout.CHANNELS_LAST else f" --memory-format {key.layout}"
    return (
        f"Write the line `{key.shape.text}` to a file, run `hybridpar tune --shapes FILE --threads {key.threads}"
        f'{layout} -o k.jsonl`, and use k.jsonl; for a whole model `hybridpar tune MODEL --for "OPTIONS OF TRAIN" '
        "-o k.jsonl`. "
        "Batches of other sizes, also in an evaluation, need records of their own. Or set HYBRIDPAR_KERNELS=on."
    )


_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
_active: Choices | None = None


def active_choices() -> Choices | None:
    """The choices in use; None where no database is in use, and everything runs on torch."""
    return _active


def use_choices(choices: Choices | None) -> Choices | None:
    """Set what the whole process chooses kernels by.

    Args:
        choices: What decides; None leaves everything to torch.

    Returns:
        What was used before.
    """
    global _active
    before, _active = _active, choices
    return before


def kernel_for(device: torch.device, dtype: torch.dtype, direction: Direction, *call: Any) -> AnyKernel | None:
    """The kernel of a convolution's call.

    Args:
        device: Of all tensors.
        dtype: Of all tensors; float32 where they are on the CPU.
        direction: What is computed.
        call: Sizes of the input (N, C, H, W), taps of a filter, stride, padding and dilation, each of rows and columns;
            then the layout of input and output.

    Returns:
        The kernel; None where torch is to compute.

    Raises:
        KernelError: There is none, and HYBRIDPAR_KERNELS is `strict`.
    """
    choices = _active
    on_cpu = device.type == "cpu"
    if choices is None or not (on_cpu or dtype in _DTYPES):
        return None
    where = (torch.get_num_threads(),) if on_cpu else (device.index or 0, _DTYPES[dtype])
    try:  # most calls come with tuples, which need not be made again
        return choices.found[direction, *call, *where]
    except (KeyError, TypeError):
        known = (direction, *map(tuple, call[:-1]), call[-1], *where)
    try:
        return choices.found[known]
    except KeyError:
        return choices.find(known)


def choose_norm(rows: int, channels: int, act: str, threads: int) -> bool:
    """Whether the records in use say that the kernels are faster: the `choice` that `optimize` gives to `fuse_norms`.

    Args:
        rows: Pixels of all images.
        channels: Channels.
        act: Activation.
        threads: Of torch.

    Returns:
        Whether kernels run.

    Raises:
        KernelError: There is no record, or no kernel, and HYBRIDPAR_KERNELS is `strict`.
    """
    choices = _active
    if choices is None:
        return False
    call = (rows, channels, act, threads)
    try:
        return choices.found[call] is not None
    except KeyError:
        key = norm_key(NormShape(rows, channels, act), threads, cpu_fingerprint())
        choices.found[call] = choices.decide(key).kernel
        return choices.found[call] is not None
