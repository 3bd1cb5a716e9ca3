"""Runs training steps as CUDA graphs: where kernels are small, a GPU waits for the host that launches them.

A `StepGraph` runs steps of one shape a few times, captures one over all lanes, and from then on replays it. What
differs between steps is read from memory that is filled before: images and targets, learning rates, the flags to stop
or save. What the host may know is copied out of it afterwards. Steps of other shapes, such as the last of an epoch, run
without the graph, until one is larger or comes many times in a row: then that is captured instead. So do all steps if
the capture fails; results are the same either way.

A graph is believed if the step before it left nothing changed that a replay would not change: Python's, NumPy's and
torch's random numbers of the host, and plain attributes of modules. A worker alone also replays that step, on the same
batch from the same state, and goes on without the graph where it does otherwise.

The rules of a capture (CUDA C++ Programming Guide, "Creating a Graph Using Stream Capture"; PyTorch's notes on CUDA
graphs): it begins on a stream that is not the default one; every lane joins it by waiting for an event of that stream,
and is joined to it again before the end; the host reads nothing; memory comes from a pool of the graph's own.
Gradients are made anew in every step, so those of a captured step lie in that pool. The default generator of a GPU is
registered with every graph, so that random operations draw new numbers in each replay.
"""

from __future__ import annotations

import gc
import logging
import math
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.errors import first_line
from hybridpar.lanes import Lanes
from hybridpar.pipeline.executor import Executor
from hybridpar.pipeline.step import StepRequest, StepState

_log = logging.getLogger(__name__)

#: One name for it, so that tests can put a stand-in here.
cuda: Any = torch.cuda

#: Steps before the capture. Libraries choose their kernels and make their workspaces in the first ones, and buckets are
#: cut anew after the first; where workers exchange gradients, PyTorch asks for 11.
WARM_UPS, WARM_UPS_WITH_PEERS = 3, 11

#: Steps of another shape in a row before it is taken for the usual one.
LASTING = 20

#: How often a graph is begun anew, as after parameters were frozen.
MOST_BEGUN = 10

#: By how much a replay may differ from the step that was issued, as a part of what the step changed, and of what there
#: is: the kernels are the same, but some add in an order of their own.
CLOSE, ROUNDING = 0.05, 1e-6

MicroBatches = Sequence[tuple[Tensor, Tensor]]

