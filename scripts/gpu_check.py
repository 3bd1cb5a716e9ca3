"""Runs every check and timing that needs a GPU.

    make gpu-check

1. runs the tests marked `gpu`;
2. trains the same model on the same batches on the CPU and on one GPU, option by option, and compares them;
3. compares ways to run a pipeline (`scripts/gpu_pipeline.py`): stages on streams, CUDA graphs, NCCL;
4. compares the codecs' kernels with torch (`scripts/gpu_kernels.py`), and the depthwise convolutions' with float64
   (`scripts/gpu_convolutions.py`), compiled on the spot or, with `--prebuilt DIR`, elsewhere;
5. runs `hybridpar train` on all GPUs and looks at the accuracy;
6. times `Trainer`, with and without a CUDA graph, against a plain PyTorch loop on one GPU, kernels against torch and a
   copy on the device, and convolutions against torch with and without cuDNN in both layouts, in interleaved rounds.

Results are added to `checks.csv`, `steps.csv`, `kernels.csv` and `convolutions.csv` in `benchmarks/gpu/results/`. Exit
codes: 0 everything passed; 1 something did not; 3 there is no GPU, so nothing was checked.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for benchmarks.rig, which is not installed

from benchmarks.rig.paired import paired  # noqa: E402
from benchmarks.rig.rows import commit, row  # noqa: E402
from benchmarks.rig.table import append_rows, print_rows  # noqa: E402
from hybridpar import TrainConfig, Trainer  # noqa: E402
from hybridpar.comm.world import World  # noqa: E402
from hybridpar.errors import HybridparError  # noqa: E402
from hybridpar.models import build_model  # noqa: E402
from hybridpar.optim.build import build_optimizer  # noqa: E402
from hybridpar.run.worker import device_name  # noqa: E402
from hybridpar.tvm_kernels.machine import gpu_at  # noqa: E402
from scripts import gpu_convolutions, gpu_kernels, gpu_pipeline  # noqa: E402

RESULTS = ROOT / "benchmarks" / "gpu" / "results"
NO_GPU = 3

#: Largest relative difference between CPU and GPU. Additions have another order there, so results differ by rounding,
#: which training multiplies from step to step: hence few steps and a low rate. Another memory format on the same CPU
#: gives 2e-5 and 1e-4; a gradient that is missing, counted twice or read too early gives 0.1 and more.
STEPS = 3
LOSS_LIMIT = 1e-3
UPDATE_LIMIT = 2e-2

#: Accuracy that three epochs on synthetic images must reach; chance is 0.1.
LEAST_ACCURACY = 0.8

Batch = tuple[Tensor, Tensor]

EQUAL = {
    "sgd": TrainConfig(lr=1e-3),
    "micro-batches": TrainConfig(lr=1e-3, micro_batches=2),
    "clipping": TrainConfig(lr=1e-3, clip_norm=0.5),
    "no guard": TrainConfig(lr=1e-3, guard=False),
    "adamw": TrainConfig(lr=1e-4, optimizer="adamw"),
    "channels-last": TrainConfig(lr=1e-3, memory_format="channels_last"),
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str
    value: float | str
    limit: float | str
    passed: bool


def make_batches(steps: int, samples: int, size: int) -> list[Batch]:
    """Random images and classes, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(samples, 3, size, size, generator=generator),
            torch.randint(0, 10, (samples,), generator=generator),
        )
        for _ in range(steps)
    ]


def train(device: torch.device, config: TrainConfig, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Train ResNet-18 on one worker.

    Returns:
        The loss of each step, and by how much all parameters and running statistics moved, as one vector; on the CPU,
        float64.
    """
    torch.manual_seed(0)
    model = build_model("resnet18", 10, stem="cifar")
    before = _state_vector(model)
    with Trainer(model, config=config, world=World(device=device)) as trainer:
        losses = [trainer.step(batch).loss for batch in batches]
    return torch.tensor(losses, dtype=torch.float64), _state_vector(model) - before


def _state_vector(model: nn.Module) -> Tensor:
    tensors = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])


def compare(name: str, config: TrainConfig, devices: tuple[torch.device, torch.device]) -> list[Check]:
    """Train on two devices and compare losses and final weights."""
    batches = make_batches(STEPS, samples=16, size=16)
    (reference, moved), (losses, moved_there) = (train(device, config, batches) for device in devices)
    loss = float(((losses - reference) / reference).abs().max())
    update = float((moved_there - moved).norm() / moved.norm())
    return [
        Check(f"equal to CPU, {name}: losses", loss, LOSS_LIMIT, loss <= LOSS_LIMIT),
        Check(f"equal to CPU, {name}: updates", update, UPDATE_LIMIT, update <= UPDATE_LIMIT),
    ]


def run_tests() -> Check:
    """Run the tests that are skipped without a GPU."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n")
    lines = done.stdout.strip().splitlines()
    return Check("tests marked gpu", lines[-1] if lines else "no output", "all pass", done.returncode == 0)


