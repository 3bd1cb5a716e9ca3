"""Counts the bytes of all tensors that are alive, in every thread that works for a lane, and the most at one time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridpar.lanes import cpu


class Allocated:
    """What is alive.

    Attributes:
        now: Bytes.
        peak: The most since the last `restart`.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: set[int] = set()
        self._lock = threading.RLock()

    def add(self, tensors: Iterable[Any]) -> None:
        """Count the storages of tensors, each once and until it is freed."""
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = int(storage._cdata)
            with self._lock:
                if key not in self._known:
                    self._known.add(key)
                    weakref.finalize(storage, self._free, key, storage.nbytes())
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def _free(self, key: int, size: int) -> None:
        with self._lock:
            self._known.discard(key)
            self.now -= size


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, count: Allocated) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count.add(tree_leaves(result))
        return result


@contextmanager
def counting(*alive: torch.Tensor) -> Iterator[Allocated]:
    """Inside, tensors are counted, in this thread and in those of lanes on a CPU.

    Args:
        alive: Tensors that exist already.

    Yields:
        The count.
    """
    count, run = Allocated(), cpu._Task.run
    count.add(alive)
    del alive

    def watched(task: Any, worker: Any) -> None:
        with _Watch(count):
            run(task, worker)

    cpu._Task.run = watched  # type: ignore[method-assign]
    try:
        with _Watch(count):
            yield count
    finally:
        cpu._Task.run = run  # type: ignore[method-assign]
