"""Measures the overhead of calling a tuned kernel and of loading the kernels when a training run starts.

A faster kernel is a gain only if it saves more than both cost.

Calls: depthwise convolutions so small that only the call overhead counts, once through the operation on its
tuned kernel and once through torch, in the same rounds: forward alone without gradients, and forward with backward;
with kernels for all directions, for the gradients alone, and for none.

Start: what a training run does more than without kernels when all of a model's machine code is in the cache: read the
database, swap the layers, find the records, load the kernels. In new processes, which import torch and hybridpar's
trainer first, as any run does.

    python -m benchmarks.kernels.overhead                                       # the calls
    python -m benchmarks.kernels.overhead --model mobilenet_v2 --records FILE   # and the start, with a tuned database
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.common import RESULTS, same_allocator, setting
from benchmarks.rig.paired import paired
from benchmarks.rig.records import write_dicts
from hybridpar.tvm_kernels.choice import Choices, use_choices
from hybridpar.tvm_kernels.database import Database, read_database
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.op import depthwise_conv2d
from hybridpar.tvm_kernels.operation import KernelKey
from hybridpar.tvm_kernels.search import search_all
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

SMALL = (ConvShape.parse("1x16x4x4 k3x3 s1x1 p1x1 d1x1"), ConvShape.parse("1x32x7x7 k3x3 s2x2 p1x1 d1x1"))
#: Directions that run on kernels, whichever were faster: what a call runs on decides its way.
CHOSEN: dict[str, tuple[Direction, ...]] = {
    "all directions on kernels": tuple(Direction),
    "the gradients on kernels": (Direction.INPUT_GRADIENT, Direction.WEIGHT_GRADIENT),
    "none on kernels": (),
}
#: Calls that are timed as one.
CALLS = 200
#: Parts of a start, by the numbers that `_START` prints.
PARTS = {"start: open and swap": [0], "start: find layers": [1], "start: load": [2], "start": [0, 1, 2]}

_START = """
import json, sys, time
import torch
import hybridpar.train.trainer
from hybridpar.models import build_model
name, records, batch, size, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
model = build_model(name, 10)
torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
begin = time.perf_counter()
from hybridpar.tvm_kernels import norm_kernels, optimize
from hybridpar.tvm_kernels.choice import active_choices
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.layers import step_keys
from hybridpar.tvm_kernels.shapes import Layout
optimize(model, records)
opened = time.perf_counter()
keys = step_keys(model, (batch, 3, size, size), Layout.CHANNELS_LAST, threads, cpu_fingerprint())
traced = time.perf_counter()
runs = [one.kernel is not None for one in active_choices().prepare(keys)]
norm_kernels.table()
end = time.perf_counter()
print(json.dumps([opened - begin, traced - opened, end - traced, sum(runs), len(runs)]))
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time what tuned kernels cost besides their work."""

    model: str | None = None
    """Model whose start is timed."""
    records: Path | None = None
    """Database that was tuned for it."""
    batch: int = 32
    """Images at a time."""
    size: int = 160
    """Edge of an image."""
    starts: int = 7
    """New processes."""
    rounds: int = 40
    """Rounds to keep."""
    output: Path = RESULTS / "overhead.csv"
    """Table of the rows."""


def main(options: Options) -> None:
    """Time calls, and the start where a model is named."""
    torch.set_num_threads(1)
    rows = calls(options)
    if options.model is not None and options.records is not None:
        rows += start(options, options.model, options.records)
    write_dicts(options.output, rows)
    for row in rows:
        print("{what}, {setting}: {value} {unit} [{least}, {most}], torch {stock}".format(**row))


def calls(options: Options) -> list[dict[str, object]]:
    """Microseconds that a call of the operation takes more than torch's own."""
    records = Path("runs/kernels/overhead.jsonl")
    records.parent.mkdir(parents=True, exist_ok=True)
    keys = [KernelKey(d, shape, Layout.CHANNELS_LAST, 1, cpu_fingerprint()) for shape in SMALL for d in Direction]
    search_all(keys, records, 3.0 * len(keys))
    database = read_database(records)
    rows = []
    for shape, (name, directions) in product(SMALL, CHOSEN.items()):
        use_choices(Choices(winning(database, directions)))
        own, stock = (calls_of(shape, function) for function in (depthwise_conv2d, functional.conv2d))
        for what in own:
            found = paired({"own": own[what], "stock": stock[what]}, options.rounds, repeats=CALLS)
            more = [1e3 * (a - b) for a, b in zip(found.milliseconds["own"], found.milliseconds["stock"], strict=True)]
            outside = len(more) // 40
            spread = statistics.median(more), *sorted(more)[outside :: len(more) - 1 - 2 * outside]
            best = 1e3 * (found.min_ms("own") - found.min_ms("stock"))
            told = {"what": what, "setting": f"{shape.text}, {name}", "unit": "us"}
            rows.append(told | numbers(spread, best, 1e3 * found.median_ms("stock"), 20.0))
            rows[-1] |= {"runs": found.rounds, "loaded": found.loaded, **setting()}
    return rows


def winning(database: Database, directions: Collection[Direction]) -> Database:
    """The records of some directions, as if they had won by far: what is to be measured is the way to their kernels."""
    chosen = [record for record in database.records if record.direction in directions]
    return Database(database.name, [one.model_copy(update={"stock_ms": 1e3, "layout_ms": None}) for one in chosen])


def numbers(spread: Sequence[float], best: float, stock: float, promised: float) -> dict[str, object]:
    """Columns of a row: median, least and most, by the shortest times, what torch takes, and what was promised."""
    names = ("value", "least", "most", "best", "stock")
    cells: dict[str, object] = {name: f"{one:.4g}" for name, one in zip(names, (*spread, best, stock), strict=True)}
    return cells | {"promised": promised}


def calls_of(shape: ConvShape, function: Callable[..., Tensor]) -> dict[str, Callable[[], object]]:
    """A call without gradients, and one with its backward pass."""
    x = torch.randn(shape.batch, shape.channels, shape.height, shape.width)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(shape.channels, 1, *shape.kernel, requires_grad=True)
    numbers = (shape.stride, shape.padding, shape.dilation)
    arguments = (x, weight, None, *numbers, *((shape.channels,) if function is functional.conv2d else ()))
    gradient = torch.ones_like(function(*arguments))

    def forward() -> None:
        with torch.no_grad():
            function(*arguments)

    def both() -> None:
        torch.autograd.grad(function(*arguments), (x, weight), gradient)

    return {"a call": forward, "a call and its backward": both}


def start(options: Options, model: str, records: Path) -> list[dict[str, object]]:
    """Seconds that a start takes more with kernels."""
    told = json.dumps([model, str(records), options.batch, options.size, 1])
    found = []
    for _ in range(options.starts + 1):
        done = subprocess.run([sys.executable, "-c", _START, told], capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    runs = found[1:]  # the first one may have built what was not in the cache
    where = f"{model}, batch {options.batch}, {options.size}x{options.size}: {runs[0][-2]} of {runs[0][-1]} on kernels"
    rows = []
    for name, parts in PARTS.items():
        seconds = [sum(run[part] for part in parts) for run in runs]
        spread = statistics.median(seconds), min(seconds), max(seconds)
        rows.append({"what": name, "setting": where, "unit": "s"} | numbers(spread, spread[1], 0.0, 0.5))
        rows[-1] |= {"runs": len(runs), "loaded": False, **setting()}
    return rows


if __name__ == "__main__":
    same_allocator()
    main(tyro.cli(Options, description=__doc__))
