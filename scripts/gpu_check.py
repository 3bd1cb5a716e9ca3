"""Runs every check and timing that needs a GPU.

    make gpu-check

1. runs the tests marked `gpu`;
2. trains the same model on the same batches on the CPU and on one GPU, option by option, and compares them;
3. compares ways to run a pipeline (`scripts/gpu_pipeline.py`): stages on streams, CUDA graphs, NCCL;
4. compares the codecs' kernels with torch (`scripts/gpu_kernels.py`), and the depthwise convolutions' with float64
   (`scripts/gpu_convolutions.py`), compiled on the spot or, with `--prebuilt DIR`, elsewhere;
5. runs `hybridpar train` on all GPUs and looks at the accuracy;
6. times whole steps (`scripts/gpu_steps.py`), kernels against torch and a copy on the device, and convolutions against
   torch with and without cuDNN in both layouts, in interleaved rounds.

Results are added to `checks.csv`, `steps.csv`, `kernels.csv` and `convolutions.csv` in `benchmarks/gpu/results/`. Exit
codes: 0 everything passed; 1 something did not; 3 there is no GPU, so nothing was checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for benchmarks.rig, which is not installed

from benchmarks.rig.records import append_dicts  # noqa: E402
from benchmarks.rig.rows import commit, now, write_rows  # noqa: E402
from hybridpar import TrainConfig, Trainer  # noqa: E402
from hybridpar.comm.world import World  # noqa: E402
from hybridpar.models import build_model  # noqa: E402
from hybridpar.run.worker import device_name  # noqa: E402
from hybridpar.tvm_kernels.machine import gpu_at  # noqa: E402
from scripts import gpu_convolutions, gpu_kernels, gpu_pipeline, gpu_steps  # noqa: E402

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
    "clipping": TrainConfig(lr=1e-3, clip_grad=0.5),
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
    model = build_model("resnet18", 10, args={"stem": "cifar"})
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


def write_checks(checks: Sequence[Check], path: Path, device: str) -> None:
    """Add checks to a table."""
    common = {"date": now(), "commit": commit(), "device": device, "torch": torch.__version__}
    rows = []
    for check in checks:
        value = f"{check.value:.3g}" if isinstance(check.value, float) else check.value
        rows.append(common | {"check": check.name, "value": value, "limit": check.limit, "passed": check.passed})
    append_dicts(path, rows)


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
        checks += [
            Check(f"{part}, {result.name}", result.value, result.limit, result.verdict != "FAILED")
            for result in results
        ]
    checks.append(run_command(["resnet18", "--data", "synthetic", "--model-arg", "stem=cifar", "--epochs", "3"]))
    for check in checks:
        print(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.value} (limit {check.limit})")
    gpu = devices[1]
    write_checks(checks, RESULTS / "checks.csv", device_name(gpu))
    torch.backends.cudnn.allow_tf32 = True
    if not options.no_timing:
        gpu_steps.time_steps(gpu_steps.SETTINGS, gpu, RESULTS / "steps.csv", compiled=True)
        for rows in gpu_kernels.time_kernels(gpu, device_name(gpu)):
            write_rows(list(rows), RESULTS / "kernels.csv")
        gpu_convolutions.time_convolutions(gpu, convolutions)
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
