"""Counts what a step asks of a GPU, on a machine without one.

Inside `pretend_cuda` tensors of the CPU say that they are on a GPU, so the package takes the branches that it takes
there, and computes what it would. `Calls` counts the operations that a GPU would be given to run, which views and new
memory are not, and each place where the host would wait for it: numbers that it reads, events and streams that it
synchronises with, and numbers of its own that it copies to the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hybridpar.lanes import cuda as lane_cuda
from hybridpar.pipeline import cuda_graph, step
from tests.pipeline.tape import StandInCuda, StandInEvent, StandInStream

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

#: Read by the host at once: what it says decides what is launched next.
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")

#: Nothing runs for these.
_NOTHING = ("empty", "new_empty", "_record_function")

#: Numbers of the host, on their way to the device from memory that is not page-locked.
_COPIES = "lift_fresh"


class Calls(TorchDispatchMode):
    """Counts.

    Attributes:
        launched: Operations that a GPU would run, by name.
        waits: For what the host would wait, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.waits: list[str] = []

    @property
    def launches(self) -> int:
        """How many operations there were."""
        return self.launched.total()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.partition(".")[0]
        if name.startswith(_COPIES) or (name in _READS and not _on_host(args[0])) or _waits_for_copy(name, args):
            self.waits.append(name)
        elif not name.startswith(_NOTHING) and not _is_view(function):
            self.launched[name] += 1
        return function(*args, **(kwargs or {}))


def _is_view(function: Any) -> bool:
    """Whether what an operation returns lies in memory of what it was given, and is not written."""
    aliases = [result.alias_info for result in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _waits_for_copy(name: str, args: Any) -> bool:
    """Whether an operation copies between host and device, and does not return before."""
    return name == "copy_" and _on_host(args[0]) != _on_host(args[1]) and not (len(args) > 2 and args[2])


def _on_host(tensor: Tensor) -> bool:
    return getattr(tensor, "is_of_the_host", False)


class _Pretend(TorchFunctionMode):
    """Tensors are on a GPU, but for those in page-locked memory."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.device:
            return torch.device(*args, **kwargs)
        if function == torch.Tensor.device.__get__:
            return CPU if _on_host(args[0]) else GPU
        if function == torch.Tensor.is_cuda.__get__:
            return not _on_host(args[0])
        if function == torch.Tensor.is_cpu.__get__:
            return _on_host(args[0])
        if function in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu) and not _on_host(args[0]):
            self._calls.waits.append(function.__name__)
        if function is torch.Tensor.to and any(_names_cpu(leaf) for leaf in tree_leaves((args[1:], kwargs))):
            self._calls.waits.append("to the host")
        pinned = kwargs.pop("pin_memory", False) or function is torch.Tensor.pin_memory
        copies = function is torch.Tensor.pin_memory or (
            function is torch.Tensor.to and _on_host(args[0]) and any(map(_names_gpu, tree_leaves((args[1:], kwargs))))
        )
        args, kwargs = tree_map(lambda leaf: CPU if _names_gpu(leaf) else leaf, (args, kwargs))
        result = args[0].clone() if copies else function(*args, **kwargs)
        if pinned:
            result.is_of_the_host = True
        return result


def _group_on_gpu(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """What fused optimizers divide tensors by: the device is asked in C++, which no mode hears of."""
    return {(GPU, key[1]): value for key, value in _group(*args, **kwargs).items()}


_group = torch.optim.Optimizer._group_tensors_by_device_and_dtype


def _names_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "cuda"


def _names_cpu(leaf: Any) -> bool:
    return leaf == CPU if isinstance(leaf, torch.device) else leaf == "cpu"


@contextmanager
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Inside, there is a GPU."""
    calls, cuda, autocast = Calls(), StandInCuda(), torch.autocast

    def note(what: str) -> Any:
        return lambda *_: calls.waits.append(what)

    with monkeypatch.context() as patched:
        for module in (lane_cuda, cuda_graph, step):
            patched.setattr(module, "cuda", cuda)
        for kind, what in ((StandInEvent, "event"), (StandInStream, "stream"), (StandInCuda, "device")):
            patched.setattr(kind, "synchronize", note(what))
        patched.setattr(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(_group_on_gpu))
        patched.setattr(torch, "autocast", lambda _, **options: autocast("cpu", **options))
        patched.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
        patched.setattr(torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))
        patched.setattr(torch.cuda, "default_generators", (torch.default_generator,))
        patched.setattr(torch.cuda, "is_current_stream_capturing", cuda.is_current_stream_capturing)
        with _Pretend(calls), calls:
            yield calls
