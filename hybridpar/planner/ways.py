"""Chooses the way to compute a step: memory format, tuned kernels, precision, threads, CUDA graph, torch.compile.

Every worker takes whole steps of its own, all workers at the same time. Starting from the run's options, each change
that they leave open is tried in turn, and stays if the step gets faster by more than `MARGIN`. The two ways that are
compared take turns, so that what the machine does meanwhile disturbs both alike.

A way is believed only after its first step gave the loss and every gradient of the plain step, up to rounding. Kernels
can be wrong without an error: on CPUs with AMX, torch 2.14 gives weight gradients of 1e20 and more for depthwise
convolutions with dilation 2 in bfloat16 and channels_last.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, SyncError, UsageError
from hybridpar.models.state import twin_of
from hybridpar.partition.profile import intra_op_threads
from hybridpar.pipeline.cuda_graph import why_not_captured
from hybridpar.plan import Compute
from hybridpar.planner.resolve import compute_of
from hybridpar.planner.trials import FIRST_STEPS, OpenTrial, StepValues, Trial, as_problem, timed
from hybridpar.tvm_kernels.swap import has_tuned_kernels

#: A change stays where the step takes at most this part of the time without it.
MARGIN = 0.97
#: A change is given up after one turn where its step takes longer than this multiple.
HOPELESS = 1.15
#: It is given up after the first step beyond this multiple, before any turn: steps get faster, but not by as much.
HOPELESS_AT_FIRST = 4.0
#: Turns of two ways, unless so many milliseconds of steps were timed before.
TURNS, ENOUGH_MS = 4, 400.0

#: How far a gradient may lie from that of the plain step, as a part of its norm, in float32 and in half precision.
CLOSE, CLOSE_IN_HALF = 0.02, 0.5

#: Steps after which one that is captured is replayed.
CAPTURED_AFTER = 4

#: Seconds that torch.compile is taken to need, and the least multiple of them that a run takes for which it is tried.
COMPILE_SECONDS, COMPILE_PAYS = 90.0, 40


@dataclass(frozen=True)
class Change:
    """A change of the way to compute a step.

    Attributes:
        name: What to call it.
        options: Options of a run that it sets.
        threads: Threads of an operation on a CPU that it sets; None for as many as before.
    """

    name: str
    options: Mapping[str, Any]
    threads: int | None = None


@dataclass(frozen=True)
class Worth:
    """What a change was worth: the time of a step with it over that without, or why it cannot be used."""

    name: str
    ratio: float | None = None
    why_not: str = ""
    chosen: bool = False


@dataclass(frozen=True)
class Way:
    """How a step is computed, as `choose_way` found it.

    Attributes:
        options: Options of the run that differ from those that were given.
        threads: Threads of an operation on a CPU; None for as many as before.
        step_ms: Milliseconds of a step of every worker.
        eager_ms: The same without torch.compile and CUDA graph, of the slowest worker.
        plain_ms: The same with the options as they were given.
        worths: What every change was worth, in the order in which they were tried.
    """

    options: dict[str, str | bool]
    threads: int | None
    step_ms: tuple[float, ...]
    eager_ms: float
    plain_ms: float
    worths: tuple[Worth, ...] = ()


def compute_of_way(config: TrainConfig, way: Way | None) -> Compute:
    """How the steps of a run with these options are computed, in the way that was found."""
    return compute_of(config, None) if way is None else compute_of(replace(config, **way.options), way.threads)  # type: ignore[arg-type]


COMPILED = "torch.compile"

#: Options that a way changes, where the user left them open.
CHANGED = ("memory_format", "kernels", "amp", "cuda_graph", "compile")


def open_changes(
    model: nn.Module,
    config: TrainConfig,
    decided: Collection[str],
    sample_shape: tuple[int, ...],
    device: torch.device,
    seconds: float,
) -> list[Change]:
    """The changes that the options leave open; `seconds` is what the run takes without any."""
    images, open_ = len(sample_shape) == 3, {*TrainConfig.__dataclass_fields__} - set(decided)
    on_gpu = device.type == "cuda"
    changes = []
    if images and "memory_format" in open_:
        changes.append(Change("channels_last", {"memory_format": "channels_last"}))
    takes_kernels = images and config.amp != "fp16" and config.memory_format != "contiguous"
    if takes_kernels and "kernels" in open_ and has_tuned_kernels(model):
        changes.append(Change("tuned kernels", {"kernels": "auto", "memory_format": "channels_last"}))
    for half_type in ("bf16", "fp16") if "amp" in open_ and config.fidelity != "exact" else ():
        if on_gpu or (half_type == "bf16" and cpu_has_bf16()):
            changes.append(Change(half_type, {"amp": half_type}))
            if images and "memory_format" in open_:  # which may have lost in float32
                in_format = {"amp": half_type, "memory_format": "channels_last"}
                changes.append(Change(f"{half_type} in channels_last", in_format))
    if not on_gpu and config.searches and torch.get_num_threads() > 1:
        half = torch.get_num_threads() // 2
        changes.append(Change(f"{half} thread{'s' if half > 1 else ''}", {}, half))
    if on_gpu and "cuda_graph" in open_:
        changes.append(Change("CUDA graph", {"cuda_graph": "on"}))
    if "compile" in open_ and can_compile(device) and compiling_pays(seconds):
        changes.append(Change(COMPILED, {"compile": True}))
    return [change for change in changes if not _is_refused(replace(config, **change.options))]


def _is_refused(config: TrainConfig) -> bool:
    """Whether a run could not be asked for these options."""
    try:
        config.check_conflicts()
    except UsageError:
        return True
    return False


def _can_capture(world: World, device: torch.device, config: TrainConfig) -> bool:
    """Whether steps of these workers can be captured, which each alone does not show."""
    return why_not_captured(device, world, (), compiled=config.compile) is None


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for bfloat16; without, a step takes up to thirty times as long."""
    return any("bf16" in name and present for name, present in torch.cpu.get_capabilities().items())


