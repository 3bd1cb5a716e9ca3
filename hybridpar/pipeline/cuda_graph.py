"""Runs training steps as CUDA graphs: where kernels are small, a GPU waits for the host that launches them.

A `StepGraph` runs steps of one shape a few times, captures one over all lanes, and from then on replays it. What
differs between steps is read from memory that is filled before: images and targets, learning rates, the flags to stop
or save. What the host may know is copied out of it afterwards. Steps of other shapes, such as the last of an epoch, run
without the graph, and so do all steps if the capture fails; results are the same either way.

The rules of a capture (CUDA C++ Programming Guide, "Creating a Graph Using Stream Capture"; PyTorch's notes on CUDA
graphs): it begins on a stream that is not the default one; every lane joins it by waiting for an event of that stream,
and is joined to it again before the end; the host reads nothing; memory comes from a pool of the graph's own.
Gradients are made anew in every step, so those of a captured step lie in that pool. The default generator of a GPU is
registered with every graph, so that random operations draw new numbers in each replay.

Also checks, before training, that a step can be captured as a CUDA graph; each error says what to change.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from hybridpar.lanes import Lanes
from hybridpar.pipeline.executor import Executor
from hybridpar.pipeline.step import StepRequest, StepState

_log = logging.getLogger(__name__)

#: One name for it, so that tests can put a stand-in here.
cuda: Any = torch.cuda

#: Steps before the capture. Libraries choose their kernels and make their workspaces in the first ones, and buckets are
#: cut anew after the first; where workers exchange gradients, PyTorch asks for 11.
WARM_UPS, WARM_UPS_WITH_PEERS = 3, 11

MicroBatches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Shape:
    """What is equal in all steps that one graph can stand for."""

    tensors: list[Any]
    samples: int
    global_samples: float


class StepGraph:
    """Runs a training step as one CUDA graph.

    `set_rates` sets the learning rates to multiples of their peaks, on the device and in the order of the current
    stream.
    """

    def __init__(
        self,
        executor: Executor,
        set_rates: Callable[[float], None],
        lanes: Lanes,
        optimizers: Sequence[torch.optim.Optimizer],
        modules: Sequence[nn.Module],
        warm_ups: int = WARM_UPS,
    ) -> None:
        self._executor = executor
        self._set_rates = set_rates
        self._lanes = lanes
        self._optimizers = optimizers
        self._modules = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
        self._warm_ups = warm_ups
        self._stream = cuda.Stream(lanes.device)
        self._flags = torch.zeros(2, dtype=torch.float64, device=lanes.device)
        self._requested = (False, False)
        self._shape: _Shape | None = None
        self._flags_of_model: list[bool] = []
        self._static: list[tuple[Tensor, Tensor]] = []
        self._left = warm_ups
        self._graph: Any = None
        self._issued: StepState | None = None
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._away = False
        self.reason: str | None = None

    @property
    def captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._graph is not None

    def step(self, request: StepRequest, global_samples: float | None) -> StepState | None:
        """Run a step."""
        micro_batches = request.micro_batches
        if global_samples is None:
            self._stop_trying("the samples of the other workers are not known; give batches with `global_samples`")
        if self.reason is not None or global_samples is None:
            return None
        tensors = [(tensor.shape, tensor.stride(), tensor.dtype) for pair in micro_batches for tensor in pair]
        shape = _Shape(tensors, request.samples, global_samples)
        flags_of_model = [parameter.requires_grad for parameter in self._parameters]
        flags_of_model += [module.training for module in self._modules]
        # The largest step is the usual one. All workers see the same sizes, so all begin anew in the same step.
        if self._shape is None or flags_of_model != self._flags_of_model or global_samples > self._shape.global_samples:
            self._begin(shape, flags_of_model, micro_batches)
        if shape != self._shape:
            self._away = True
            return None
        if self._graph is None and self._left == 0 and not self._capture():
            return None
        self._fill(micro_batches, request.rate_factor, (request.stop, request.save))
        if self._graph is None:
            return self._warm_up()
        self._graph.replay()
        return self._issued

    def forget(self) -> None:
        """Begin anew: tensors that were captured, as those of an optimizer, have been replaced by others."""
        if self._graph is not None:
            cuda.synchronize(self._lanes.device)
        self._graph, self._issued, self._gradients = None, None, []
        self._shape, self._static, self._left = None, [], self._warm_ups

    # ------------------------------------------------------------- every step

    def _begin(self, shape: _Shape, flags_of_model: list[bool], micro_batches: MicroBatches) -> None:
        self.forget()
        self._shape, self._flags_of_model = shape, flags_of_model
        self._static = [(torch.empty_like(inputs), torch.empty_like(targets)) for inputs, targets in micro_batches]

    def _fill(self, micro_batches: MicroBatches, rate_factor: float, requested: tuple[bool, bool]) -> None:
        """Put what is new in this step where the captured step reads it."""
        if self._away:
            self._return()
        for static, given in zip(self._static, micro_batches, strict=True):
            for target, source in zip(static, given, strict=True):
                target.copy_(source, non_blocking=True)
        self._set_rates(rate_factor)
        if requested != self._requested:
            for index, flag in enumerate(requested):
                self._flags[index].fill_(float(flag))
            self._requested = requested

    def _return(self) -> None:
        """After steps that ran without the graph: they may still be reading, and have left gradients of their own."""
        self._join()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._away = False

    def _issue(self) -> StepState:
        """Issue the step on all lanes, from the current stream and back to it."""
        assert self._shape is not None
        start = self._lanes.caller.record()
        for lane in self._lanes.others:
            lane.wait(start)
        request = StepRequest(self._static, self._shape.samples, flags=self._flags)
        issued = self._executor.issue(request, self._shape.global_samples)
        self._join()
        return issued

    def _join(self) -> None:
        for lane in self._lanes.others:
            self._lanes.caller.wait(lane.record())

    # ---------------------------------------------------- until there is a graph

    def _warm_up(self) -> StepState:
        """Run the step on the streams on which it is going to be captured."""
        self._left -= 1
        current = cuda.current_stream(self._lanes.device)
        self._stream.wait_stream(current)
        with cuda.stream(self._stream), self._rehearsal() if self._left == 0 else nullcontext():
            issued = self._issue()
        current.wait_stream(self._stream)
        return issued

    @contextmanager
    def _rehearsal(self) -> Iterator[None]:
        """In the last step before the capture, look for what would break it: whatever makes the host wait."""
        before = cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                cuda.set_sync_debug_mode(before)
        waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
        for warning in caught:
            if warning not in waits and "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        if waits:
            self._stop_trying(f"the host waits for the device in {waits[0].filename}, line {waits[0].lineno}")

    def _capture(self) -> bool:
        """Capture the step, which does not run it. False where that fails: the step can then be issued as usual."""
        self._executor.wait()
        cuda.synchronize(self._lanes.device)
        graph, collecting = cuda.CUDAGraph(), gc.isenabled()
        # Objects that own events or pinned memory must not be finalised by chance while streams are captured.
        gc.collect()
        gc.disable()
        # The workspaces that the warm-ups left to cuBLAS are anybody's to free, as graphs of torch.compile do, and the
        # captured kernels would go on writing to them. Made anew inside, they belong to the graph's memory.
        _free_workspaces()
        cuda.empty_cache()
        try:
            with cuda.stream(self._stream), _capturable(self._optimizers):
                graph.capture_begin(capture_error_mode="thread_local")  # other threads pin memory for loaders
                try:
                    self._issued = self._issue()
                finally:
                    graph.capture_end()
                    _free_workspaces()
        except Exception as error:
            self._issued = None
            self._lanes.forgive()
            self._executor.give_up()
            self._stop_trying(_text_of(error))
            return False
        finally:
            if collecting:
                gc.enable()
        self._graph = graph
        self._gradients = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        self._away = False
        return True

    def _stop_trying(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            _log.warning("no CUDA graph of the training step: %s; training goes on without", reason)


def _free_workspaces() -> None:
    """Free the memory that cuBLAS works in. PyTorch has no public name for it, and without CUDA none at all."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


