"""Runs every check and timing that needs a GPU, in packs of some minutes each.

    make gpu-check                                             # all packs, one after the other
    make gpu-check PACK=steps                                  # one of them
    python scripts/gpu_check.py steps --only resnet18-32       # some of its settings
    python scripts/gpu_check.py --dry-run                      # tiny settings on a CPU, and no table

checks      tests marked `gpu`; training compared with the CPU, option by option; pipelines, CUDA graphs and NCCL
            (`gpu_pipeline.py`); the command
steps       whole steps against a plain loop and torch.compile (`gpu_steps.py`)
kernels     depthwise convolutions against float64 and torch, the fastest of some candidates (`gpu_convolutions.py`),
            and what virtual threads and phases are worth (`gpu_tiling.py`)
thesis      time to a loss, for streams, micro-batches and graphs (`gpu_thesis.py`)
codecs      the codecs' kernels against torch (`gpu_codecs.py`); two workers that share the GPU, by codec and number of
            sync lanes (`gpu_workers.py`)

A pack begins nothing more once its time is over (`--seconds`), and says what it left out. None needs a network or, with
`--prebuilt`, TVM: `--prebuild DIR --gpu h200`, anywhere with TVM, compiles what `kernels` runs. Rows with versions,
device and commit are added to the tables in `benchmarks/gpu/results/`. Exit codes: 0 everything passed; 1 something did
not; 3 there is no GPU, so nothing was checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.models import build_model
from hybridpar.tvm_kernels.machine import KNOWN, gpu_at
from scripts import gpu_codecs, gpu_convolutions, gpu_pipeline, gpu_steps, gpu_thesis, gpu_tiling
from scripts.gpu_common import ROOT, Pack, Result, run_each

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


def compare(name: str, config: TrainConfig, devices: tuple[torch.device, torch.device]) -> list[Result]:
    """Train on two devices and compare losses and final weights."""
    batches = make_batches(STEPS, samples=16, size=16)
    (reference, moved), (losses, moved_there) = (train(device, config, batches) for device in devices)
    loss = float(((losses - reference) / reference).abs().max())
    update = float((moved_there - moved).norm() / moved.norm())
    return [
        Result(f"equal to CPU, {name}: {what}", value, limit, "ok" if value <= limit else "FAILED")
        for what, value, limit in (("losses", loss, LOSS_LIMIT), ("updates", update, UPDATE_LIMIT))
    ]


def run_tests(pack: Pack) -> Result:
    """Run the tests that are skipped without a GPU."""
    what = ["-m", "gpu"] if not pack.dry else ["-m", "gpu", "tests/lanes/test_cuda.py"]
    done = subprocess.run([sys.executable, "-m", "pytest", *what], cwd=ROOT, capture_output=True, text=True)
    if "No module named pytest" in done.stderr:
        return Result("tests marked gpu", "pytest is not installed", "", "skipped")
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n")
    lines = done.stdout.strip().splitlines()
    last = lines[-1].strip("= ") if lines else "no output"
    return Result("tests marked gpu", last, "all pass", "ok" if done.returncode == 0 else "FAILED")


def run_command(arguments: Sequence[str], least: float) -> Result:
    """Run `hybridpar train` and look at its summary."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "hybridpar", "train", *arguments, "--run-dir", directory]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stdout, done.stderr, sep="\n")
            return Result("hybridpar train", f"exit code {done.returncode}", least, "FAILED")
        summary = json.loads((Path(directory) / "summary.json").read_text())
    accuracy = summary["test_accuracy"]
    name = f"hybridpar train, {summary['workers']} on {summary['device']}: accuracy"
    return Result(name, accuracy, least, "ok" if accuracy >= least else "FAILED")