def compiling_pays(seconds: float) -> bool:
    """Whether a run takes long enough for torch.compile to be tried."""
    return seconds > COMPILE_PAYS * COMPILE_SECONDS


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile finds what it compiles with."""
    compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
    return compiler and (device.type != "cuda" or importlib.util.find_spec("triton") is not None)


def choose_way(
    model: nn.Module,
    config: TrainConfig,
    decided: Collection[str],
    world: World,
    example: Tensor,
    open_trial: OpenTrial,
    run_steps: int | None = None,
    check: Callable[[float], None] = lambda step_ms: None,
) -> Way:
    """Try the changes that options leave open, by steps of every worker; a collective.

    `example` is the inputs of a micro-batch. `check` is called with the milliseconds of a plain step, on all workers,
    before anything else is tried, and may raise. The length of the run decides whether compiling is worth a try.
    """
    contest = _Contest(model, config, world, example, open_trial)
    try:
        contest.begin()
        check(contest.plain_ms)
        seconds = 1e-3 * contest.plain_ms * (run_steps or 0)
        changes = open_changes(model, config, decided, tuple(example.shape[1:]), example.device, seconds)
        if not _can_capture(world, example.device, config):
            changes = [change for change in changes if "cuda_graph" not in change.options]
        worths = tuple(worth for change in changes if (worth := contest.try_change(change)) is not None)
    finally:
        contest.close()
    options = dict(contest.options)
    if any("cuda_graph" in change.options for change in changes):
        options.setdefault("cuda_graph", "off")  # it was tried, and lost
    return Way(options, contest.threads, contest.times, contest.eager_ms, contest.plain_ms, worths)


class _Contest:
    """The best way so far, ready to take steps beside the next one that is tried."""

    def __init__(
        self, model: nn.Module, config: TrainConfig, world: World, example: Tensor, open_trial: OpenTrial
    ) -> None:
        self.options: dict[str, Any] = {}
        self.threads: int | None = None
        self.times: tuple[float, ...] = ()
        #: As of the `Way`.
        self.plain_ms = self.eager_ms = 0.0
        self._world, self._alone = world, World(device=example.device)
        self._config, self._open_trial, self._example = config, open_trial, example
        self._trained, self._compared = model, model
        self._best: Trial | None = None
        self._tried: list[tuple[dict[str, Any], int | None]] = []
        self._refused: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Take steps with the options as they were given, by which all changes are judged."""
        self._best = best = self._world.on_all(as_problem(lambda: self._open(self._trained, {})))
        self._plain = self._world.on_all(as_problem(best.values))
        if any(self._world.gather(self._plain.draws)):  # another way may draw other numbers
            self._compared = twin_of(self._trained).eval()
            self._plain = self._world.on_all(as_problem(lambda: self._values({})))
        self._warm_up(best, None)
        self._note(timed(best.step, self._world))

    def close(self) -> None:
        """Close what is open."""
        if self._best is not None:
            self._best.close()

    def try_change(self, change: Change) -> Worth | None:
        """Compare a change with the best way so far, and take it where it is faster.

        None if it has been tried, or holds what was refused.
        """
        options, threads = self.options | dict(change.options), change.threads or self.threads
        if (options, threads) in self._tried or any(bad.items() <= options.items() for bad in self._refused):
            return None
        self._tried.append((options, threads))
        opened: list[Trial] = []

        def begin() -> str:
            """Take the first steps in the new way, and say what they compute otherwise than plain ones."""
            with intra_op_threads(threads):
                if self._compared is not self._trained:
                    values = self._values(options)
                opened.append(self._open(self._trained, options))
                for _ in range(CAPTURED_AFTER if options.get("cuda_graph") == "on" else 0):
                    opened[0].step()
                if self._compared is self._trained:
                    values = opened[0].values()
                else:
                    opened[0].step()
            half = options.get("amp", self._config.amp) != "none"
            return difference(values, self._plain, CLOSE_IN_HALF if half else CLOSE)

        assert self._best is not None
        loser: Trial | None = self._best
        try:
            why_not = next(filter(None, self._world.gather(_outcome(begin))), "")
            if why_not:
                loser = opened[0] if opened else None
                self._refuse(options, threads)
                return Worth(change.name, why_not=str(why_not))
            rival = opened[0]
            try:
                ratio, times = self._in_turns(rival, threads)
            except SyncError:
                raise
            except HybridparError as error:
                loser = rival
                self._refuse(options, threads)
                return Worth(change.name, why_not=error.what)
            if ratio > MARGIN:
                loser = rival
                return Worth(change.name, ratio)
            self._best, self.options, self.threads = rival, options, threads
            self._note(times)
            return Worth(change.name, ratio, chosen=True)
        finally:
            if loser is not None:
                loser.close()

    def _refuse(self, options: dict[str, Any], threads: int | None) -> None:
        """Try nothing more that has these options, unless it was their number of threads that failed."""
        if threads == self.threads:
            self._refused.append(options)

    def _in_turns(self, rival: Trial, threads: int | None) -> tuple[float, tuple[float, ...]]:
        """Time of the rival's step over that of the best so far, and the rival's times on every worker."""
        assert self._best is not None
        best_times, rival_times = [], []
        first = self._warm_up(rival, threads)
        if max(first) > HOPELESS_AT_FIRST * max(self.times):
            return max(first) / max(self.times), first
        for turn in range(TURNS):
            rival_times.append(timed(rival.step, self._world, threads))
            best_times.append(timed(self._best.step, self._world, self.threads))
            best, other = (min(map(max, times)) for times in (best_times, rival_times))
            if other > HOPELESS * best or (turn + 1) * (best + other) > ENOUGH_MS:
                break
        self._note(min((self.times, *best_times), key=max))
        return other / best, min(rival_times, key=max)

    def _note(self, times: tuple[float, ...]) -> None:
        """Take note of what a step takes in the best way so far, of every worker."""
        self.times = times
        if not {"cuda_graph", "compile"} & self.options.keys():
            self.eager_ms = max(times)
        if not self.options and self.threads is None:
            self.plain_ms = max(times)

    def _warm_up(self, trial: Trial, threads: int | None) -> tuple[float, ...]:
        """Take the steps that are not counted, of which `values` was one; the times of the last, of every worker."""
        for _ in range(FIRST_STEPS - 1):
            times = timed(trial.step, self._world, threads)
        return times

    def _open(self, model: nn.Module, options: Mapping[str, Any]) -> Trial:
        return self._open_trial(model, replace(self._config, **options), self._alone, self._example, None)

    def _values(self, options: Mapping[str, Any]) -> StepValues:
        """What a step of the model to compare by computes."""
        trial = self._open(self._compared, options)
        try:
            for _ in range(CAPTURED_AFTER if options.get("cuda_graph") == "on" else 0):
                trial.step()
            return trial.values()
        finally:
            trial.close()


