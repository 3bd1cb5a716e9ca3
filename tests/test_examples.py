"""Tests the examples and their scripts, run as a user would run them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

from hybridpar.commands import COMMANDS
from hybridpar.commands.train import Train, check_names
from hybridpar.config.data import images_over
from hybridpar.observe.metrics import read_metrics
from hybridpar.optim.schedule import rate_factor
from hybridpar.run.run import run_training
from tests.runs import restored_modes

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def run(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=150
    )


def load(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


#: Runs scripts one after the other in the workers of one job: to start workers takes most of the time of a test.
IN_TURN = """
import runpy, sys
import torch.distributed as dist
for script, *options in {scripts!r}:
    sys.argv = [script, *options]
    sys.path[0] = {directory!r}
    runpy.run_path(script, run_name="__main__")
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    if dist.is_initialized():
        dist.destroy_process_group()
"""


def check_codec(line: str) -> None:
    """What an example says of its accuracy, and of the bytes that it sends."""
    accuracy, full, sent = re.findall(r"[0-9.]+", line)
    assert float(accuracy) > 60
    assert int(sent) < int(full) / 8


def test_loops_and_trainers_on_two_workers(tmp_path: Path) -> None:
    directory = ROOT / "examples"
    scripts = [
        [str(directory / "own_loop.py"), "--epochs", "2", "--samples", "256"],
        [str(directory / "ddp_hook.py"), "--epochs", "3", "--samples", "640"],
    ]
    libraries = [name for name in ("accelerate", "transformers") if importlib.util.find_spec(name) is not None]
    scripts += [[str(directory / f"{name}_hook.py"), "--epochs", "6"] for name in libraries]
    (tmp_path / "in_turn.py").write_text(IN_TURN.format(scripts=scripts, directory=str(directory)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, "in_turn.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "test accuracy" in line]
    assert len(lines) == 3 + len(libraries)  # two epochs of the first, a line of each other; from rank 0 alone
    for line in lines[3:]:
        check_codec(line)
    assert "2 workers; checkpoint: runs/own-loop/step-8" in done.stdout
    assert (tmp_path / "runs/own-loop/step-8/rank-1.pt").exists()
    saved = torch.load(tmp_path / "runs/ddp-hook-1.pt", weights_only=True)
    assert saved["codec"]["codec"] == "onebit:warmup=10"


def test_train_resnet_passes_its_options_on_to_a_tuned_process(tmp_path: Path) -> None:
    script = str(ROOT / "scripts/train_resnet.py")
    options = ["--data", "synthetic:samples=40", "--image-size", "16", "--batch-size", "20"]
    done = run([script, *options, "--epochs", "1", "--nproc", "1", "--run-dir", "run"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "off with --no-tune-process" in done.stdout
    assert not done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["model"], summary["data"], summary["steps"]) == ("resnet18", "synthetic:samples=40", 2)


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    return load(ROOT / "scripts/gpu_check.py")


def test_gpu_check_finds_a_lost_gradient(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    train, calls = gpu_check.train, []

    def lose_the_second_half(device: torch.device, config: object, batches: list) -> object:
        calls.append(device)
        if len(calls) == 2:
            batches = [(images[:8], labels[:8]) for images, labels in batches]
        return train(device, config, batches)

    monkeypatch.setattr(gpu_check, "train", lose_the_second_half)
    checks = gpu_check.compare("micro-batches", gpu_check.EQUAL["micro-batches"], (CPU, CPU))
    assert {check.verdict for check in checks} == {"FAILED"}


def test_codecs_in_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    done = run([str(ROOT / "examples/lightning_hook.py"), "--epochs", "6"], tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "test accuracy" in line]  # rank 0 alone speaks
    check_codec(line)


RECIPES = sorted((ROOT / "examples/recipes").glob("*.toml"))

#: Models in place of those of recipes that take seconds a step, built by the same library.
LIGHT = {
    "convnext-tiny": "timm/test_convnext",
    "deit-small": "timm/test_vit",
    "timm-efficientnet-b0": "timm/test_efficientnet",
    "timm-mobilenetv3-large-100": "timm/test_efficientnet",
    "torchvision-resnet50": "shufflenet_v2_x0_5",
    "torchvision-resnet50-v2": "shufflenet_v2_x0_5",
}


def read_recipe(path: Path, *words: str) -> Train:
    """A recipe with more options, without published weights, which would have to be downloaded."""
    command = COMMANDS.get("train")
    options = command.parse("train", ["--config", str(path), *words])
    assert isinstance(options, Train)
    return replace(options, weights=None) if options.weights == "default" else options


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes in files, 16 for training and 16 for testing."""
    root = tmp_path_factory.mktemp("flowers")
    for number in range(16):
        for part in ("train", "test"):
            place = root / part / f"class-{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((48, 40), 20 + 5 * number).convert("RGB").save(place / f"{number}.jpg")
    return root


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_train(path: Path, flowers: Path, tmp_path: Path) -> None:
    if "timm/" in path.read_text():
        pytest.importorskip("timm")
    as_published = read_recipe(path)
    as_published.check()
    there = read_recipe(path, f"--data-root={flowers}")
    check_names(there)  # its data may not be on this machine
    size = 160 if LIGHT.get(path.stem) == "timm/test_vit" else 32
    images = images_over(as_published.image_size, f"{size},test={size}")
    small = ["--batch-size=8", f"--image-size={images}", "--steps=2", "--loader-workers=0"]
    alone = ["--plan=none", "--nproc=1", "--no-tune-process", f"--run-dir={tmp_path / 'run'}"]
    model = [LIGHT[path.stem]] if path.stem in LIGHT else []
    options = read_recipe(path, *small, *alone, *model, "--data=folder", f"--data-root={flowers}")
    with restored_modes():
        assert run_training(options, options.model) == 0
    losses = read_metrics(tmp_path / "run").steps["loss"]
    assert len(losses) == 2
    assert 0 < float(losses[0]) < 10  # the rates are those of large batches, so the second may be large
    assert math.isfinite(float(losses[1]))


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("convnext-tiny", {20: 4e-3, 160: 2.0005e-3, 300: 1e-6}),
        ("deit-small", {0: 1e-6, 5: 1e-5 + 9.9e-4 * (1 + math.cos(math.pi / 60)) / 2, 150: 5.05e-4}),
        ("pytorch-cifar-resnet18", {0: 0.1, 100: 0.05}),
        ("pytorch-examples-resnet18", {0: 0.1, 29: 0.1, 30: 0.01, 89: 0.001}),
        ("pytorch-tutorial-hymenoptera", {6: 1e-3, 7: 1e-4, 24: 1e-6}),
        ("timm-efficientnet-b0", {0: 1e-6, 3: 0.048 * 0.97, 449: 0.048 * 0.97**187}),
        ("timm-mobilenetv3-large-100", {0: 1e-6, 5: 0.064 * 0.973**2, 599: 0.064 * 0.973**249}),
        ("torchvision-mobilenet-v3-large", {1: 0.064, 2: 0.064 * 0.973, 599: 0.064 * 0.973**299}),
        ("torchvision-resnet50", {0: 0.1, 29: 0.1, 30: 0.01, 89: 0.001}),
        ("torchvision-resnet50-v2", {0: 0.005, 1: 0.104, 5: 0.5, 302.5: 0.5 * (1 + math.cos(math.pi * 297 / 595)) / 2}),
    ],
)
def test_rates_of_recipes_are_those_of_their_sources(name: str, rates: dict[float, float]) -> None:
    """Learning rates at the beginning of some epochs, by the formulas of the sources' schedulers."""
    options = read_recipe(ROOT / f"examples/recipes/{name}.toml")
    found = {at: options.lr * rate_factor(int(100 * at), 100 * options.epochs, 100, options) for at in rates}
    assert found == pytest.approx(rates, rel=1e-6)


def test_the_readme_of_recipes_names_them_all() -> None:
    rows = re.findall(r"^\| ([a-z0-9-]+) \|", (ROOT / "examples/recipes/README.md").read_text(), flags=re.MULTILINE)
    assert set(rows) - {"file"} == {path.stem for path in RECIPES}
