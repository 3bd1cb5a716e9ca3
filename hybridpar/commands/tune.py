"""`hybridpar tune`: searches the fastest kernels for a model on this machine, in a process set up for it.

It takes the options of `hybridpar train`, and those of the search.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hybridpar.commands import register_command
from hybridpar.config import TrainConfig
from hybridpar.config.files import FileOptions
from hybridpar.errors import KernelError, UsageError, check, refuse
from hybridpar.formats.output_files import check_writable
from hybridpar.machine.launch import import_torchvision
from hybridpar.machine.process import available_cores, threads_per_worker, tune_this_process
from hybridpar.spec import AT_LEAST_1, Options

if TYPE_CHECKING:
    from hybridpar.tvm_kernels.shapes import KernelKey
    from hybridpar.tvm_kernels.tune import Progress

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class SearchOptions(Options):
    """What is searched, for how long, and where it is kept.

    Attributes:
        shape: Instead of a model: a convolution such as "8x96x56x56 k3x3 s1x1 p1x1 d1x1"; may be repeated.
        threads: Threads that compute; default: one worker's share of the cores.
        target: What kernels are for: the CPU, or the GPU that torch uses.
        budget: Time for everything, as 90s, 10m or 2h; searches get parts of it by what torch takes for them in a step.
        trials: Most candidates of one search; default: as many as there is time for.
        again: Search again where there is a record already.
        output: File that records are appended to; default: the one that `hybridpar train --kernels auto` reads.
        show: Tune nothing; print this database.
    """

    shape: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    threads: Annotated[int | None, AT_LEAST_1] = None
    target: Literal["cpu", "cuda"] = "cpu"
    budget: str = "10m"
    trials: Annotated[int | None, AT_LEAST_1] = None
    again: bool = False
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    show: Path | None = None


class TuneRequest(TrainConfig, FileOptions, SearchOptions):
    """Search the fastest kernels for depthwise convolutions on this machine, and keep what was measured.

    It takes the options of `hybridpar train`, and tunes what each worker of that training computes. For all of them:
    `hybridpar tune --help-all`.

    Attributes:
        model: A torchvision model such as mobilenet_v2, timm/NAME, or your own as package.module:factory.
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None

    def check(self) -> None:
        """Check what can be checked without model and machine."""
        super().check()
        sources = [source for source in (self.model, self.shape, self.show) if source]
        check(
            len(sources) == 1,
            "MODEL, --shape and --show exclude each other" if sources else "nothing to tune",
            "What is tuned is a model's convolutions, or those that --shape names; --show prints what was tuned.",
            "Use `hybridpar tune mobilenet_v2`, for instance.",
        )
        parse_seconds(self.budget)
        check(self.batch_size != "auto", "--batch-size auto", "Kernels are tuned for one size.", "Name it.")
        if self.target == "cuda" and self.threads is not None:
            raise refuse("--threads", "--target cuda", "They are threads of the CPU.")
        if self.target == "cpu" and self.amp == "fp16":
            raise refuse("--amp fp16", "--target cpu", "Kernels for the CPU are for float32 and bf16.")
        if self.target == "cpu" and self.memory_format == "contiguous":
            why = "Kernels for the CPU are for channels_last, in which they are as fast or faster."
            raise refuse("--memory-format contiguous", "--target cpu", why)
        if self.output is not None:
            check_writable("--output", self.output)


def parse_seconds(budget: str) -> float:
    """Seconds of text like 90s, 10m or 2h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", budget.strip().lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    rule = "A time is a positive number with s, m or h."
    check(seconds > 0, f"--budget {budget!r} is not a time", rule, "Use 10m.")
    return seconds


@register_command("tune", TuneRequest, Search=SearchOptions)
def run_tune(config: TuneRequest, _: Sequence[str] = ()) -> int:
    """Tune, or show what was tuned."""
    config.check()
    if config.show is not None:
        _show(config.show, None)
        return 0
    if config.tune_process:
        tune_this_process(1)
    import_torchvision()
    from hybridpar.codegen.cache import KernelsUnavailable
    from hybridpar.observe.progress import progress_bar
    from hybridpar.tvm_kernels.database import read_database, user_database
    from hybridpar.tvm_kernels.tune import search_all, weigh

    path = config.output or user_database()
    if config.output is not None and config.output.is_file():
        read_database(path)  # refuses a file of something else, which records would be added to
    work = find_work(config)
    try:
        with progress_bar() as show:

            def on_progress(progress: Progress) -> None:
                best = f"  best {progress.best.ms:.3f} ms" if progress.best is not None else ""
                text = f"{progress.key.shape.text} {progress.key.direction}{best}"
                show(description=text, completed=progress.done, total=progress.total)

            goal, trials = (weigh(work), path, parse_seconds(config.budget)), config.trials
            report = search_all(*goal, again=config.again, seed=config.seed, trials=trials, on_progress=on_progress)
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
    import torch

    from hybridpar.data import load_dataset
    from hybridpar.machine.devices import default_workers
    from hybridpar.planner.resolve import share_of_worker
    from hybridpar.run.data import configured_model, with_images_of_model
    from hybridpar.tvm_kernels.layers import step_keys
    from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout

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
    check(
        bool(work),
        f"{config.model} has no depthwise convolution",
        "These are what is tuned.",
        "Models that have some: mobilenet_v2, efficientnet_b0, convnext_tiny.",
    )
    return work


def _where(config: TuneRequest, threads: int) -> tuple[int, str, str]:
    """Threads, device and dtype of what is tuned."""
    import torch

    from hybridpar.planner.resolve import DTYPES
    from hybridpar.tvm_kernels.machine import cpu_fingerprint, gpu_at, this_machine

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
    from rich.console import Console

    from hybridpar.tvm_kernels.database import read_database
    from hybridpar.tvm_kernels.table import best_records, summary_lines, table_of

    records = best_records(read_database(path), only)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table_of(records))
    for line in summary_lines(records):
        console.print(line)