#: What a step writes, by what messages call it.
State = dict[str, list[Tensor]]


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
        alone: bool = True,
    ) -> None:
        self._executor = executor
        self._set_rates = set_rates
        self._lanes = lanes
        self._optimizers = optimizers
        self._stages = modules
        self._modules = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
        self._alone = alone
        self._warm_ups = WARM_UPS if alone else WARM_UPS_WITH_PEERS
        self._stream = cuda.Stream(lanes.device)
        self._flags = torch.zeros(2, dtype=torch.float64, device=lanes.device)
        self._requested = (False, False)
        #: What is equal in all steps that one graph can stand for, and a request of static memory for them.
        self._shape: list[Any] = []
        self._facts: list[Any] = []
        #: The other shape that came last, and how often in a row.
        self._other: tuple[list[Any], int] = [], 0
        self._begun = 0
        self._request: StepRequest | None = None
        self._left = self._warm_ups
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
        shape = [global_samples, request.samples, *tensors]
        facts = self._known_facts()
        count = self._other[1] + 1 if shape == self._other[0] else 1
        self._other = (shape, count) if shape != self._shape else ([], 0)
        # The largest step is the usual one. All workers see the same sizes, so all begin anew in the same step.
        if facts != self._facts or self._shape < shape[:1] or self._other[1] > LASTING:
            self._begin(shape, facts, micro_batches)
        if self._begun > MOST_BEGUN:
            self._stop_trying("shapes, modes, options, or where tensors lie change again and again")
        if shape != self._shape or self.reason is not None:
            self._away = True
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
        self._shape, self._left = [], self._warm_ups

    # ------------------------------------------------------------- every step

    def _known_facts(self) -> list[Any]:
        """What a captured step holds as numbers: where tensors lie, modes, and the options of optimizers."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        options = [value for group in groups for value in group.values() if isinstance(value, int | float | tuple)]
        buffers = [value for module in self._modules for value in module._buffers.values() if value is not None]
        tensors = [(tensor.requires_grad, tensor.data_ptr()) for tensor in (*self._parameters, *buffers)]
        return [tensors, [module.training for module in self._modules], options]

    def _begin(self, shape: list[Any], facts: list[Any], micro_batches: MicroBatches) -> None:
        self.forget()
        self._shape, self._facts, self._other, self._begun = shape, facts, ([], 0), self._begun + 1
        static = [(torch.empty_like(inputs), torch.empty_like(targets)) for inputs, targets in micro_batches]
        self._request = StepRequest(static, shape[1], shape[0], flags=self._flags)

    def _fill(self, micro_batches: MicroBatches, rate_factor: float, requested: tuple[bool, bool]) -> None:
        """Put what is new in this step where the captured step reads it."""
        if self._away:
            self._return()
        assert self._request is not None
        for static, given in zip(self._request.micro_batches, micro_batches, strict=True):
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
        assert self._request is not None
        start = self._lanes.caller.record()
        for lane in self._lanes.others:
            lane.wait(start)
        issued = self._executor.issue(self._request, self._shape[0])
        self._join()
        return issued

    def _join(self) -> None:
        for lane in self._lanes.others:
            self._lanes.caller.wait(lane.record())

    # ---------------------------------------------------- until there is a graph

    def _warm_up(self) -> StepState:
        """Run the step on the streams on which it is going to be captured; after the last one it is."""
        self._left -= 1
        is_last = self._left == 0
        of_host = self._of_host() if is_last else b""
        # On the host, as this step and the capture may need all of the device's memory.
        before = _copied(self._state(), "cpu") if is_last and self._alone else {}
        draws = cuda.get_rng_state(self._lanes.device) if is_last else None
        current = cuda.current_stream(self._lanes.device)
        self._stream.wait_stream(current)
        with cuda.stream(self._stream), self._rehearsal() if is_last else nullcontext():
            issued = self._issue()
        current.wait_stream(self._stream)
        if is_last and of_host != self._of_host():
            self._stop_trying("it draws random numbers on the host, or counts in attributes of a module")
        if is_last and self.reason is None and self._capture() and self._alone:  # peers would be sent to once more
            self._compare(before, draws, issued)
        return issued

    def _state(self) -> State:
        """All that outlives a step, but for what it makes anew."""
        buffers = {f"buffer {name}": [value] for stage in self._stages for name, value in stage.named_buffers()}
        states = [values for optimizer in self._optimizers for values in optimizer.state.values()]
        moments = [value for values in states for value in values.values() if isinstance(value, Tensor)]
        return {"weights": [*self._parameters], "the optimizer's state": moments, **buffers}

    def _of_host(self) -> bytes:
        """What a step may change on the host, which a replay would not."""
        held = [item for module in self._modules for item in vars(module).items()]
        plain = [(name, value) for name, value in held if isinstance(value, bool | int | float | str)]
        draws = random.getstate(), numpy.random.get_state(), torch.get_rng_state().numpy()
        return pickle.dumps((draws, plain))

    @torch.no_grad()
    def _compare(self, before: State, draws: Any, issued: StepState) -> None:
        """Replay the step that was just issued from the state before it, and give the graph up if it does otherwise."""
        assert issued.values is not None
        loss = issued.values[:1]
        if not bool(loss.isfinite()):  # this step shows nothing: the next one is tried
            self._graph, self._issued, self._gradients, self._left = None, None, [], 1
            return
        made: State = {}
        after_draws = cuda.get_rng_state(self._lanes.device)
        try:
            made = {**_copied(self._state()), "loss": [loss.clone()]}
            before["loss"] = [torch.zeros_like(loss)]
            _put(before, self._state())
            cuda.set_rng_state(draws, self._lanes.device)
            self._graph.replay()
            reason = self._difference(before, made)
        except torch.OutOfMemoryError:
            reason = "too little memory is left to compare its first replay with the step that it repeats"
        if reason is not None:
            if made:
                _put(made, self._state())
            cuda.set_rng_state(after_draws, self._lanes.device)
            self.forget()
            self._stop_trying(reason)

    def _difference(self, before: State, made: State) -> str | None:
        """What the replay left otherwise than the step that it repeats, if anything."""
        assert self._issued is not None
        assert self._issued.values is not None
        for name, replayed in {**self._state(), "loss": [self._issued.values[:1]]}.items():
            wrong, changed = _distance(replayed, made[name]), _distance(made[name], before[name])
            size = _norm(tensor for tensor in made[name] if bool(tensor.isfinite().all()))
            if wrong != 0 and not wrong <= CLOSE * changed + ROUNDING * size:
                return f"the first replay left other values in {name} than the step that it repeats"
        return None

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


def _copied(state: State, device: str | None = None) -> State:
    return {
        name: [tensor.detach().to(device or tensor.device, copy=True) for tensor in tensors]
        for name, tensors in state.items()
    }


def _put(values: State, state: State) -> None:
    """Write what was copied to where it was."""
    for name, tensors in state.items():
        for tensor, value in zip(tensors, values[name], strict=True):
            tensor.copy_(value)


def _distance(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The norm of how tensors differ from others. Equal ones differ by nothing, also where they are infinite."""
    pairs = ((tensor, other.to(tensor.device)) for tensor, other in zip(tensors, others, strict=True))
    return _norm(tensor.double() - other.double() for tensor, other in pairs if not torch.equal(tensor, other))


def _norm(tensors: Iterable[Tensor]) -> float:
    """The norm of tensors, which are made one at a time; not finite where one is not."""
    squares = [tensor.double().square().sum() for tensor in tensors]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


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
    return first_line(error)


def why_not_captured(
    device: torch.device,
    world: World,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    positions: int = 1,
    random_stages: Sequence[int] = (),
    compiled: bool = False,
) -> tuple[str, str] | None:
    """What rules out that a step is captured, and the rule; None where nothing does."""
    if device.type != "cuda":
        return f"device {str(device)!r}", "A CUDA graph is a step as one launch, on a GPU."
    if positions > 1:
        what = f"the stages of a replica on {positions} workers"
        return what, "A graph is of one GPU, which has all stages of a replica where --replicas and --nproc are equal."
    if world.size > 1 and world.transport != "nccl":
        what = f"{world.size} workers over {world.transport!r}"
        return what, "Only NCCL adds gradients on the GPU itself, where it can be captured."
    for optimizer in optimizers:
        fused = all(group.get("fused") for group in optimizer.param_groups)
        if not (fused and getattr(optimizer, "_step_supports_amp_scaling", False)):
            what = f"{type(optimizer).__name__}, not fused"
            return what, "Only a fused optimizer (fused=True, of SGD, Adam and AdamW) reads its rate from the device."
    if random_stages:
        what = f"random operations, such as dropout, in stage {random_stages[0]}"
        return what, "With --stages the host seeds them in every step; a graph would repeat the masks of one step."
    if compiled:
        from torch._inductor import config

        if config.triton.cudagraphs:
            what = "--compile, which was told to make CUDA graphs of its own"
            return what, "One would be captured in the other, unless torch._inductor.config.triton.cudagraphs is False."
    return None
