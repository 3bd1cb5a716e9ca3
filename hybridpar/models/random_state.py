"""What a process has that models use: random number generators, to keep and to put back, and freed memory."""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import torch

_CPU = torch.device("cpu")


def random_state(device: torch.device = _CPU) -> dict[str, Any]:
    """State of every random number generator of this process: torch (CPU and GPU), numpy, Python."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device = _CPU) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def same_random(devices: Sequence[int] = ()) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch on exit."""
    before = random_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            restore_random_state(before)


def give_back_memory() -> None:
    """Give what was freed back to the system, where the C library can; the next allocations get new pages."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
