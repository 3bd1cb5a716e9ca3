"""Why: a tuned kernel is used only where a record says that it beats torch, on this device and with these threads.

Everything else runs on torch, and one log line per convolution says why. What was decided is kept, so a call costs one
look into a dictionary; other records, and another `HYBRIDPAR_KERNELS`, count from the next `use_choices` on.

`HYBRIDPAR_KERNELS` says more: `off` leaves everything to torch; `strict` makes it an error where a convolution in
float32 on the CPU has no record, or its kernel cannot be had. Where a record says that torch is faster, torch is used
in all modes. Tensors on a GPU run on kernels that were measured on such a GPU, with their dtype.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hybridpar.codegen.cache import KernelsUnavailable, wanted
from hybridpar.errors import KernelError
from hybridpar.tvm_kernels.cuda_device import gpu_at, is_gpu
from hybridpar.tvm_kernels.database import Database, KernelKey, KernelRecord, why_unused
from hybridpar.tvm_kernels.device import cpu_fingerprint, installed_versions
from hybridpar.tvm_kernels.kernel import AnyKernel
from hybridpar.tvm_kernels.norm_records import NormKey
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout, ShapeError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What a convolution runs on.

    Attributes:
        key: The convolution.
        kernel: The kernel; None for torch.
        record: What the decision rests on, if there is a record.
        why: Why it is torch; empty where it is not.
    """

    key: KernelKey
    kernel: AnyKernel | None
    record: KernelRecord | None
    why: str = ""


#: Makes the kernels of some records; where one cannot be had, it says why instead.
KernelMaker = Callable[[Sequence[KernelRecord]], Sequence[AnyKernel | KernelsUnavailable]]


def is_strict() -> bool:
    """Whether HYBRIDPAR_KERNELS says that missing kernels are errors."""
    return os.environ.get("HYBRIDPAR_KERNELS", "").strip().lower() == "strict"


class Choices:
    """Decides and remembers.

    Args:
        database: The records.
        make: Makes kernels of records; default: they are compiled and kept, see `compiled.make_kernels`.
    """

    def __init__(self, database: Database, make: KernelMaker | None = None) -> None:
        self.database = database
        self._make = make
        self._decided: dict[KernelKey, Decision] = {}
        self._lock = threading.Lock()
        #: Kernels by what a call knows of itself; only `find` writes it.
        self.found: dict[tuple[Any, ...], AnyKernel | None] = {}
        #: What calls run on, by their form; only `call_plan.plan_of` writes it.
        self.plans: dict[tuple[Any, ...], Any] = {}
        #: Which convolutions leave moments for the norms behind them, and how; only `conv_norm_choice` writes it.
        self.found_pairs: dict[Any, Any] = {}
        #: Whether norms run fused, by rows, channels, activation and threads; only `norm_choice` writes it.
        self.found_norms: dict[tuple[int, int, str, int], bool] = {}

    def find(self, call: tuple[Any, ...]) -> AnyKernel | None:
        """The kernel of a call, and remember it.

        Args:
            call: Direction, sizes of the input, taps, stride, padding, dilation, layout; then on the CPU threads, on a
                GPU its number and the dtype.

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
        kernel = self.decide(KernelKey(direction, shape, layout, *own)).kernel
        self.found[call] = kernel
        return kernel

    def decide(self, key: KernelKey) -> Decision:
        """What a convolution runs on.

        Raises:
            KernelError: There is no kernel, and HYBRIDPAR_KERNELS is `strict`.
        """
        decision = self._decided.get(key) or self.prepare([key])[0]
        missing = decision.kernel is None and (decision.record is None or decision.record.wins)
        if missing and is_strict() and not is_gpu(key.device):
            raise KernelError(
                f"no kernel for {describe_key(key)}: {decision.why}",
                "HYBRIDPAR_KERNELS is strict, so every depthwise convolution needs a record and its kernel.",
                how_to_tune(key),
            )
        return decision

    def prepare(self, keys: Iterable[KernelKey]) -> list[Decision]:
        """Decide for convolutions before they run, and load their kernels together; each is told in one log line.

        Returns:
            What each of them runs on.
        """
        keys = list(keys)
        with self._lock:
            winners: dict[KernelKey, KernelRecord] = {}
            for key in dict.fromkeys(keys):
                if key in self._decided:
                    continue
                record = self.database.best(key)
                if not wanted():
                    self._settle(Decision(key, None, None, "HYBRIDPAR_KERNELS is off"))
                elif record is None:
                    self._settle(Decision(key, None, None, why_no_record(self.database, key)))
                elif not record.wins:
                    self._settle(Decision(key, None, record, "the record says that torch is faster"))
                else:
                    winners[key] = record
            for (key, record), kernel in zip(winners.items(), self._made([*winners.values()]), strict=True):
                if isinstance(kernel, KernelsUnavailable):
                    _log.warning("no kernel for %s, torch is used: %s", describe_key(key), kernel)
                    self._settle(Decision(key, None, record, f"its kernel cannot be had: {kernel}"))
                else:
                    self._settle(Decision(key, kernel, record))
        return [self._decided[key] for key in keys]

    def _settle(self, decision: Decision) -> None:
        self._decided[decision.key] = decision
        _log.info("%s", describe_decision(decision))

    def _made(self, records: Sequence[KernelRecord]) -> Sequence[AnyKernel | KernelsUnavailable]:
        if not records:
            return ()
        if self._make is not None:
            return self._make(records)
        from hybridpar.tvm_kernels.compiled import make_kernels

        return make_kernels(records)

    @cached_property
    def digest(self) -> str:
        """Eight digits that tell these records, and whether they are used at all, from others."""
        lines = sorted(record.line() for record in self.database.everything) if wanted() else []
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def why_no_record(database: Database, key: KernelKey) -> str:
    """What the nearest record of another key differs in."""
    near: list[tuple[int, str]] = []
    if (own := database.best(key, current=False)) is not None:
        return why_unused(own, installed_versions())
    if key in set(database):
        return "its candidates were compiled and not measured; tune on this device"
    for other in database:
        if (other.op, other.direction, other.dtype) != (key.op, key.direction, key.dtype):
            continue
        if database.best(other, current=False) is None:
            continue
        differing = []
        if other.shape != key.shape:
            alike = ConvShape(key.shape.batch, *_without_batch(other.shape))
            if alike != key.shape:
                continue
            differing.append(f"batch {other.shape.batch}")
        differing += apart(other, key)
        near.append((len(differing), ", ".join(differing)))
    return f"its record is for {min(near)[1]}" if near else "there is no record"


def apart(other: KernelKey | NormKey, key: KernelKey | NormKey) -> list[str]:
    """Where and how another record's operation ran, as far as it differs: layout, threads, device."""
    differing = [] if other.layout == key.layout else [str(other.layout)]
    differing += [] if other.threads == key.threads else [f"{other.threads} thread(s)"]
    return differing + ([] if other.device == key.device else [other.device])


