"""`hybridpar bench codecs`: times how fast one core encodes and decodes the gradients of a model.

All parameters of a model, in its own shapes, go through the codec as they do in training: error feedback included, K
workers played by one process, of which the first is timed. Beside each rate stands that of copying the same bytes, the
limit of anything that reads gradients once and writes them once. Seconds are those of the process on its core, so that
what else runs on the machine counts little.

Compiled kernels are chosen when a process first uses them, so each setting of them runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from rich.console import Console
from torch import Tensor

from hybridpar.commands.bench.request import BenchCodecs
from hybridpar.commands.bench.table import print_table, write_rows
from hybridpar.commands.bench.traffic import after_warmup, wire_bytes
from hybridpar.compress import (
    Codec,
    Coder,
    ErrorFeedback,
    Exchange,
    TensorSpec,
    bind,
    kernels,
    parse_codec,
    run_together,
)
from hybridpar.compress.codec import NO_RESIDUAL, OuterCoder, Residual, Scratch
from hybridpar.compress.quantised import GatheredCoder, ShardedCoder
from hybridpar.errors import LaunchError, UsageError
from hybridpar.machine.process import worker_environment
from hybridpar.models import build_model

#: What turns the compiled kernels off.
KERNELS_VARIABLE = "HYBRIDPAR_KERNELS"
_KERNELS, _FALLBACK = "compiled", "torch"


@dataclasses.dataclass(frozen=True)
class CodecSpeed:
    """How fast one core is with a codec; rates are GB/s of float32 gradient, over all parameters of the model.

    Attributes:
        codec: As text.
        code: What it ran on: `compiled` kernels, or `torch` alone.
        encode: Add the residual, encode, and keep what is not sent.
        decode_add: Decode a message and add it to a sum; None where messages are not decoded one by one.
        merge: What the owner of a stripe does with the stripes of all workers; None where there are no owners.
        decode: Read what came, and write the mean.
        memcpy: Copy as many bytes.
        full_bytes: What a worker sends without a codec.
        sent_bytes: What it sends with it.
    """

    codec: str
    code: str
    encode: float
    decode_add: float | None
    merge: float | None
    decode: float
    memcpy: float
    full_bytes: int
    sent_bytes: int

    @property
    def ratio(self) -> float:
        """How many times less is sent."""
        return self.full_bytes / self.sent_bytes


def run_bench_codecs(request: BenchCodecs, console: Console | None = None) -> int:
    """Measure, print, and write the file that was asked for; returns the exit code.

    Args:
        request: The options.
        console: Where it is printed.

    Raises:
        HybridparError: A codec or model is unknown, or a measuring process failed.
    """
    request.check()
    speeds = measure_in_processes(request)
    print_speeds(request, speeds, console or Console())
    if request.csv is not None:
        write_rows(request.csv, [{**dataclasses.asdict(speed), "ratio": speed.ratio} for speed in speeds])
    return 0


def measure_in_processes(request: BenchCodecs) -> list[CodecSpeed]:
    """The speeds of all codecs with each kind of code that is there, each kind in a process of its own.

    Args:
        request: The options.
    """
    for text in request.codec:
        parse_codec(text)  # an unknown one is an error before anything is measured
    by_code = {code: _in_process(request, code) for code in (_KERNELS, _FALLBACK)}
    # Where a codec has no kernels, or they cannot be had here, the process that was to use them has used torch as well.
    return [
        speed
        for same in zip(*by_code.values(), strict=True)
        for code, speed in zip(by_code, same, strict=True)
        if speed.code == code
    ]


def code_of(codec: Codec) -> str:
    """What a codec runs on in this process: `compiled` kernels, or `torch` alone.

    Args:
        codec: The codec.
    """
    return _KERNELS if codec.core.kernels and kernels.table() else _FALLBACK


def measure_speeds(request: BenchCodecs) -> list[CodecSpeed]:
    """Measure in this process, with the kernels that it has; the request's file is not written.

    Args:
        request: The options.
    """
    shapes = {name: tuple(one.shape) for name, one in build_model(request.model, request.classes).named_parameters()}
    draw = torch.Generator().manual_seed(0)
    gradients = [0.01 * torch.randn(count, generator=draw) for count in map(_count, shapes.values())]
    limit = memcpy_rate(gradients, request.repeats)
    full = wire_bytes(parse_codec("none"), shapes, request.workers)
    return [_measure(text, shapes, gradients, request, limit, full) for text in request.codec]


def memcpy_rate(tensors: Sequence[Tensor], repeats: int) -> float:
    """GB/s at which tensors are copied, one after the other.

    Args:
        tensors: What is copied.
        repeats: How often; the best time counts.
    """
    copies = [torch.empty_like(tensor) for tensor in tensors]
    times = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        times.append(time.process_time() - begin)
    return _rate(sum(tensor.nbytes for tensor in tensors), times[1:])


class TimedCoder(OuterCoder):
    """A coder that is timed: `encode`, `merging` and `decode` hold the seconds since they were last set to zero.

    Args:
        inner: The coder that does the work.
    """

    def __init__(self, inner: Coder) -> None:
        super().__init__(inner.spec, inner)
        self.encode = self.merging = self.decode = 0.0

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = time.process_time()
        yield
        setattr(self, part, getattr(self, part) + time.process_time() - begin)

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        """Begin a gradient; counts as encoding."""
        with self._timed("encode"):
            self._inner.begin(gradient, residuals)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        """Write a message; counts as encoding."""
        with self._timed("encode"):
            super().write(index, parts)

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        """Merge received messages into one; counts as merging."""
        with self._timed("merging"):
            super().merge(index, received, out)

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        """Read received messages; counts as decoding."""
        with self._timed("decode"):
            super().read(index, parts)

    def finish(self, out: Tensor) -> None:
        """Write the result; counts as decoding."""
        with self._timed("decode"):
            super().finish(out)


def _measure(
    text: str,
    shapes: Mapping[str, tuple[int, ...]],
    gradients: Sequence[Tensor],
    request: BenchCodecs,
    limit: float,
    full: int,
) -> CodecSpeed:
    codec = after_warmup(parse_codec(text))
    workers = [
        [bind(codec, TensorSpec(name, shape, rank, request.workers)) for name, shape in shapes.items()]
        for rank in range(request.workers)
    ]
    timed = [TimedCoder(coder) for coder in workers[0]]
    exchanges = [Exchange(timed), *map(Exchange, workers[1:])]
    outs = [[torch.empty_like(gradient) for gradient in gradients] for _ in workers]
    encode, merge, decode = [], [], []
    for _ in range(request.repeats + 1):
        for coder in timed:
            coder.encode = coder.merging = coder.decode = 0.0
        run_together(exchanges, [gradients] * request.workers, outs)
        for exchange in exchanges:
            exchange.commit()
        encode.append(sum(coder.encode for coder in timed))
        merge.append(sum(coder.merging for coder in timed))
        decode.append(sum(coder.decode for coder in timed))
    size = sum(gradient.nbytes for gradient in gradients)
    return CodecSpeed(
        codec=text,
        code=code_of(codec),
        encode=_rate(size, encode[1:]),
        decode_add=_decode_add(codec, shapes, gradients, request.repeats),
        merge=_rate(size, merge[1:]) if any(merge) else None,
        decode=_rate(size, decode[1:]),
        memcpy=limit,
        full_bytes=full,
        sent_bytes=exchanges[0].traffic.wire,
    )


def _decode_add(
    codec: Codec, shapes: Mapping[str, tuple[int, ...]], gradients: Sequence[Tensor], repeats: int
) -> float | None:
    """GB/s of adding decoded messages to sums, over the parameters whose messages a stripe's owner decodes."""
    inner = codec.inner if isinstance(codec, ErrorFeedback) else codec
    scratch = Scratch(torch.device("cpu"))
    work = []
    for (name, shape), gradient in zip(shapes.items(), gradients, strict=True):
        coder = bind(inner, TensorSpec(name, shape))
        if isinstance(coder, (ShardedCoder, GatheredCoder)):
            quantiser = coder.quantiser
            values = quantiser.view(gradient)
            message = torch.zeros(quantiser.size(values.shape), dtype=torch.uint8)
            quantiser.encode(values, Residual(), message, scratch)
            work.append((quantiser, message, torch.zeros(values.shape)))
    if not work:
        return None
    times = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        for quantiser, message, total in work:
            quantiser.add(message, total, scratch)
        times.append(time.process_time() - begin)
    return _rate(sum(total.nbytes for _, _, total in work), times[1:])


