"""Measures the throughput of each codec on one core, without links or backward passes, and judges it by target rates.

The parameters of ResNet-18 go through a codec as in training: with error feedback, and two workers played by one
process, of which the first is timed by the CPU time of its thread. Compiled kernels are chosen when a process first
uses them, so those and torch alone are measured in a process each. The target rates are for a core with AVX-512, which
`extra` says of the machine at hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.rig.in_process import run_together
from hybridpar.compress import (
    Codec,
    Coder,
    ErrorFeedback,
    Exchange,
    TensorSpec,
    bind,
    kernels,
    parse_codec,
)
from hybridpar.compress.memory import Memory, Scratch
from hybridpar.compress.quantised import QuantisedCoder
from hybridpar.machine.process import worker_environment
from hybridpar.models import build_model

CODECS = ("onebit", "twobit", "qsgd_mn:meet=shard", "qsgd_mn", "powersgd:rank=4", "fp16")
#: GB/s at least of each figure, by codec and code.
TARGETS = {
    ("onebit", "compiled"): {"encode": 10.0, "decode_add": 25.0},
    ("onebit", "torch"): {"encode": 2.0, "decode_add": 6.0},
    ("twobit", "compiled"): {"encode": 6.0},
    ("qsgd_mn:meet=shard", "compiled"): {"encode": 6.0},
}


def measure(quick: bool, output: str | None) -> None:
    """Measure, print and write; in processes of its own.

    Args:
        quick: A small net.
        output: The table's file.
    """
    told = ["mobilenet_v2", "1", "onebit", "fp16"] if quick else ["resnet18", "7", *CODECS]
    rows = []
    for code in ("compiled", "torch"):
        environment = {**os.environ, **worker_environment(1, [0], {}), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["HYBRIDPAR_KERNELS"] = "on" if code == "compiled" else "off"
        command = [sys.executable, "-m", "benchmarks.sync.throughput", *told]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        # A codec without kernels has used torch in the first process as well.
        rows += [row for row in json.loads(done.stdout.splitlines()[-1]) if row["code"] == code]
    write_checks([_check(told[0], row, figure) for row in rows for figure in row["rates"]], output, title="sync")


def rates_of(name: str, model: str, repeats: int) -> dict[str, float]:
    """GB/s of float32 gradient at which this process does what a codec consists of, and at which it copies.

    Args:
        name: The codec.
        model: Whose parameters it gets.
        repeats: Passes over them; the median counts.
    """
    codec = parse_codec(name)
    codec = replace(codec, warmup=0) if isinstance(codec, ErrorFeedback) else codec
    shapes = {key: tuple(one.shape) for key, one in build_model(model, 1000).named_parameters()}
    draw = torch.Generator().manual_seed(0)
    gradients = [0.01 * torch.randn(TensorSpec("", shape).count, generator=draw) for shape in shapes.values()]
    workers = [[bind(codec, TensorSpec(key, shape, rank, 2)) for key, shape in shapes.items()] for rank in range(2)]
    timed = [TimedCoder(coder) for coder in workers[0]]
    exchanges, outs = [Exchange(timed), Exchange(workers[1])], [list(map(torch.empty_like, gradients)) for _ in workers]
    passes = []
    for _ in range(repeats + 1):
        for coder in timed:
            coder.seconds = dict.fromkeys(coder.seconds, 0.0)
        run_together(exchanges, [gradients, gradients], outs)
        for exchange in exchanges:
            exchange.commit()
        passes.append({part: sum(coder.seconds[part] for coder in timed) for part in timed[0].seconds})
    size = sum(gradient.nbytes for gradient in gradients)
    rates = {part: _rate(size, [one[part] for one in passes]) for part in passes[0] if passes[-1][part]}
    return {
        **rates,
        **_decode_add(codec, shapes, gradients, repeats),
        "memcpy": _timed(size, repeats, lambda: [torch.empty_like(one).copy_(one) for one in gradients]),
    }


class TimedCoder(Coder):
    """A coder that is timed: `seconds` of each part of its work.

    Args:
        inner: The coder that does the work.
    """

    def __init__(self, inner: Coder) -> None:
        super().__init__(inner.spec, inner.working.rounds)
        self._inner, self._worker = inner, inner.working
        self.seconds = {"encode": 0.0, "merge": 0.0, "decode": 0.0}

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self.seconds[part] += time.thread_time() - begin

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        """Write a message; counts as encoding."""
        self._worker.gradient, self._worker.scratch = self.gradient, self.scratch
        with self._timed("encode"):
            self._worker.write(index, parts)

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        """Merge the messages of a stripe into a single message, which its owner does."""
        with self._timed("merge"):
            self._worker.merge(index, received, out)

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        """Read received messages; counts as decoding."""
        with self._timed("decode"):
            self._worker.read(index, parts)

    def finish(self, out: Tensor) -> None:
        """Write the result; counts as decoding."""
        with self._timed("decode"):
            self._worker.finish(out)

    def commit(self) -> None:
        """Hand on that the step counts; another coder may work in the next."""
        self._inner.commit()
        self._worker = self._inner.working
        self.rounds = self._worker.rounds


def _decode_add(
    codec: Codec, shapes: Mapping[str, tuple[int, ...]], gradients: Sequence[Tensor], repeats: int
) -> dict[str, float]:
    """Adding decoded messages to sums, for codecs whose messages are decoded one by one."""
    inner, scratch, work = codec.inner if isinstance(codec, ErrorFeedback) else codec, Scratch(torch.device("cpu")), []
    for (key, shape), gradient in zip(shapes.items(), gradients, strict=True):
        coder = bind(inner, TensorSpec(key, shape))
        if isinstance(coder, QuantisedCoder):
            values = coder.quantiser.view(gradient)
            message = torch.zeros(coder.quantiser.size(values.shape), dtype=torch.uint8)
            coder.quantiser.encode(values, Memory(), message, scratch)
            work.append((coder.quantiser, message, torch.zeros(values.shape)))
    if not work:
        return {}

    def add() -> None:
        for quantiser, message, total in work:
            quantiser.read(message, total, scratch, 1, add=True)

    return {"decode_add": _timed(sum(total.nbytes for _, _, total in work), repeats, add)}


def _timed(size: int, repeats: int, run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return _rate(size, seconds)


def _rate(size: int, seconds: Sequence[float]) -> float:
    """GB/s; the first time is that of caches."""
    return size / max(statistics.median(seconds[1:]), 1e-12) / 1e9


def _check(model: str, row: dict[str, object], figure: str) -> Check:
    rates, codec, code = row["rates"], str(row["codec"]), str(row["code"])
    assert isinstance(rates, dict)
    cpu = Path("/proc/cpuinfo")
    wide = cpu.exists() and "avx512f" in cpu.read_text()
    return Check(
        setting=f"{model}, whole model, one core, {code}",
        link="none",
        what=f"{figure} in GB/s, {codec}",
        value=rates[figure],
        low=rates[figure],
        high=rates[figure],
        at_least=TARGETS.get((codec, code), {}).get(figure),
        extra="AVX-512" if wide else "no AVX-512",
    )


def main(model: str, repeats: str, *codecs: str) -> None:
    """What a measuring process does: print the rates of codecs as JSON."""
    torch.set_num_threads(1)
    rows = []
    for name in codecs:
        compiled = parse_codec(name).core.kernels and kernels.table()
        rates = rates_of(name, model, int(repeats))
        rows.append({"codec": name, "code": "compiled" if compiled else "torch", "rates": rates})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
