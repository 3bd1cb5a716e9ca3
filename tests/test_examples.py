"""Tests the examples and their scripts, run as a user would run them."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.rig.table import check_csv
from hybridpar.comm.world import World

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
for script, *options in {scripts!r}:
    sys.argv = [script, *options]
    sys.path[0] = {directory!r}
    runpy.run_path(script, run_name="__main__")
"""


def test_loops_of_ones_own_on_two_workers(tmp_path: Path) -> None:
    directory = ROOT / "examples"
    scripts = [
        [str(directory / "own_loop.py"), "--epochs", "2", "--samples", "256"],
        [str(directory / "ddp_hook.py"), "--epochs", "3", "--samples", "640"],
    ]
    (tmp_path / "in_turn.py").write_text(IN_TURN.format(scripts=scripts, directory=str(directory)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, "in_turn.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 3  # two epochs of the first, one line of the second; from rank 0 alone
    assert "2 workers; checkpoint: runs/own-loop/step-8" in done.stdout
    assert (tmp_path / "runs/own-loop/step-8/rank-1.pt").exists()
    saved = torch.load(tmp_path / "runs/ddp-hook-1.pt", weights_only=True)
    assert saved["codec"]["codec"] == "onebit:warmup=10"


def test_own_loop_learns_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    try:
        assert load(ROOT / "examples/own_loop.py").train(epochs=4, samples=640) > 0.5
    finally:
        for name in ("own_loop", "user_model"):
            sys.modules.pop(name, None)


def test_train_resnet_passes_its_options_on_to_a_tuned_process(tmp_path: Path) -> None:
    script = str(ROOT / "scripts/train_resnet.py")
    options = ["--data", "synthetic", "--synthetic-samples", "40", "--image-size", "16", "--batch-size", "20"]
    done = run([script, *options, "--epochs", "1", "--workers", "1", "--run-dir", "run"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "off with --no-tune-process" in done.stdout
    assert not done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["model"], summary["data"], summary["steps"]) == ("resnet18", "synthetic", 2)


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ([], ["train", "resnet18"]),
        (["--lr", "0.1"], ["train", "resnet18", "--lr", "0.1"]),
        (["resnet34", "--lr", "0.1"], ["train", "resnet34", "--lr", "0.1"]),
    ],
)
def test_train_resnet_puts_a_model_first(
    given: list[str], passed_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr("hybridpar.cli.main", lambda arguments: seen.append(arguments) or 7)
    monkeypatch.setattr(sys, "argv", ["train_resnet.py", *given])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "scripts/train_resnet.py"), run_name="__main__")
    assert (seen, left.value.code) == ([passed_on], 7)


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    return load(ROOT / "scripts/gpu_check.py")


def test_gpu_check_without_a_gpu_says_so(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 3
    assert capsys.readouterr().out == "torch sees no GPU here: nothing was checked\n"


def test_gpu_check_finds_equal_devices_equal(gpu_check: ModuleType) -> None:
    checks = gpu_check.compare("clipping", gpu_check.EQUAL["clipping"], (CPU, CPU))
    assert [(check.value, check.passed) for check in checks] == [(0.0, True), (0.0, True)]


def test_gpu_check_finds_a_lost_gradient(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    train, calls = gpu_check.train, []

    def lose_the_second_half(device: torch.device, config: object, batches: list) -> object:
        calls.append(device)
        if len(calls) == 2:
            batches = [(images[:8], labels[:8]) for images, labels in batches]
        return train(device, config, batches)

    monkeypatch.setattr(gpu_check, "train", lose_the_second_half)
    checks = gpu_check.compare("micro-batches", gpu_check.EQUAL["micro-batches"], (CPU, CPU))
    assert not any(check.passed for check in checks)


def test_gpu_check_compares_with_a_plain_step_that_does_the_same(gpu_check: ModuleType) -> None:
    config = replace(gpu_check.EQUAL["sgd"], guard=False)
    batch = gpu_check.make_batches(1, samples=8, size=16)[0]
    states = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = gpu_check.build_model("resnet18", 10, stem="cifar")
        if ours:
            with gpu_check.Trainer(model, config=config, world=World(device=CPU)) as trainer:
                trainer.step(batch)
        else:
            gpu_check.plain_step(model, config, batch)()
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], msg=name)


def test_gpu_check_times_both_in_one_table(gpu_check: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results/steps.csv"
    gpu_check.time_steps("examples.user_model:small_net", 4, 16, gpu_check.EQUAL["sgd"], CPU, path)
    rows = check_csv(path)
    assert [(row.method, row.baseline, row.setting) for row in rows] == [
        ("plain loop", "plain loop", "examples.user_model:small_net, 16x16, batch 4, fp32"),
        ("hybridpar", "plain loop", "examples.user_model:small_net, 16x16, batch 4, fp32"),
    ]
    assert all(row.extra["images_per_second"] > 0 for row in rows)


def test_gpu_check_adds_to_its_table(gpu_check: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results/checks.csv"
    check = gpu_check.Check("equal", 1.23456e-5, 1e-3, True)
    gpu_check.write_checks([check], path, "H100")
    gpu_check.write_checks([check, check], path, "H100")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["device"], row["check"], row["value"], row["passed"]) for row in rows] == [
        ("H100", "equal", "1.23e-05", "True")
    ] * 3


@pytest.mark.parametrize(
    ("library", "start"),
    [
        ("lightning", ["lightning_hook.py"]),
        ("accelerate", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "accelerate_hook.py"]),
    ],
)
def test_codecs_in_trainers_that_people_have(library: str, start: list[str], tmp_path: Path) -> None:
    pytest.importorskip(library)
    start = [*start[:-1], str(ROOT / "examples" / start[-1])]
    done = run([*start, "--epochs", "6"], tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "test accuracy" in line]  # rank 0 alone speaks
    accuracy, full, sent = re.findall(r"[0-9.]+", line)
    assert float(accuracy) > 60
    assert int(sent) < int(full) / 8