def run_command(arguments: Sequence[str]) -> Check:
    """Run `hybridpar train` and look at its summary."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "hybridpar", "train", *arguments, "--run-dir", directory]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stdout, done.stderr, sep="\n")
            return Check("hybridpar train", f"exit code {done.returncode}", LEAST_ACCURACY, False)
        summary = json.loads((Path(directory) / "summary.json").read_text())
    accuracy = summary["test_accuracy"]
    name = f"hybridpar train, {summary['workers']} on {summary['device']}: accuracy"
    return Check(name, accuracy, LEAST_ACCURACY, accuracy >= LEAST_ACCURACY)


def time_steps(model_name: str, samples: int, size: int, config: TrainConfig, device: torch.device, path: Path) -> None:
    """Time a step of `Trainer` against the loop that it replaces, and add the rows to a table."""
    images, labels = make_batches(1, samples, size)[0]
    layout = torch.channels_last if config.memory_format == "channels_last" else torch.contiguous_format
    batch = (images.to(device, memory_format=layout), labels.to(device))
    kinds = {"hybridpar": config}
    if device.type == "cuda":
        kinds["hybridpar, CUDA graph"] = dataclasses.replace(config, cuda_graph=True)
    with contextlib.ExitStack() as stack:
        trainers = {
            name: stack.enter_context(Trainer(build_model(model_name, 10), config=kind, world=World(device=device)))
            for name, kind in kinds.items()
        }
        steps = {"plain loop": _synchronized(plain_step(build_model(model_name, 10), config, batch), device)}
        for name, trainer in trainers.items():
            steps[name] = _synchronized(partial(trainer.step, batch), device)
        result = paired(steps, warmup=8)  # so many that the step has been captured
        for trainer in trainers.values():
            graph = trainer.engine.graph
            if graph is not None and not graph.captured:
                raise HybridparError(f"no step of {model_name} was captured: {graph.reason}")
    precision = "bf16" if config.amp == "bf16" else "fp32"
    setting = f"{model_name}, {size}x{size}, batch {samples}, {precision}"
    rows = [
        dataclasses.replace(
            row(
                result,
                method,
                "plain loop",
                claim="gpu",
                setting=setting,
                extra={"images_per_second": round(1e3 * samples / result.median_ms(method), 1)},
            ),
            device=device_name(device),
        )
        for method in steps
    ]
    append_rows(path, rows)
    print_rows(rows)


def plain_step(model: nn.Module, config: TrainConfig, batch: Batch) -> Callable[[], object]:
    """A step as anybody would write it, with the same optimizer and autocast."""
    images, labels = batch
    layout = torch.channels_last if config.memory_format == "channels_last" else torch.preserve_format
    model = model.to(images.device, memory_format=layout)
    optimizer = build_optimizer(model, config)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=config.amp == "bf16"):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _synchronized(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    def timed() -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return timed


def write_checks(checks: Sequence[Check], path: Path, device: str) -> None:
    """Add checks to a table, under a header of their own where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(["date", "commit", "device", "torch", "check", "value", "limit", "passed"])
        for check in checks:
            value = f"{check.value:.3g}" if isinstance(check.value, float) else check.value
            writer.writerow([date, commit(), device, torch.__version__, check.name, value, check.limit, check.passed])


def main() -> int:
    """Check this machine's GPU; see the module header for the exit codes."""
    parser = argparse.ArgumentParser(description="Test, compare and time hybridpar on this machine's GPU.")
    parser.add_argument("--no-timing", action="store_true", help="leave out the timing of steps")
    parser.add_argument("--prebuilt", type=Path, metavar="DIR", help="machine code of convolutions, compiled elsewhere")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no GPU here: nothing was checked")
        return NO_GPU
    # Otherwise convolutions round their inputs to 10 bits, which drowns what is to be compared.
    torch.backends.cudnn.allow_tf32 = False
    devices = torch.device("cpu"), torch.device("cuda", 0)
    checks = [run_tests()]
    for name, config in EQUAL.items():
        checks += compare(name, config, devices)
    convolutions = gpu_convolutions.Kernels(gpu_at(0), 0, options.prebuilt)
    for part, results in (
        ("pipeline", gpu_pipeline.run_checks(devices[1])),
        ("kernels", gpu_kernels.run_checks(devices[1])),
        ("convolutions", gpu_convolutions.run_checks(devices[1], convolutions)),
    ):
        checks += [Check(f"{part}, {one.name}", one.value, one.limit, one.verdict != "FAILED") for one in results]
    checks.append(run_command(["resnet18", "--data", "synthetic", "--stem", "cifar", "--epochs", "3"]))
    for check in checks:
        print(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.value} (limit {check.limit})")
    gpu = devices[1]
    write_checks(checks, RESULTS / "checks.csv", device_name(gpu))
    torch.backends.cudnn.allow_tf32 = True
    if not options.no_timing:
        table = RESULTS / "steps.csv"
        time_steps("resnet18", 256, 32, TrainConfig(lr=0.01), gpu, table)
        time_steps("resnet50", 64, 224, TrainConfig(lr=0.01, amp="bf16", memory_format="channels_last"), gpu, table)
        for rows in gpu_kernels.time_kernels(gpu, device_name(gpu)):
            append_rows(RESULTS / "kernels.csv", list(rows))
            print_rows(list(rows))
        gpu_convolutions.time_convolutions(gpu, convolutions)
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
