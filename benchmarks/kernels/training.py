"""Why: kernels that win alone must win in a training step, among the layers that they leave as they are.

A whole step (forward, cross-entropy, backward, SGD with momentum) of one network on the CPU: torch as it is, in
whichever memory format is faster for it, against `hybridpar.tvm_kernels.optimize` with the records of depthwise
convolutions alone, of norms alone, and of both. All methods run in one process with the same allocator settings, on the
same batches and random numbers, step by step in an order that changes from round to round. On one thread the time
counts that the thread ran. Losses of all methods must agree.

Then a few steps are taken apart: how long depthwise convolutions, BatchNorm with its activation, and the rest take with
torch and with kernels. The table also has what the records promised.

Run from the root of the repository, on an idle machine; what the database lacks is tuned first:
    python -m benchmarks.kernels.training --database kernels.jsonl [--models mobilenet_v2] [--threads 1] [--budget 15m]
Writes results/training.csv, a row for each model and method.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
import tyro
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.kernels.common import RESULTS, print_aligned, same_allocator, setting, write_rows
from benchmarks.kernels.parts import PARTS, has_norms, measure_parts
from benchmarks.rig.paired import balanced_orders
from benchmarks.rig.stats import Ratio, bootstrap_ratio
from hybridpar.errors import HybridparError
from hybridpar.tvm_kernels import Database, optimize, read_database
from hybridpar.tvm_kernels.choice import Choices, use_choices
from hybridpar.tvm_kernels.database import KernelKey
from hybridpar.tvm_kernels.device import cpu_fingerprint
from hybridpar.tvm_kernels.layers import tunable_layers
from hybridpar.tvm_kernels.norm_records import NormKey
from hybridpar.tvm_kernels.norm_search import measure_norms
from hybridpar.tvm_kernels.request import TuneConfig
from hybridpar.tvm_kernels.search import LEAST_SECONDS, search_all
from hybridpar.tvm_kernels.shapes import Layout

#: What a step with both is to be at least, in times torch's speed: promised before anything was measured.
TARGETS = {"mobilenet_v2": 1.2, "efficientnet_b0": 1.25, "convnext_tiny": 1.12}
#: Largest relative difference of the first step's loss from torch's, and of later ones: steps amplify rounding.
FIRST_LOSS, LATER_LOSS = 1e-4, 5e-2
#: Rounds to take in any case, and steps that are taken apart.
LEAST_ROUNDS, TAKEN_APART = 7, 5
CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure whole training steps with tuned kernels against torch."""

    database: Path = Path("kernels.jsonl")
    """Records; what is missing is tuned and appended."""
    models: tuple[str, ...] = tuple(TARGETS)
    """Of torchvision."""
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
    """Table to write."""


class Method:
    """One way to train a model: its own copy, and the records that it runs by.

    Args:
        model: Is copied.
        layout: Of images and weights.
        database: The records; None for torch alone.
    """

    def __init__(self, model: nn.Module, layout: Layout, database: Database | None) -> None:
        last = layout is Layout.CHANNELS_LAST
        self._format = torch.channels_last if last else torch.contiguous_format
        self.model = copy.deepcopy(model).to(memory_format=self._format)
        self.choices = None
        if database is not None:
            optimize(self.model, database)
            self.choices = Choices(database)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.losses: list[float] = []
        self.ms: list[float] = []

    def step(self, images: Tensor, labels: Tensor, seed: int) -> float:
        """One training step; returns the loss. Methods draw the same random numbers."""
        torch.manual_seed(seed)
        use_choices(self.choices)
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(images.contiguous(memory_format=self._format)), labels)
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def timed(self, images: Tensor, labels: Tensor, seed: int, clock: Callable[[], float]) -> None:
        """A step whose time and loss are kept. Images come in the layout that is wanted."""
        images = images.contiguous(memory_format=self._format)
        began = clock()
        self.losses.append(self.step(images, labels, seed))
        self.ms.append(1e3 * (clock() - began))


def tune_missing(model: nn.Module, options: Options) -> Counter[KernelKey | NormKey]:
    """Tune what the database lacks for a model; returns what a step runs, and how often."""
    found, norms = tunable_layers(model, (options.batch, 3, options.size, options.size))
    device = cpu_fingerprint()
    layers = Counter(
        KernelKey(direction, layer.shape, layer.layout, options.threads, device)
        for layer in found
        for direction in layer.needs
    )
    pairs = Counter(
        NormKey(norm.shape, options.threads, device) for norm in norms if norm.layout is Layout.CHANNELS_LAST
    )
    end = time.monotonic() + TuneConfig(budget=options.budget).seconds
    report = measure_norms(pairs, options.database, end - time.monotonic())
    report = report.plus(search_all(layers, options.database, max(LEAST_SECONDS, end - time.monotonic())))
    if report.stopped:
        raise KeyboardInterrupt
    print(f"{report.tuned} tuned, {report.skipped} were before, {report.left} left for lack of time", flush=True)
    return Counter({**layers, **pairs})


def promised(database: Database, work: Mapping[KernelKey | NormKey, int]) -> tuple[float, int]:
    """Milliseconds that a step is to take less than with torch, by records that win; and how many operations do."""
    saved, runs = 0.0, 0
    for key, often in work.items():
        record = database.best_norm(key) if isinstance(key, NormKey) else database.best(key)
        if record is not None and record.wins and record.ms is not None and record.stock_ms is not None:
            saved, runs = saved + often * (record.stock_ms - record.ms), runs + often
    return saved, runs


