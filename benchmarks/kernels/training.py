"""Times whole training steps on the CPU with tuned kernels against torch.

A kernel that is faster alone may not be so in a step, next to layers that are left unchanged.

A whole step (forward, cross-entropy, backward, SGD with momentum) of one network on the CPU: torch as it is, in
whichever memory format is faster for it, against `hybridpar.tvm_kernels.optimize` with kernels of depthwise
convolutions alone, of norms alone, and of both, and against torch.compile in both formats, with the seconds of its
first step. All methods run in one process with the same allocator settings, on the same batches and random numbers,
step by step in an order that changes from round to round. On one thread the time counts that the thread ran. In each
round all start from where torch's step has led, and their losses and gradients must agree: an untrained network
amplifies rounding, so that free runs part after a few steps, with any kernels.

The table also has the gain that the records predict.

Run from the root of the repository, on an idle machine; what the database lacks is tuned first:
    python -m benchmarks.kernels.training --database kernels.jsonl [--models mobilenet_v2] [--threads 1] [--budget 15m]
    python -m benchmarks.kernels.training --database kernels.jsonl --models mobilenet_v2 --amp   # with AVX512_BF16
Writes results/training.csv, a row for each model and method.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._inductor.config
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.kernels.common import RESULTS, setting
from benchmarks.rig.launch import run_command
from benchmarks.rig.paired import balanced_orders
from benchmarks.rig.records import append_dicts, print_markdown
from benchmarks.rig.stats import Ratio, bootstrap_ratio
from hybridpar.commands.tune import parse_seconds
from hybridpar.errors import HybridparError
from hybridpar.machine.process import tune_this_process
from hybridpar.tvm_kernels import Database, optimize, read_database
from hybridpar.tvm_kernels.choice import active_choices, use_choices
from hybridpar.tvm_kernels.layers import step_keys
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.norm_swap import unfuse_norms
from hybridpar.tvm_kernels.shapes import KernelKey, Layout
from hybridpar.tvm_kernels.tune import search_all, weigh

#: What a step with both is to be at least, in times torch's speed: promised before anything was measured.
TARGETS = {"mobilenet_v2": 1.2, "efficientnet_b0": 1.25, "convnext_tiny": 1.12}
#: Largest relative difference of a loss from torch's, and least cosine of a gradient with torch's.
MOST_DIFFERENCE, LEAST_COSINE = 1e-4, 0.99
#: The former for a step in bfloat16, whose rounding an untrained network amplifies until gradients are hardly alike.
BFLOAT16_DIFFERENCE = 3e-2
#: Rounds to take in any case.
LEAST_ROUNDS = 7
CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure whole training steps with tuned kernels against torch."""

    database: Path = Path("kernels.jsonl")
    """Records; what is missing is tuned and appended."""
    models: tuple[str, ...] = tuple(TARGETS)
    """Of torchvision."""
    amp: bool = False
    """Compare steps in bfloat16, by torch and with kernels, with the step in float32 with kernels."""
    batch: int = 32
    """Images of a step."""
    size: int = 160
    """Rows and columns of an image."""
    threads: int = 1
    """Of torch."""
    budget: str = "15m"
    """Time for tuning, for each model."""
    seconds: float = 240.0
    """Time for the rounds of a model."""
    output: Path = RESULTS / "training.csv"
    """Table to add rows to."""