def _outcome(act: Callable[[], str]) -> str:
    """What `act` returns, or what went wrong in it."""
    try:
        return act()
    except SyncError:
        raise
    except Exception as error:  # a kernel, a compiler or the memory of a device
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")


def difference(values: StepValues, plain: StepValues, tolerance: float) -> str:
    """What differs from the plain step by more than rounding; empty where nothing does.

    A gradient may differ by `tolerance` of its norm, and by as much of the norm of all gradients as it has elements:
    that of a bias before a BatchNorm is nothing but rounding.
    """
    if not abs(values.loss - plain.loss) <= tolerance * abs(plain.loss):
        return f"its loss is {values.loss:.4g}, and {plain.loss:.4g} in a plain step"
    if values.gradients.keys() != plain.gradients.keys():
        return "it makes gradients of other parameters than a plain step"
    norms = {name: float(gradient.norm()) for name, gradient in plain.gradients.items()}
    elements = sum(gradient.numel() for gradient in plain.gradients.values())
    total = math.hypot(*norms.values())
    for name, gradient in plain.gradients.items():
        apart = float((values.gradients[name] - gradient).norm())
        allowed = tolerance * (norms[name] + total * math.sqrt(gradient.numel() / elements))
        if not apart <= allowed:
            return f"the gradient of {name} is {apart / (norms[name] or 1.0):.2g} times its norm off a plain step's"
    return ""