def how_to_tune(key: KernelKey | NormKey) -> str:
    """How to get a record, in words for an error."""
    layout = "" if key.layout is Layout.CHANNELS_LAST else f" --memory-format {key.layout}"
    return (
        f"Write the line `{key.shape.text}` to a file, run `hybridpar tune --shapes FILE --threads {key.threads}"
        f'{layout} -o k.jsonl`, and use k.jsonl; for a whole model `hybridpar tune MODEL --for "OPTIONS OF TRAIN" '
        "-o k.jsonl`. "
        "Batches of other sizes, also in an evaluation, need records of their own. Or set HYBRIDPAR_KERNELS=on."
    )


def _without_batch(shape: ConvShape) -> tuple[Any, ...]:
    return (
        *(shape.channels, shape.height, shape.width),
        *(shape.kernel, shape.stride, shape.padding, shape.dilation),
    )


def describe_key(key: KernelKey) -> str:
    """The convolution in words."""
    return f"{key.direction} {key.shape.text} {key.layout}, {key.threads} thread(s)"


def describe_decision(decision: Decision) -> str:
    """One line that says what runs and why."""
    record = decision.record
    times = ""
    if record is not None and record.ms is not None and record.stock_ms is not None:
        times = f" ({record.ms:.3f} ms against {record.layout_ms or record.stock_ms:.3f} ms)"
    runs = "a tuned kernel" if decision.kernel is not None else f"torch, as {decision.why}"
    return f"{describe_key(decision.key)} runs on {runs}{times}"


_DIRECTIONS = tuple(Direction)
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_active: Choices | None = None


def active_choices() -> Choices | None:
    """What the op chooses by; None where nobody has given a database, and everything runs on torch."""
    return _active


def use_choices(choices: Choices | None) -> Choices | None:
    """Choose by something else from now on, in the whole process; returns what was used before."""
    global _active
    before, _active = _active, choices
    return before


def kernel_for(
    direction: Direction,
    sizes: Sequence[int],
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    layout: Layout,
) -> AnyKernel | None:
    """The kernel of a call on the CPU in float32, or None for torch.

    Args:
        direction: What is computed.
        sizes: Of the input: N, C, H, W.
        taps: Rows and columns of a filter.
        stride: Two numbers, as the next ones.
        padding: As torch has it.
        dilation: As torch has it.
        layout: Of input and output.
    """
    choices = _active
    if choices is None:
        return None
    threads = torch.get_num_threads()
    try:  # most calls come with tuples, which need not be made again
        return choices.found[direction, sizes, taps, stride, padding, dilation, layout, threads]
    except (KeyError, TypeError):
        call = (direction, *map(tuple, (sizes, taps, stride, padding, dilation)), layout, threads)
    try:
        return choices.found[call]
    except KeyError:
        return choices.find(call)


def cuda_kernel_for(
    device: torch.device, dtype: torch.dtype, direction: Direction, sizes: Sequence[int], *rest: Any
) -> AnyKernel | None:
    """The kernel of a call on a GPU, or None for torch.

    Args:
        device: The GPU.
        dtype: Of all tensors.
        direction: What is computed.
        sizes: Of the input.
        rest: As `kernel_for` takes it, from taps to layout.
    """
    choices, name = _active, _DTYPES.get(dtype)
    if choices is None or name is None:
        return None
    *numbers, layout = rest
    call = (direction, tuple(sizes), *map(tuple, numbers), layout, device.index or 0, name)
    try:
        return choices.found[call]
    except KeyError:
        return choices.find(call)


def any_kernel(*rest: Any, on: tuple[torch.device, torch.dtype] | None = None) -> bool:
    """Whether any direction has a kernel.

    Args:
        rest: As `kernel_for` takes it, without the direction.
        on: A GPU and a dtype; None for the CPU.
    """
    if on is not None:
        return any(cuda_kernel_for(*on, direction, *rest) is not None for direction in _DIRECTIONS)
    return any(kernel_for(direction, *rest) is not None for direction in _DIRECTIONS)