class Method:
    """One way to train a model: its own copy, and the records that it runs by.

    Args:
        model: Is copied.
        layout: Of images and weights.
        database: The records; None for torch alone.
        compiled: Whether torch.compile runs it, which happens in the first step.
        norms: Whether norms are fused where there are records.
        amp: Whether it computes in bfloat16.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        database: Database | None,
        *,
        compiled: bool = False,
        norms: bool = True,
        amp: bool = False,
    ) -> None:
        self.amp = amp
        last = layout is Layout.CHANNELS_LAST
        self._format = torch.channels_last if last else torch.contiguous_format
        self.model = copy.deepcopy(model).to(memory_format=self._format)
        self.choices = None
        if database is not None:
            optimize(self.model, database)
            self.choices = active_choices()
            if not norms:
                unfuse_norms(self.model)
        self.first_seconds = 0.0
        self._run = torch.compile(self.model) if compiled else self.model
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.losses: list[float] = []
        self.ms: list[float] = []

    def timed(self, images: Tensor, labels: Tensor, seed: int, clock: Callable[[], float]) -> None:
        """A step whose time and loss are noted. Methods draw the same random numbers."""
        images = images.contiguous(memory_format=self._format)
        torch.manual_seed(seed)
        start, began = time.perf_counter(), clock()
        use_choices(self.choices)
        self._optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
            loss = functional.cross_entropy(self._run(images), labels)
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())
        self.ms.append(1e3 * (clock() - began))
        self.first_seconds = self.first_seconds or time.perf_counter() - start

    def follow(self, other: Method) -> None:
        """Take over another method's parameters and buffers."""
        with torch.no_grad():
            for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
                mine.copy_(theirs)

    def _tensors(self) -> Iterator[Tensor]:
        return itertools.chain(self.model.parameters(), self.model.buffers())

    def gradient(self) -> Tensor:
        """Of the last step, as one vector."""
        gradients = (parameter.grad for parameter in self.model.parameters())
        return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def tune_missing(model: nn.Module, options: Options) -> dict[bool, Counter[KernelKey]]:
    """Tune what the database lacks for a model; returns what a step runs, in bfloat16 and not, and how often."""
    sizes, works = (options.batch, 3, options.size, options.size), {}
    for amp in (False, True) if options.amp else (False,):
        dtype = "bfloat16" if amp else "float32"
        work = step_keys(model, sizes, Layout.CHANNELS_LAST, options.threads, cpu_fingerprint(), dtype)
        works[amp], report = work, search_all(weigh(work), options.database, parse_seconds(options.budget))
        if report.stopped:
            raise KeyboardInterrupt
        print(f"{report.tuned} tuned, {report.skipped} were before, {report.left} left for lack of time", flush=True)
    return works


def promised(database: Database, work: Mapping[KernelKey, int]) -> tuple[float, int]:
    """Milliseconds that a step is to take less than with torch, by records that win; and how many operations do."""
    records = [(database.best(key), count) for key, count in work.items()]
    wins = [(record, count) for record, count in records if record is not None and record.wins]
    return sum(count * record.saved_ms for record, count in wins), sum(count for _, count in wins)


def better_layout(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], clock: Callable[[], float]) -> Layout:
    """The memory format in which torch takes a step faster."""
    methods = {layout: Method(model, layout, None) for layout in Layout}
    for number in range(4):
        for layout in sorted(methods, reverse=number % 2 == 0):
            methods[layout].timed(*batches[number % len(batches)], number, clock)
    return min(methods, key=lambda layout: min(methods[layout].ms[1:]))


def methods_of(model: nn.Module, layout: Layout, database: Database, amp: bool) -> dict[str, Method]:
    """What is compared with the first of them; of norms only where the model has some."""
    made = {"stock": Method(model, layout, None)}
    if amp:
        made["both"] = Method(model, Layout.CHANNELS_LAST, database)
        made["bfloat16"] = Method(model, Layout.CHANNELS_LAST, None, amp=True)
        return made | {"bfloat16 both": Method(model, Layout.CHANNELS_LAST, database, amp=True)}
    for compiled in Layout:
        made[f"compile {compiled.value}"] = Method(model, compiled, None, compiled=True)
    made["depthwise"] = Method(model, Layout.CHANNELS_LAST, database, norms=False)
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        made["norms"] = Method(model, Layout.CHANNELS_LAST, Database())
        made["both"] = Method(model, Layout.CHANNELS_LAST, database)
    return made


