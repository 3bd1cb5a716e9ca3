"""The baselines, each set up as its documentation says.

The published baseline is not known, so all likely candidates are here.

One loop serves them all, because they differ in what wraps the model and in whether a step is replayed from a graph.
Learning rates, optimizer and batches are hybridpar's own; nothing in a step makes the host wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from benchmarks.thesis.task import Task, settle
from hybridpar.comm.world import World
from hybridpar.optim.build import Rates, build_optimizer
from hybridpar.optim.schedule import rate_factor
from hybridpar.train.results import evaluate

ONE_DEVICE = "one device"
DATA_PARALLEL = "nn.DataParallel"
DDP = "DDP"
GRAPHED = ("one device, CUDA graph", "DDP, CUDA graph")
COMPILED = ("one device, torch.compile", "DDP, torch.compile")
PEERS = (ONE_DEVICE, *(method for pair in zip(GRAPHED, COMPILED, strict=True) for method in pair), DATA_PARALLEL, DDP)

#: DDP must have run so many eager steps before it may be captured (PyTorch's notes on CUDA semantics).
EAGER_STEPS_BEFORE_CAPTURE = 11


def why_not(method: str, device: str, workers: int) -> str | None:
    """Why a method has nothing to run on here; None where it can."""
    if method == DATA_PARALLEL and (device != "cuda" or workers < 2):
        return "nn.DataParallel needs two GPUs"
    if method in GRAPHED and device != "cuda":
        return "CUDA graphs need a GPU"
    if method.startswith(DDP) and workers < 2:
        return "DistributedDataParallel needs two workers"
    if method in (GRAPHED[0], COMPILED[0]) and workers > 1:
        return "on several devices it is measured together with DDP"
    return None


class Peer:
    """One baseline on this worker. Where only rank 0 works, the other workers do nothing."""

    def __init__(self, method: str, task: Task, world: World) -> None:
        self.method, self._task, self._world = method, task, world
        self._together = method.startswith(DDP)
        self._works = self._together or world.is_main
        self._steps_done = 0
        if self._works:
            self._model = task.build().to(world.device)
            self._optimizer = build_optimizer(self._model, task.config)
            self._rates = Rates(self._optimizer, world.device if method in GRAPHED else None)
            self._wrapped = self._wrap()
            self._graph: GraphedStep | None = None

    def _wrap(self) -> Any:
        model, device = self._model, self._world.device
        wrapped: Any = model
        if self.method == DATA_PARALLEL:
            wrapped = DataParallel(model)
        elif self._together:
            where = [device.index] if device.type == "cuda" else None
            with _side_stream(device, self.method in GRAPHED):
                # Gradients as views of its buckets: DDP's faster form.
                wrapped = DistributedDataParallel(model, device_ids=where, gradient_as_bucket_view=True)
        return torch.compile(wrapped) if self.method in COMPILED else wrapped

    def epoch(self, number: int, most_steps: int | None = None) -> None:
        """Train for one epoch, to the end of its last step."""
        if not self._works:
            return
        rank, size = (self._world.rank, self._world.size) if self._together else (0, 1)
        with self._threads():
            self._model.train()
            for step, batch in enumerate(self._task.batches(number, self._world.device, rank, size, size)):
                if step == most_steps:
                    break
                ((images, labels),) = batch.micro_batches
                self.step(images, labels)
            settle(self._world.device)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step at the rate that is due."""
        factor = rate_factor(self._steps_done, self._task.total_steps, self._task.steps, self._task.config)
        self._steps_done += 1
        if self.method in GRAPHED:
            self._graph = self._graph or GraphedStep(self._model, self._wrapped, self._optimizer, images, labels)
            self._rates.set(factor)
            self._graph(images, labels)
            return
        self._rates.set(factor)
        self._optimizer.zero_grad()
        F.cross_entropy(self._wrapped(images), labels).backward()
        self._optimizer.step()

    def accuracy(self) -> float:
        """Share of the test images that are classified rightly; rank 0 tests its model, others return 0."""
        if not self._world.is_main:
            return 0.0
        self._model.eval()
        device = self._world.device
        with self._threads():
            return evaluate(self._model, F.cross_entropy, self._task.test(device), World(device=device)).accuracy

    def close(self) -> None:
        """Forget compiled code: torch gives up compiling a function that it has compiled for too many models."""
        if self.method in COMPILED:
            torch.compiler.reset()

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """On a CPU, a worker that works alone has the threads of all."""
        before = torch.get_num_threads()
        if self._world.device.type == "cpu" and not self._together:
            torch.set_num_threads(before * self._world.size)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class GraphedStep:
    """A whole step - forward, backward, update - captured once and replayed.

    Capturing needs eager steps before it. They train on the first batch, and are undone: weights and statistics are
    put back, and momenta set to zero, in place, because the graph knows where they lie.

    Args:
        model: The model whose state is put back.
        wrapped: What is called: the model, or DDP around it.
        optimizer: Fused, with rates on the device, which replays read.
        images: A batch of the shape that all batches have.
        labels: Its labels.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapped: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        images: Tensor,
        labels: Tensor,
    ) -> None:
        self._images, self._labels = images.clone(), labels.clone()
        before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(wrapped(self._images), self._labels).backward()
            optimizer.step()

        with _side_stream(images.device, True):
            for _ in range(EAGER_STEPS_BEFORE_CAPTURE):
                step()
        torch.cuda.synchronize(images.device)
        self._graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        # NCCL's watchdog thread asks for events meanwhile, which the default mode would take for an error.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            step()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(before[name])
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Replay the step on another batch."""
        self._images.copy_(images, non_blocking=True)
        self._labels.copy_(labels, non_blocking=True)
        self._graph.replay()


@contextmanager
def _side_stream(device: torch.device, wanted: bool) -> Iterator[None]:
    """DDP that is to be captured is built on a stream of its own, and so are the steps before a capture."""
    if not wanted:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
