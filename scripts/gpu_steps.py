"""Times whole training steps against the loop that people write and torch.compile: the pack `steps` of
`scripts/gpu_check.py`.

All methods of a setting train the same model from the same weights on the same batch, in interleaved rounds. Where the
batch is repeated that often, the loss after the last round says whether they trained alike. Compiling takes longer than
timing, so all settings are compiled first, side by side, into the compiler's cache; a setting whose code is not there
when half of the pack's time is over is timed without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rig.paired import paired
from benchmarks.rig.rows import Row, row, write_rows
from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.data import Batch, TrainBatches, load_dataset
from hybridpar.models import build_model
from hybridpar.optim.build import build_optimizer
from hybridpar.run.worker import device_name
from scripts.gpu_common import Pack, versions

#: Rounds before the clock runs: by then steps have been captured, and libraries have chosen their kernels.
WARM_UP = 3
#: Steps of a round. Nobody waits for the device after each step, so a method may issue the next while one runs.
BURST = 5
CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model and a batch."""

    model: str
    size: int
    samples: int
    amp: str = "none"
    memory_format: str = "contiguous"

    @property
    def name(self) -> str:
        """A short name, for `--only`."""
        return f"{self.model}-{self.size}-{self.samples}-{'bf16' if self.amp == 'bf16' else 'fp32'}"

    @property
    def text(self) -> str:
        """The setting in words, as tables have it."""
        precision = "bf16" if self.amp == "bf16" else "fp32"
        layout = ", channels_last" if self.memory_format == "channels_last" else ""
        return f"{self.model}, {self.size}x{self.size}, batch {self.samples}, {precision}{layout}"

    @property
    def config(self) -> TrainConfig:
        """The options of hybridpar for it."""
        return TrainConfig(lr=0.01, amp=self.amp, memory_format=self.memory_format)

    def build(self) -> nn.Module:
        """The model, with the same weights at every call."""
        torch.manual_seed(0)
        return build_model(self.model, CLASSES)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random images and classes on the device."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.samples, 3, self.size, self.size, generator=generator)
        labels = torch.randint(0, CLASSES, (self.samples,), generator=generator)
        return images.to(device, memory_format=self.layout), labels.to(device)

    @property
    def layout(self) -> torch.memory_format:
        """The memory format of images and weights."""
        return torch.channels_last if self.memory_format == "channels_last" else torch.contiguous_format


#: What is timed, what matters most first.
SETTINGS = (
    *(Setting(model, 32, 256) for model in ("resnet18", "resnet34", "resnet50")),
    *(Setting(model, 32, 128) for model in ("resnet18", "resnet34", "resnet50")),
    Setting("resnet50", 224, 256, "bf16", "channels_last"),
    Setting("mobilenet_v2", 224, 128, "bf16", "channels_last"),
    Setting("convnext_tiny", 224, 64, "bf16", "channels_last"),
    Setting("resnet18", 32, 256, "bf16", "channels_last"),
    Setting("resnet50", 224, 64, "none", "channels_last"),
    Setting("mobilenet_v2", 224, 64, "none", "channels_last"),
    Setting("convnext_tiny", 224, 64, "none", "channels_last"),
)
#: What a dry run times.
TINY = (Setting("resnet18", 32, 4),)

#: Issues a step and returns its loss, which may not be known yet.
Step = Callable[[], Callable[[], float]]