def check_step(methods: Mapping[str, Method]) -> float:
    """Compare the last step's losses and gradients with torch's.

    Returns:
        The largest relative difference of a loss.

    Raises:
        HybridparError: They differ by more than rounding does.
    """
    worst, right = 0.0, methods["stock"]
    for name, method in methods.items():
        difference = abs(method.losses[-1] - right.losses[-1]) / abs(right.losses[-1])
        cosine = float(functional.cosine_similarity(method.gradient(), right.gradient(), dim=0))
        worst = max(worst, difference)
        alike = difference <= BFLOAT16_DIFFERENCE if method.amp else difference <= MOST_DIFFERENCE
        if not (alike and (method.amp or cosine >= LEAST_COSINE)):
            raise HybridparError(
                f"step {len(right.losses)} with {name}: loss {method.losses[-1]}, torch's {right.losses[-1]}; "
                f"the cosine of their gradients is {cosine:.4f}",
                "All methods compute the same function of the same numbers.",
                "There is a mistake in a kernel; its record's `error` may tell in which.",
            )
    return worst


def measure(name: str, options: Options) -> list[dict[str, object]]:
    """All rows of one model."""
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=CLASSES)
    works = tune_missing(model, options)
    database = read_database(options.database)
    shape = (options.batch, 3, options.size, options.size)
    batches = [(torch.randn(shape), torch.randint(CLASSES, (options.batch,))) for _ in range(2)]
    layout = better_layout(model, batches, clock)
    methods = methods_of(model, layout, database, options.amp)
    orders = balanced_orders(methods, seed=0)
    began, rounds, worst = time.monotonic(), 0, 0.0
    while rounds <= LEAST_ROUNDS or time.monotonic() - began < options.seconds:
        for method in methods.values():
            method.follow(methods["stock"])
        for name_of_method in next(orders):
            methods[name_of_method].timed(*batches[rounds % len(batches)], rounds, clock)
        rounds += 1
        worst = max(worst, check_step(methods))
    common = {"model": name, "batch": options.batch, "size": options.size, "operations": sum(works[False].values())}
    common |= {"stock_layout": layout.value, "rounds": rounds - 1, "loss_difference": f"{worst:.1e}", **setting()}
    target = TARGETS.get(name)
    if options.amp:  # in bfloat16 a step should take no longer than on kernels in float32
        target = _ratio(methods["stock"], methods["both"]).median
    last = list(methods)[-1]
    return [
        _row(which, methods, works[method.amp], target if which == last else None) | common
        for which, method in methods.items()
    ]


def _ratio(stock: Method, method: Method) -> Ratio:
    """How many times as fast as torch a method is; the first step allocates."""
    return bootstrap_ratio(stock.ms[1:], method.ms[1:])


def _row(
    name: str, methods: Mapping[str, Method], work: Mapping[KernelKey, int], target: float | None
) -> dict[str, object]:
    method, stock = methods[name], methods["stock"]
    times, stock_times = method.ms[1:], stock.ms[1:]
    ratio = _ratio(stock, method)
    saved, runs = promised(Database() if method.choices is None else method.choices.database, work)
    stock_ms = statistics.median(stock_times)
    return {
        "method": name,
        "operations_on_kernels": runs,
        "median_ms": f"{statistics.median(times):.2f}",
        "best_ms": f"{min(times):.2f}",
        "times_stock": f"{ratio.median:.4f}",
        "low": f"{ratio.low:.4f}",
        "high": f"{ratio.high:.4f}",
        "best_times_stock": f"{min(stock_times) / min(times):.4f}",
        "first_step_s": f"{method.first_seconds:.1f}",
        "promised_times_stock": f"{stock_ms / (stock_ms - saved):.4f}",
        "target": "" if target is None else f"{target:.4g}",
        "verdict": _verdict(name, ratio, target),
    }


def _verdict(name: str, ratio: Ratio, target: float | None) -> str:
    if name == "stock":
        return "baseline"
    if target is not None:
        return "met" if ratio.median >= target else "missed"
    return "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "unclear"


def main(options: Options) -> None:
    """Measure all models, and add the rows of each to the table."""
    tune_this_process(1)
    torch.set_num_threads(options.threads)
    # Compiled models draw the random numbers of eager ones, so that all methods drop the same.
    torch._inductor.config.fallback_random = True
    for name in options.models:
        rows = measure(name, options)
        columns = [column for column in rows[0] if column not in setting()]
        print_markdown(columns, [[row[column] for column in columns] for row in rows])
        append_dicts(options.output, rows)


if __name__ == "__main__":
    run_command(main, Options)
