"""Runs `hybridpar tune`: finds the layers of a model, searches kernels for them, prints and records the results."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.commands.tune.request import TuneRequest, parse_seconds
from hybridpar.data import load_dataset
from hybridpar.errors import KernelError, UsageError, check
from hybridpar.machine.devices import default_workers
from hybridpar.machine.process import available_cores, threads_per_worker
from hybridpar.observe.progress import progress_bar
from hybridpar.planner.resolve import DTYPES, share_of_worker
from hybridpar.run.data import configured_model, with_images_of_model
from hybridpar.tvm_kernels.database import read_database, user_database
from hybridpar.tvm_kernels.layers import step_keys
from hybridpar.tvm_kernels.machine import cpu_fingerprint, gpu_at, this_machine
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from hybridpar.tvm_kernels.table import best_records, summary_lines, table_of
from hybridpar.tvm_kernels.tune import Progress, SearchReport, search_all, weigh


def run_tune(config: TuneRequest, search: Callable[..., SearchReport] = search_all) -> int:
    """Tune, or show what was tuned."""
    config.check()
    if config.show is not None:
        _show(config.show, None)
        return 0
    path = config.output or user_database()
    if config.output is not None and config.output.is_file():
        read_database(path)  # refuses a file of something else, which records would be added to
    work = find_work(config)
    options: dict[str, Any] = {"again": config.again, "seed": config.seed, "trials": config.trials}
    try:
        with progress_bar() as show:

            def on_progress(progress: Progress) -> None:
                best = f"  best {progress.best.ms:.3f} ms" if progress.best is not None else ""
                text = f"{progress.key.shape.text} {progress.key.direction}{best}"
                show(description=text, completed=progress.done, total=progress.total)

            report = search(weigh(work), path, parse_seconds(config.budget), **options, on_progress=on_progress)
    except KernelsUnavailable as error:
        raise KernelError(
            f"no kernel can be built here: {error}",
            "Tuning compiles kernels with TVM, and for a GPU with NVRTC, which torch for CUDA has.",
            "Install apache-tvm of the version that hybridpar asks for; training works without.",
        ) from error
    if path.exists():
        _show(path, set(work))
    said = f"{report.tuned} searches done, {report.skipped} were done before"
    said += f", {report.empty} without a kernel, where torch is used" if report.empty else ""
    said += f", {report.unsteady} too unsteady to be recorded, as the machine is busy" if report.unsteady else ""
    said += f", {report.left} left: the same command goes on with them" if report.left else ""
    print(f"{said}; records are in {path}", file=sys.stderr)
    return 130 if report.stopped else 0


def find_work(config: TuneRequest) -> Counter[KernelKey]:
    """The convolutions that a request asks for in each direction, and how often each one runs in a step."""
    contiguous = config.memory_format == "contiguous"
    layout = Layout.CONTIGUOUS if contiguous else Layout.CHANNELS_LAST
    if config.shape:
        where = _where(config, threads_per_worker(1, available_cores()))
        shapes = [ConvShape.parse(text) for text in config.shape]
        return Counter(KernelKey(direction, shape, layout, *where) for shape in shapes for direction in Direction)
    assert config.model is not None
    run = with_images_of_model(config, config.model)
    data = load_dataset(run)
    samples, threads = share_of_worker(run, run.nproc or run.workers_wanted or default_workers())
    torch.manual_seed(config.seed)
    model = configured_model(run, config.model, data.classes)
    work = step_keys(model, (samples, *data.sample_shape), layout, *_where(config, threads))
    if not work:
        raise UsageError(
            f"{config.model} has no depthwise convolution",
            "These are what is tuned.",
            "Models that have some: mobilenet_v2, efficientnet_b0, convnext_tiny.",
        )
    return work


def _where(config: TuneRequest, threads: int) -> tuple[int, str, str]:
    """Threads, device and dtype of what is tuned."""
    if config.target == "cpu":
        check(
            config.amp == "none" or this_machine().bfloat16,
            "--amp bf16 on this CPU",
            "Kernels for bf16 need the instructions AVX512_BF16, which it has not.",
            "Leave --amp out, or add --target cuda.",
        )
        return config.threads or threads, cpu_fingerprint(), DTYPES[config.amp]
    if not torch.cuda.is_available():
        raise UsageError("--target cuda without a GPU", "Kernels are measured on the GPU that they are for.")
    return 1, gpu_at(torch.cuda.current_device()).fingerprint, DTYPES[config.amp]


def _show(path: Path, only: set[KernelKey] | None) -> None:
    """Print the rows of a database, or of some of its keys."""
    records = best_records(read_database(path), only)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table_of(records))
    for line in summary_lines(records):
        console.print(line)