def run_checks(pack: Pack) -> bool:
    """The pack `checks`; whether none failed."""
    # Otherwise convolutions round their inputs to 10 bits, which drowns what is to be compared.
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    pipelines = gpu_pipeline.all_checks(pack.device)
    equal, command = EQUAL, ["resnet18", "--data", "synthetic", "--model-arg", "stem=cifar", "--epochs", "3"]
    if pack.dry:
        pipelines = dict(list(pipelines.items())[:1])
        equal, command = {"sgd": EQUAL["sgd"]}, ["tests.small_nets:SmallNet", "--data", "synthetic:samples=40"]
        command += ["--image-size", "8", "--epochs", "1", "--batch-size", "8", "--nproc", "1", "--plan", "none"]
    try:
        results = [run_tests(pack)]
        for name, config in equal.items():
            if pack.has_time_for(name):
                results += compare(name, config, (torch.device("cpu"), pack.device))
        results += [
            dataclasses.replace(result, name=f"pipeline, {result.name}")
            for name, check in pipelines.items()
            if pack.has_time_for(name)
            for result in run_each({name: check})
        ]
        results.append(run_command(command, 0.0 if pack.dry else LEAST_ACCURACY))
    finally:
        torch.backends.cudnn.allow_tf32 = before
    return pack.write_checks(results)


def run_kernels(pack: Pack) -> bool:
    """The pack `kernels`; whether no check failed."""
    if pack.dry and pack.prebuilt is None:
        print("kernels: there are none for a CPU, and the suite runs their source")
        return True
    index = pack.device.index or 0
    kernels = gpu_convolutions.Kernels(KNOWN["h200"] if pack.dry else gpu_at(index), index, pack.prebuilt)
    passed = pack.write_checks(list(gpu_convolutions.run_checks(pack.device, kernels)))
    if pack.prebuilt is not None and (pack.prebuilt / gpu_tiling.LIST).exists():
        passed = gpu_tiling.measure(pack, pack.prebuilt) and passed
    gpu_convolutions.time_convolutions(pack, kernels)
    return passed


PACKS: dict[str, Callable[[Pack], bool]] = {
    "checks": run_checks,
    "steps": gpu_steps.run,
    "kernels": run_kernels,
    "thesis": gpu_thesis.run,
    "codecs": gpu_codecs.run,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check this machine's GPU; see the module header for the exit codes."""
    parser = argparse.ArgumentParser(description="Test, compare and time hybridpar on this machine's GPU.")
    parser.add_argument("packs", nargs="*", metavar="PACK", help=f"{', '.join(PACKS)}; default: all")
    parser.add_argument("--only", default="", metavar="NAME", help="settings whose name begins so, of steps and thesis")
    parser.add_argument("--seconds", type=float, default=Pack.seconds, help="after which a pack begins nothing more")
    parser.add_argument("--prebuilt", type=Path, metavar="DIR", help="machine code of kernels, compiled elsewhere")
    parser.add_argument("--prebuild", type=Path, metavar="DIR", help="compile that into DIR, and do nothing else")
    parser.add_argument("--gpu", choices=sorted(KNOWN), default="h200", help="what --prebuild compiles for")
    parser.add_argument("--out", type=Path, default=Pack.out, metavar="DIR", help="folder of the tables")
    parser.add_argument("--dry-run", action="store_true", help="tiny settings on a CPU, which write no table")
    options = parser.parse_args(arguments)
    if unknown := set(options.packs) - set(PACKS):
        parser.error(f"no pack is called {', '.join(sorted(unknown))}; there are {', '.join(PACKS)}")
    if options.prebuild is not None:
        gpu_convolutions.prebuild(options.prebuild, KNOWN[options.gpu])
        gpu_tiling.prebuild(options.prebuild, KNOWN[options.gpu].architecture)
        return 0
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU here: nothing was checked")
        return NO_GPU
    passed = True
    with tempfile.TemporaryDirectory() as thrown_away:
        for name in options.packs or PACKS:
            pack = Pack(
                torch.device("cpu") if options.dry_run else torch.device("cuda", 0),
                out=Path(thrown_away) if options.dry_run else options.out,
                dry=options.dry_run,
                only=options.only,
                prebuilt=options.prebuilt,
                seconds=options.seconds,
            )
            passed = PACKS[name](pack) and passed
            print(f"{name}: {pack.seconds - pack.left:.0f} s", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
