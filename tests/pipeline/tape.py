"""Stand-ins for CUDA streams, events and graphs that run on the CPU, to test what a replay computes without a GPU.

`StandInCuda` is the part of `torch.cuda` that lanes and graphs use. Work on its streams runs at once on the CPU. It
knows the rules of a capture: a stream takes part from when it has waited for an event of one that does, nothing else
may be used, and at the end all must be joined to the first. `Tape` is the graph: it keeps every operation that torch
dispatches during the capture, forward, backward and optimizer, and takes back what they wrote, as a capture runs
nothing. A replay runs the same operations on the same memory. Whatever the host put in as a number stays as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.lanes import cuda as lane_cuda
from hybridpar.pipeline import cuda_graph

#: Functions that look at a value on a CPU only.
_CPU_ONLY = {"measure", "clip_factor", "sum_of_squares"}

NOT_PERMITTED = "operation not permitted when stream is capturing"


class StandInEvent:
    def __init__(self, cuda: StandInCuda) -> None:
        self._cuda = cuda
        self.clock: dict[StandInStream, int] = {}
        self.captured = False

    def record(self, stream: StandInStream) -> None:
        stream.ticks += 1
        self.clock = {**stream.clock, stream: stream.ticks}
        self.captured = stream in self._cuda.taking_part

    def query(self) -> bool:
        assert not self.captured, NOT_PERMITTED
        return True

    def synchronize(self) -> None:
        assert not self.captured, NOT_PERMITTED


class StandInStream:
    def __init__(self, cuda: StandInCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name
        self.ticks = 0
        self.clock: dict[StandInStream, int] = {}  # how far into other streams everything from here on comes after

    def wait_event(self, event: StandInEvent) -> None:
        if event.captured:
            self._cuda.taking_part.add(self)
        elif self in self._cuda.taking_part:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        for stream, ticks in event.clock.items():
            self.clock[stream] = max(ticks, self.clock.get(stream, 0))

    def wait_stream(self, other: StandInStream) -> None:
        event = StandInEvent(self._cuda)
        event.record(other)
        self.wait_event(event)
        self._cuda.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        assert self not in self._cuda.taking_part, NOT_PERMITTED


class StandInCuda:
    """The part of `torch.cuda` that lanes and graphs use.

    Attributes:
        log: What happened.
        taking_part: Streams of the capture under way.
        first: The one that it began on.
        problems: What is wrong with it.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.taking_part: set[StandInStream] = set()
        self.first: StandInStream | None = None
        self.problems: list[str] = []
        self.sync_debug_mode = 0
        self.draws = torch.Generator()
        self._streams = 0
        self.current = StandInStream(self, "default")

    def Event(self) -> StandInEvent:
        return StandInEvent(self)

    def Stream(self, device: object = None, priority: int = 0) -> StandInStream:
        self._streams += 1
        return StandInStream(self, f"stream {self._streams}")

    def CUDAGraph(self) -> Tape:
        return Tape(self)

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: object = None) -> StandInStream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.current in self.taking_part

    @contextmanager
    def stream(self, stream: StandInStream) -> Iterator[None]:
        if self.first is not None and stream not in self.taking_part:
            self.problems.append(f"work on {stream.name}, which takes no part")
        outer, self.current = self.current, stream
        stream.ticks += 1
        try:
            yield
        finally:
            self.current = outer

    def synchronize(self, device: object = None) -> None:
        assert self.first is None, NOT_PERMITTED
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        assert self.first is None, NOT_PERMITTED

    def get_rng_state(self, device: object = None) -> Tensor:
        return self.draws.get_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        self.draws.set_state(state)

    def get_sync_debug_mode(self) -> int:
        return self.sync_debug_mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.sync_debug_mode = {"default": 0, "warn": 1, "error": 2}.get(str(mode), 0)
        self.log.append(f"sync debug mode {mode}")


class Tape(TorchDispatchMode):
    """A graph: operations, with the memory they read and write."""

    def __init__(self, cuda: StandInCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: set[int] = set()  # addresses of memory that the capture allocated
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # other memory that was written to, as it was

    def capture_begin(self, *, capture_error_mode: str) -> None:
        assert self._cuda.current.name != "default", "a capture cannot begin on the default stream"
        self._cuda.log.append(f"capture, {capture_error_mode}")
        self._cuda.first, self._cuda.problems = self._cuda.current, []
        self._cuda.taking_part = {self._cuda.current}
        self._draws = self._cuda.draws.get_state()
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        first, others = self._cuda.first, self._cuda.taking_part - {self._cuda.first}
        assert first is not None
        problems = self._cuda.problems
        problems += [f"{one.name} is not joined" for one in others if first.clock.get(one, 0) < one.ticks]
        self._cuda.first, self._cuda.taking_part = None, set()
        with torch.no_grad():
            for memory, saved in self._before.values():
                memory.copy_(saved)
        self._cuda.draws.set_state(self._draws)  # the generator of a GPU is registered with every graph
        if problems:
            raise RuntimeError(f"capture was invalidated: {', '.join(problems)}")
        self._cuda.log.append(f"captured {len(others)} other streams")

    def replay(self) -> None:
        self._cuda.log.append(f"replay on {self._cuda.current.name}")
        with torch.no_grad():
            for function, args, kwargs, kept in self._operations:
                fresh = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
                if "empty" in function.__name__:
                    continue
                given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
                for target, source in zip(kept, fresh, strict=True):
                    if _address(target) not in given:
                        target.copy_(source)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        if name.startswith("lift_fresh") or (name.startswith("_local_scalar_dense") and not _on_cpu_only()):
            self._cuda.problems.append(name)
            raise RuntimeError(NOT_PERMITTED)
        for written in _written(function, args, kwargs):
            address = _address(written)
            if address not in self._made and address not in self._before:
                memory = torch.as_strided(
                    written.detach(), (written.untyped_storage().nbytes() // written.element_size(),), (1,), 0
                )
                self._before[address] = (memory, memory.clone())
        result = function(*args, **kwargs)
        kept = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self._made.update(_address(leaf) for leaf in kept if _address(leaf) not in given)
        self._operations.append((function, args, kwargs, [leaf.detach() for leaf in kept]))
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on_cpu_only() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _CPU_ONLY and "hybridpar" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that an operation writes to."""
    written = []
    for index, argument in enumerate(function._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        # Its declaration says nothing of the running statistics that it moves.
        moved = function.__name__.startswith("native_batch_norm.") and argument.name.startswith("running")
        if moved or (argument.alias_info is not None and argument.alias_info.is_write):
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return written


class StreamLanes(Lanes):
    """Lanes that are streams of a stand-in, for tensors on the CPU."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.device = self.caller.device = torch.device("cpu")

    def open(self, name: str, **options: Any) -> Lane:
        self.device = torch.device("cuda", 0)
        try:
            lane = super().open(name, **options)
        finally:
            self.device = torch.device("cpu")
        lane.device = self.device
        return lane

    def event(self) -> Event:
        return lane_cuda.CudaEvent(self)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    """Put a stand-in in the place of `torch.cuda`, and have what is captured be allowed on a CPU."""
    cuda = StandInCuda()
    for module in (lane_cuda, cuda_graph):
        monkeypatch.setattr(module, "cuda", cuda)
    monkeypatch.setattr(cuda_graph, "why_not_captured", lambda *args, **kwargs: None)
    return cuda
