"""Times whole training steps on a GPU against the loop that people write and against torch.compile.

    python scripts/gpu_steps.py                      # all settings; a part of `make gpu-check`
    python scripts/gpu_steps.py --only resnet18-32   # those whose name begins so
    python scripts/gpu_steps.py --device cpu         # a dry run with tiny settings and without graphs

All methods of a setting train the same model from the same weights on the same batch, in interleaved rounds. Where the
batch is repeated that often, the loss after the last round says whether they trained alike. Compiling takes longer than
timing, so all settings are compiled first, side by side, into the compiler's cache.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.rig.paired import paired  # noqa: E402
from benchmarks.rig.rows import Row, row, write_rows  # noqa: E402
from hybridpar import TrainConfig, Trainer  # noqa: E402
from hybridpar.comm.world import World  # noqa: E402
from hybridpar.models import build_model  # noqa: E402
from hybridpar.optim.build import build_optimizer  # noqa: E402
from hybridpar.run.worker import device_name  # noqa: E402

RESULTS = ROOT / "benchmarks" / "gpu" / "results" / "steps.csv"
NO_GPU = 3
#: Rounds before the clock runs: by then steps have been captured, and libraries have chosen their kernels.
WARM_UP = 3
#: Steps of a round. Nobody waits for the device after each step, so a method may issue the next while one runs.
BURST = 5
CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model and a batch. `graphs`: the methods with CUDA graphs, which need memory of their own, are timed too."""

    model: str
    size: int
    samples: int
    amp: str
    memory_format: str
    graphs: bool = True

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


SETTINGS = (
    Setting("resnet18", 32, 256, "none", "contiguous"),
    Setting("resnet34", 32, 256, "none", "contiguous"),
    Setting("resnet50", 32, 256, "none", "contiguous"),
    Setting("resnet18", 32, 128, "none", "contiguous"),
    Setting("resnet18", 32, 256, "bf16", "channels_last"),
    Setting("resnet50", 224, 256, "bf16", "channels_last"),
    Setting("mobilenet_v2", 224, 128, "bf16", "channels_last"),
    Setting("convnext_tiny", 224, 64, "bf16", "channels_last"),
)
#: What a dry run times.
TINY = (Setting("resnet18", 32, 4, "none", "contiguous", graphs=False),)

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


def time_setting(setting: Setting, device: torch.device, *, compiled: bool) -> list[Row]:
    """The rows of a setting: each method against the plain loop of the same rounds."""
    configs = {"hybridpar": setting.config}
    if setting.graphs:
        configs["hybridpar, CUDA graph"] = dataclasses.replace(setting.config, cuda_graph=True)
    with contextlib.ExitStack() as stack:
        steps = rivals(setting, device, compiled=compiled)
        for name, config in configs.items():
            trainer = stack.enter_context(Trainer(setting.build(), config=config, world=World(device=device)))
            steps[name] = partial(trainer_step, trainer, setting.batch(device))
        rows = rows_of(setting, steps, device)
    del steps
    forget(device)
    if compiled and setting.graphs:  # apart, so that no two kinds of graphs share a process's memory
        reduced = loop(setting, device, layout=setting.layout, mode="reduce-overhead")
        plain = loop(setting, device, layout=setting.layout)
        rows += rows_of(setting, {"plain loop": plain, "torch.compile, reduce-overhead": reduced}, device)[1:]
    return rows


def rows_of(setting: Setting, steps: dict[str, Step], device: torch.device) -> list[Row]:
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
            },
        )
        for name in steps
    ]


def forget(device: torch.device) -> None:
    """Give back the memory of what has been timed."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compile_first(setting: Setting) -> str:
    """Fill the compiler's cache for a setting; in a process of its own."""
    began = time.perf_counter()
    device = torch.device("cuda", 0)
    loop(setting, device, layout=setting.layout, mode="default")()()
    return f"{setting.name}: compiled in {time.perf_counter() - began:.0f} s"


def time_steps(settings: Iterable[Setting], device: torch.device, path: Path, *, compiled: bool) -> None:
    """Time settings one after the other, and add rows to a table as they come."""
    chosen = list(settings)
    if compiled:
        with concurrent.futures.ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool:
            for line in pool.map(compile_first, chosen):
                print(line, flush=True)
    for setting in chosen:
        began = time.perf_counter()
        try:
            rows = time_setting(setting, device, compiled=compiled)
        except torch.OutOfMemoryError as error:
            print(f"{setting.name}: {str(error).partition('.')[0]}", file=sys.stderr)
            continue
        finally:
            forget(device)
        write_rows(rows, path)
        print(f"{setting.name}: {time.perf_counter() - began:.0f} s", flush=True)


def main() -> int:
    """See the module header."""
    parser = argparse.ArgumentParser(description="Time training steps against a plain loop and torch.compile.")
    parser.add_argument("--only", default="", metavar="NAME", help="settings whose name begins so, such as resnet18-32")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a dry run")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="the table that rows are added to")
    options = parser.parse_args()
    if options.device == "cpu":
        time_steps(TINY, torch.device("cpu"), options.out, compiled=False)
        return 0
    if not torch.cuda.is_available():
        print("torch sees no GPU here: nothing was timed")
        return NO_GPU
    chosen = [setting for setting in SETTINGS if setting.name.startswith(options.only)]
    time_steps(chosen, torch.device("cuda", 0), options.out, compiled=not options.no_compile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