@contextmanager
def _capturable(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, Adam and AdamW let themselves be captured. Fused, they compute the same with and without the mark."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "capturable" in group]
    before = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value


def _text_of(error: BaseException) -> str:
    """What came first: ending a capture that has failed is an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0] or type(error).__name__


def check_capturable(
    device: torch.device,
    world: World,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    positions: int = 1,
    random_stages: Sequence[int] = (),
    compiled: bool = False,
) -> None:
    """Refuse what no step can be captured of."""
    if device.type != "cuda":
        raise UsageError(
            f"--cuda-graph on device {str(device)!r}",
            "A CUDA graph is a step as one launch, on a GPU.",
            "Leave out --cuda-graph, or train on a machine with a GPU.",
        )
    if positions > 1:
        raise UsageError(
            f"--cuda-graph with the stages of a replica on {positions} workers",
            "A graph is of one GPU; transfers between workers are issued by the host.",
            "Leave out --cuda-graph, or have all stages on one worker per replica: --replicas and --nproc equal.",
        )
    if world.size > 1 and "cuda:nccl" not in (backend := str(dist.get_backend_config(world.control))):
        raise UsageError(
            f"--cuda-graph with {world.size} workers over {backend!r}",
            "Only NCCL adds gradients on the GPU itself, where it can be captured.",
            "Leave out --cuda-graph, or initialise the job with NCCL for CUDA tensors.",
        )
    for optimizer in optimizers:
        fused = all(group.get("fused") for group in optimizer.param_groups)
        if not (fused and getattr(optimizer, "_step_supports_amp_scaling", False)):
            raise UsageError(
                f"--cuda-graph with {type(optimizer).__name__}, not fused",
                "In a graph only a fused optimizer reads its rate, and whether the step counts, from the device.",
                "Make it with fused=True (SGD, Adam and AdamW have that), or leave out --cuda-graph.",
            )
    if random_stages:
        raise UsageError(
            f"--cuda-graph with random operations, such as dropout, in stage {random_stages[0]}",
            "In a pipeline the host seeds them in every step; a graph would repeat the masks of one step for ever.",
            "Leave out --cuda-graph, or --stages.",
        )
    if compiled:
        from torch._inductor import config

        if config.triton.cudagraphs:
            raise UsageError(
                "--cuda-graph with --compile, which was told to make CUDA graphs of its own",
                "A graph cannot be replayed while another one is captured.",
                "Set torch._inductor.config.triton.cudagraphs = False, or leave out --cuda-graph.",
            )