def better_layout(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], clock: Callable[[], float]) -> Layout:
    """The memory format in which torch takes a step faster."""
    methods = {layout: Method(model, layout, None) for layout in Layout}
    for number in range(4):
        for layout in sorted(methods) if number % 2 else reversed(sorted(methods)):
            methods[layout].timed(*batches[number % len(batches)], number, clock)
    return min(methods, key=lambda layout: min(methods[layout].ms[1:]))


def methods_of(model: nn.Module, stock: Layout, database: Database) -> dict[str, Method]:
    """What is compared; of norms only where the model has some."""
    made = {"stock": Method(model, stock, None)}
    parts = {"depthwise": Database(database.name, database.records)}
    if has_norms(model):
        parts |= {"norms": Database(database.name, norms=database.norms), "both": database}
    return made | {name: Method(model, Layout.CHANNELS_LAST, one) for name, one in parts.items()}


def check_losses(methods: Mapping[str, Method]) -> float:
    """Compare losses with torch's, step by step.

    Returns:
        The largest relative difference.

    Raises:
        HybridparError: They differ by more than rounding does.
    """
    worst = 0.0
    for name, method in methods.items():
        for step, (own, right) in enumerate(zip(method.losses, methods["stock"].losses, strict=True)):
            difference = abs(own - right) / abs(right)
            worst = max(worst, difference)
            if not difference <= (LATER_LOSS if step else FIRST_LOSS):
                raise HybridparError(
                    f"the loss of step {step} is {own} with {name} and {right} with torch",
                    "All methods compute the same function of the same numbers.",
                    "There is a mistake in a kernel; its record's `error` may tell in which.",
                )
    return worst


def measure(name: str, options: Options) -> list[dict[str, object]]:
    """All rows of one model."""
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=CLASSES)
    work = tune_missing(model, options)
    database = read_database(options.database)
    draw = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(options.batch, 3, options.size, options.size, generator=draw),
            torch.randint(CLASSES, (options.batch,), generator=draw),
        )
        for _ in range(2)
    ]
    stock = better_layout(model, batches, clock)
    methods = methods_of(model, stock, database)
    orders = balanced_orders(methods, seed=0)
    began, rounds = time.monotonic(), 0
    while rounds <= LEAST_ROUNDS or time.monotonic() - began < options.seconds:
        for method in next(orders):
            methods[method].timed(*batches[rounds % len(batches)], rounds, clock)
        rounds += 1
    worst = check_losses(methods)
    rows = [_row(name, method, methods, (database, work), options) for method in methods]
    for row in rows:
        row |= {"stock_layout": stock.value, "rounds": rounds - 1, "loss_difference": f"{worst:.1e}", **setting()}
    return rows


def _row(
    model: str,
    name: str,
    methods: Mapping[str, Method],
    tuned: tuple[Database, Mapping[KernelKey | NormKey, int]],
    options: Options,
) -> dict[str, object]:
    method, stock = methods[name], methods["stock"]
    own, right = method.ms[1:], stock.ms[1:]  # the first step allocates
    ratio = bootstrap_ratio(right, own)
    database = Database() if method.choices is None else method.choices.database
    saved, runs = promised(database, tuned[1])
    stock_ms = sorted(right)[len(right) // 2]
    parts = dict.fromkeys(PARTS, float("nan"))
    if options.threads == 1:
        images, labels = torch.randn(options.batch, 3, options.size, options.size), torch.arange(options.batch)
        parts = measure_parts(lambda: method.step(images, labels % CLASSES, 0), TAKEN_APART)
    target = TARGETS.get(model) if name == list(methods)[-1] else None
    return {
        "model": model,
        "batch": options.batch,
        "size": options.size,
        "method": name,
        "operations_on_kernels": runs,
        "operations": sum(tuned[1].values()),
        "median_ms": f"{sorted(own)[len(own) // 2]:.2f}",
        "best_ms": f"{min(own):.2f}",
        "times_stock": f"{ratio.median:.4f}",
        "low": f"{ratio.low:.4f}",
        "high": f"{ratio.high:.4f}",
        "best_times_stock": f"{min(right) / min(own):.4f}",
        "promised_times_stock": f"{stock_ms / (stock_ms - saved):.4f}",
        **{f"{part}_ms": f"{ms:.2f}" for part, ms in parts.items()},
        "target": "" if target is None else target,
        "verdict": _verdict(name, ratio, target),
    }


def _verdict(name: str, ratio: Ratio, target: float | None) -> str:
    if name == "stock":
        return "baseline"
    if target is not None:
        return "met" if ratio.median >= target else "missed"
    return "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "unclear"


def show(rows: Sequence[Mapping[str, object]]) -> None:
    """Print what matters of a model's rows."""
    columns = ("method", "operations_on_kernels", "median_ms", "best_ms", "times_stock", "low", "high")
    columns += ("best_times_stock", "promised_times_stock", *(f"{part}_ms" for part in PARTS), "target", "verdict")
    first = rows[0]
    print(
        f"\n{first['model']}, batch {first['batch']}, {first['size']}x{first['size']}, {first['threads']} thread(s), "
    )
    print(f"torch in {first['stock_layout']}; losses differ by {first['loss_difference']} at most")
    print_aligned([columns, *([str(row[column]) for column in columns] for row in rows)])


def main(options: Options) -> None:
    """Measure all models, and write the table after each."""
    torch.set_num_threads(options.threads)
    rows: list[dict[str, object]] = []
    for name in options.models:
        found = measure(name, options)
        show(found)
        rows += found
        write_rows(options.output, rows)
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    same_allocator("benchmarks.kernels.training")
    main(tyro.cli(Options))