def _rate(size: int, seconds: Sequence[float]) -> float:
    return size / max(statistics.median(seconds), 1e-12) / 1e9


def _count(shape: Sequence[int]) -> int:
    return TensorSpec("", tuple(shape)).count


# ------------------------------------------------------------------------------------------------------------ processes


def _in_process(request: BenchCodecs, code: str) -> list[CodecSpeed]:
    environment = {**os.environ, **worker_environment(1, [0], {}), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment.pop(KERNELS_VARIABLE, None)
    if code == _FALLBACK:
        environment[KERNELS_VARIABLE] = "off"
    told = json.dumps({**dataclasses.asdict(request), "csv": None})
    command = [sys.executable, "-m", "hybridpar.commands.bench.codecs", told]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == UsageError.exit_code:
        raise UsageError(*json.loads(done.stderr.splitlines()[-1]))
    if done.returncode != 0:
        raise LaunchError(f"measuring codecs on {code} failed", done.stderr.strip()[-2000:])
    return [CodecSpeed(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]


def _main(told: str) -> None:
    """What the measuring process does."""
    torch.set_num_threads(1)
    request = BenchCodecs(**json.loads(told))
    try:
        speeds = measure_speeds(dataclasses.replace(request, codec=tuple(request.codec)))
    except UsageError as error:  # the parent tells the user
        print(json.dumps([error.what, error.why, error.fix]), file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps([dataclasses.asdict(speed) for speed in speeds]))


# -------------------------------------------------------------------------------------------------------------- showing

_COLUMNS = ("codec", "code", "encode", "decode\nand add", "merge", "decode", "memcpy", "MB sent", "ratio")


def print_speeds(request: BenchCodecs, speeds: Sequence[CodecSpeed], console: Console) -> None:
    """Print a table of speeds.

    Args:
        request: The options.
        speeds: What was measured.
        console: Where it is printed.
    """
    rows = []
    for speed in speeds:
        rates = (speed.encode, speed.decode_add, speed.merge, speed.decode, speed.memcpy)
        told = ("-" if rate is None else f"{rate:.2f}" for rate in rates)
        rows.append((speed.codec, speed.code, *told, f"{speed.sent_bytes / 1e6:.3f}", f"{speed.ratio:.2f}"))
    title = f"{request.model}: GB/s of float32 gradient on one core, MB sent by one of {request.workers} workers"
    print_table(console, title, {name: name in ("codec", "code") for name in _COLUMNS}, rows)
    console.print(
        "encode: with its residual. merge: the owner of a stripe decodes, adds, encodes again. memcpy: the limit.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    _main(sys.argv[1])