def loop(setting: Setting, device: torch.device, *, layout: torch.memory_format, mode: str | None = None) -> Step:
    """A step as anybody would write it, with the same optimizer and autocast; compiled with `mode` if it is given."""
    images, labels = setting.batch(device)
    images = images.to(memory_format=layout)
    model = setting.build().to(device, memory_format=layout)
    optimizer = build_optimizer(model, setting.config)
    forward = model if mode is None else torch.compile(model, mode=mode)

    def step() -> Callable[[], float]:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=setting.amp == "bf16"):
            loss = nn.functional.cross_entropy(forward(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach().item

    return step


def trainer_step(trainer: Trainer, batch: tuple[Tensor, Tensor]) -> Callable[[], float]:
    """A step of hybridpar."""
    result = trainer.step(batch)
    return lambda: result.loss


def burst(step: Step, device: torch.device) -> float:
    """Some steps, until the device is done with them; the loss of the last."""
    for _ in range(BURST):
        loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return loss()


def rivals(setting: Setting, device: torch.device, *, compiled: bool) -> dict[str, Step]:
    """The loops that hybridpar is timed against, by name."""
    steps = {"plain loop": loop(setting, device, layout=setting.layout)}
    if setting.memory_format == "contiguous":
        steps["plain loop, channels_last"] = loop(setting, device, layout=torch.channels_last)
    if compiled:
        steps["torch.compile"] = loop(setting, device, layout=setting.layout, mode="default")
    return steps


def loaded_batches(setting: Setting, device: torch.device) -> Iterator[Batch]:
    """Batches without end of images in the host's memory, as the package's own loader puts them on a device."""
    data = load_dataset(TrainConfig(data=f"synthetic:samples={8 * setting.samples}"))
    batches = TrainBatches(
        data=data, batch_size=setting.samples, rank=0, workers=1, seed=0, micro_batches=1, device=device
    )
    for epoch in itertools.count():
        yield from batches.epoch(epoch)


def loader_step(trainer: Trainer, batches: Iterator[Batch]) -> Callable[[], float]:
    """A step of hybridpar on the loader's next batch."""
    result = trainer.step(next(batches))
    return lambda: result.loss


def time_setting(setting: Setting, device: torch.device, *, compiled: bool) -> list[Row]:
    """The rows of a setting: each method against the plain loop of the same rounds."""
    configs = {"hybridpar": setting.config, "hybridpar, --cuda-graph off": setting.config}
    configs["hybridpar, --cuda-graph off"] = dataclasses.replace(setting.config, cuda_graph="off")
    from_loader = "hybridpar, from its loader"
    if setting.size == 32 and setting.memory_format == "contiguous":
        configs[from_loader] = setting.config
    with contextlib.ExitStack() as stack:
        steps = rivals(setting, device, compiled=compiled)
        trainers = {
            name: stack.enter_context(Trainer(setting.build(), config=config, world=World(device=device)))
            for name, config in configs.items()
        }
        for name, trainer in trainers.items():
            steps[name] = partial(trainer_step, trainer, setting.batch(device))
        if from_loader in trainers:
            steps[from_loader] = partial(loader_step, trainers[from_loader], loaded_batches(setting, device))
        rows = rows_of(setting, steps, device, trainers)
    del steps, trainers
    forget(device)
    if compiled and device.type == "cuda":  # apart, so that no two kinds of graphs share a process's memory
        reduced = loop(setting, device, layout=setting.layout, mode="reduce-overhead")
        plain = loop(setting, device, layout=setting.layout)
        rows += rows_of(setting, {"plain loop": plain, "torch.compile, reduce-overhead": reduced}, device)[1:]
    return rows


def rows_of(
    setting: Setting, steps: dict[str, Step], device: torch.device, trainers: dict[str, Trainer] | None = None
) -> list[Row]:
    """Time methods in interleaved rounds, each against the plain loop."""
    losses: dict[str, float] = {}

    def noted(name: str, step: Step) -> None:
        losses[name] = burst(step, device)

    result = paired({name: partial(noted, name, step) for name, step in steps.items()}, warmup=WARM_UP)
    each = {name: tuple(ms / BURST for ms in times) for name, times in result.milliseconds.items()}
    result = dataclasses.replace(result, milliseconds=each)
    return [
        row(
            result,
            name,
            "plain loop",
            claim="gpu",
            setting=setting.text,
            device=device_name(device),
            extra={
                "images_per_second": round(1e3 * setting.samples / result.median_ms(name), 1),
                "loss": round(losses[name], 5),
                **({"graph": graph_of(trainers[name])} if trainers and name in trainers else {}),
                **versions(),
            },
        )
        for name in steps
    ]


def graph_of(trainer: Trainer) -> str:
    """What became of the CUDA graph of a trainer's steps."""
    graph = trainer.engine.graph
    return "none" if graph is None else graph.reason or ("captured" if graph.captured else "not captured")


def forget(device: torch.device) -> None:
    """Give back the memory of what has been timed."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compile_first(setting: Setting, gate: AbstractContextManager[Any]) -> None:
    """Fill the compiler's cache for a setting; in a process of its own."""
    with gate:
        began = time.perf_counter()
        loop(setting, torch.device("cuda", 0), layout=setting.layout, mode="default")()()
    print(f"{setting.name}: compiled in {time.perf_counter() - began:.0f} s", flush=True)


def compile_all(settings: Sequence[Setting], seconds: float) -> set[Setting]:
    """The settings whose code was compiled in so many seconds, side by side."""
    context = multiprocessing.get_context("spawn")
    gate = context.Semaphore(8)  # a GPU's memory has room for so many steps
    processes = {setting: context.Process(target=compile_first, args=(setting, gate)) for setting in settings}
    for process in processes.values():
        process.start()
    ends = time.monotonic() + seconds
    for process in processes.values():
        process.join(max(0.0, ends - time.monotonic()))
    done = {setting for setting, process in processes.items() if process.exitcode == 0}
    for process in processes.values():
        process.kill()
        process.join()
    return done


def run(pack: Pack) -> bool:
    """Time settings one after the other, and add rows to a table as they come."""
    settings = [setting for setting in (TINY if pack.dry else SETTINGS) if setting.name.startswith(pack.only)]
    compiled = set() if pack.dry else compile_all(settings, pack.left / 2)
    for setting in settings:
        if not pack.has_time_for(setting.name):
            continue
        began = time.perf_counter()
        try:
            rows = time_setting(setting, pack.device, compiled=setting in compiled)
        except torch.OutOfMemoryError as error:
            print(f"{setting.name}: {str(error).partition('.')[0]}", file=sys.stderr)
            continue
        finally:
            forget(pack.device)
        write_rows(rows, pack.out / "steps.csv")
        print(f"{setting.name}: {time.perf_counter() - began:.0f} s", flush=True)
    return True
