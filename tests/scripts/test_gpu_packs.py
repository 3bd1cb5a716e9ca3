"""A dry run of every pack of `scripts/gpu_check.py`: on a CPU, in tiny settings, and without a clock."""

from __future__ import annotations

import csv
import json
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.rig.network import Network
from benchmarks.rig.paired import Paired
from hybridpar.codegen import cuda_driver
from hybridpar.comm.world import World
from hybridpar.compress import kernels
from hybridpar.compress.kernels.cuda import CudaKernels
from hybridpar.errors import LaunchError
from hybridpar.tvm_kernels import cuda_kernel, measure
from hybridpar.tvm_kernels.cuda_kernel import CudaVariant
from hybridpar.tvm_kernels.machine import KNOWN
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from scripts import (
    gpu_check,
    gpu_codecs,
    gpu_convolutions,
    gpu_pipeline,
    gpu_steps,
    gpu_thesis,
    gpu_tiling,
    gpu_workers,
)
from scripts.gpu_common import Pack, Result
from tests.emulated.convolutions import emulated_kernels as emulated_convolutions
from tests.pipeline.tape import StandInCuda
from tests.ranks import run_ranks

CPU = torch.device("cpu")
HOPPER = KNOWN["h100"]


def called_once(methods: Mapping[str, Callable[[], object]], **_: Any) -> Paired:
    """In the place of a clock."""
    for method in methods.values():
        method()
    return Paired(dict.fromkeys(methods, (10.0,) * 20), dropped=0, load=0.0, loaded=False)


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(row[name] for row in rows for name in ("date", "commit", "device", "torch"))
    return rows


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    return Pack(CPU, out=tmp_path / "tables", dry=True)


def test_checks(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    runs = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if command[0] == "git":
            return runs(command, **options)
        commands.append(command[2:4])
        if "train" in command:
            summary = {"test_accuracy": 0.5, "workers": 1, "device": "CPU"}
            Path(command[-1], "summary.json").write_text(json.dumps(summary))
        return SimpleNamespace(returncode=0, stdout="== 3 passed in 1.0s ==\n", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_check.run_checks(pack)
    assert commands == [["pytest", "-m"], ["hybridpar", "train"]]
    rows = {row["check"]: row for row in rows_of(pack.out / "checks.csv")}
    assert rows["tests marked gpu"]["value"] == "3 passed in 1.0s"
    assert {row["passed"] for row in rows.values()} == {"True"}
    assert len(rows) == 5


def test_a_check_that_fails_is_told_and_hides_no_other(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("a made-up failure")

    monkeypatch.setattr(gpu_check, "run_tests", lambda _: Result("tests", "none", "", "skipped"))
    monkeypatch.setattr(gpu_check, "run_command", lambda *_: Result("command", 1.0, 0.0, "ok"))
    monkeypatch.setattr(gpu_pipeline, "all_checks", lambda _: {"first": fail})
    assert not gpu_check.run_checks(pack)
    rows = {row["check"]: row for row in rows_of(pack.out / "checks.csv")}
    assert rows["pipeline, first"]["passed"] == "False"
    assert "a made-up failure" in rows["pipeline, first"]["value"]
    assert rows["command"]["passed"] == "True"


def test_steps(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "paired", called_once)
    monkeypatch.setattr(gpu_steps, "BURST", 2)
    monkeypatch.setattr(gpu_steps, "TINY", (replace(gpu_steps.TINY[0], samples=2),))
    assert gpu_steps.run(pack)
    rows = {row["method"]: row for row in rows_of(pack.out / "steps.csv")}
    extra = {name: json.loads(row["extra"]) for name, row in rows.items()}
    ours = {"hybridpar", "hybridpar, --cuda-graph off", "hybridpar, from its loader"}
    assert set(rows) == {"plain loop", "plain loop, channels_last"} | ours
    assert extra["hybridpar"]["loss"] == extra["plain loop"]["loss"]
    assert {extra[name]["graph"] for name in ours} == {"none"}
    assert rows["hybridpar"]["median_ms"] == "5.0"  # of one step, not of a round of two
    assert extra["hybridpar"]["images_per_second"] == 400.0


def test_thesis(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(*_: Any, **__: Any) -> nn.Module:
        layers = nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
        return nn.Sequential(*layers)

    monkeypatch.setattr(gpu_thesis, "build_model", small)
    assert gpu_thesis.run(pack)
    rows = {row["way"]: row for row in rows_of(pack.out / "thesis.csv")}
    assert list(rows) == ["plain loop", "1 stage, 1 micro-batches", "2 stages, 2 micro-batches"]
    assert rows["1 stage, 1 micro-batches"]["loss"] == rows["plain loop"]["loss"]
    assert {row["steps"] for row in rows.values()} == {"3"}


def test_codecs(pack: Pack, emulated_kernels: CudaKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "table", lambda device=CPU: emulated_kernels)
    monkeypatch.setattr(gpu_codecs, "SHAPES", ((3, 5), (20, 147)))
    monkeypatch.setattr(gpu_codecs, "paired", called_once)
    monkeypatch.setattr(gpu_workers, "run", lambda _: True)
    assert gpu_codecs.run(pack)
    checks = rows_of(pack.out / "checks.csv")
    assert len(checks) == 2 * len(gpu_codecs.CODECS) + 4
    settings = {row["setting"] for row in rows_of(pack.out / "kernels.csv")}
    assert len(settings) == 2 * 3 * len(gpu_codecs.CODECS)

    monkeypatch.setitem(emulated_kernels.functions, "twobit_codes", lambda *_: None)  # type: ignore[arg-type]
    failed = {result.name.partition(",")[0] for result in gpu_codecs.run_checks(CPU) if result.verdict == "FAILED"}
    assert failed == {"twobit", "special values"}


class ThreadsOfCpu(gpu_workers.ThreadLanes):
    """Threads whose streams are those of a stand-in."""

    def __init__(self, device: torch.device) -> None:
        gpu_workers.cuda = StandInCuda()
        super().__init__(device)


def measure_as_rank(world: World, arguments: dict[str, Any], spoilt: bool) -> int:
    """What `benchmarks.rig.rank` starts in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_workers, "process_group", lambda _: nullcontext((world.rank, world.size)))
        patch.setattr(gpu_workers, "paired", called_once)
        patch.setattr(gpu_workers, "cuda", torch.cuda)  # and back
        patch.setattr(gpu_workers, "lanes_of", ThreadsOfCpu)
        if spoilt:
            whole = gpu_workers.read_policy
            patch.setattr(gpu_workers, "read_policy", lambda text: whole("none" if text == "onebit" else text))
        return gpu_workers.measure(**arguments)


def measure_in_pool(_: Network, module: str, arguments: dict[str, Any], *, spoilt: bool = False, **__: Any) -> None:
    assert module == gpu_workers.__name__
    arguments = arguments | {"out": str(arguments["out"])}
    if any(run_ranks(measure_as_rank, gpu_workers.WORKERS, arguments, spoilt, shared_memory=False)):
        raise LaunchError("failed: rank 0 (exit status 1)", "", "")


def test_two_workers_on_one_gpu(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_workers, "measure_in_ranks", measure_in_pool)
    assert gpu_workers.run(pack)
    checks = rows_of(pack.out / "checks.csv")
    assert [row["passed"] for row in checks] == ["True"] * len(gpu_workers.CODECS)
    rows = {row["method"]: json.loads(row["extra"]) for row in rows_of(pack.out / "workers.csv")}
    assert list(rows) == [f"{codec}, lanes={lanes}" for codec in gpu_workers.CODECS for lanes in (1, 2, 4)]
    assert all(min(rows[name]["copy_ms"], rows[name]["exchange_ms"]) > 0 for name in rows)
    assert rows["onebit, lanes=2"]["encode_ms"] > 0

    monkeypatch.setattr(gpu_workers, "measure_in_ranks", partial(measure_in_pool, spoilt=True))
    assert not gpu_workers.run(pack)
    failed = [row["check"] for row in rows_of(pack.out / "checks.csv") if row["passed"] == "False"]
    assert failed == ["two workers on one GPU, onebit, lanes=2", gpu_workers.NAME]


def test_a_lane_of_two_workers_is_a_thread_that_works_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, seen = StandInCuda(), []
    monkeypatch.setattr(gpu_workers, "cuda", cuda)
    host = cuda.current
    with gpu_workers.ThreadLanes(torch.device("cuda", 0)) as lanes:
        lane = lanes.open("sync-0")
        lane.submit(lambda: seen.append((cuda.current, threading.current_thread())))
        lanes.caller.wait(lane.record())
    [(stream, thread)] = seen
    assert thread is not threading.current_thread()
    assert stream is not host
    assert stream.clock[host] == host.ticks == 1  # behind all that was issued


KEYS = [
    KernelKey(direction, ConvShape.parse("1x4x6x5 k3x3 s1x1 p1x1 d1x1"), Layout.CHANNELS_LAST, 1, HOPPER.fingerprint)
    for direction in (Direction.FORWARD, Direction.WEIGHT_GRADIENT)
]


class _Wrong:
    """A kernel that writes zeros."""

    def __call__(self, first: torch.Tensor, second: torch.Tensor, third: None, out: torch.Tensor) -> None:
        out.zero_()


def test_kernels(pack: Pack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was compiled elsewhere: sources in place of machine code, which run on the CPU."""
    monkeypatch.setattr(cuda_driver, "current_stream", lambda index: 0)
    monkeypatch.setattr(measure, "milliseconds", lambda call, times, device: call() is None or 2.0)
    monkeypatch.setattr(cuda_kernel, "compile_unspilled", lambda source, _: source)
    monkeypatch.setattr(gpu_convolutions, "cases", lambda gpu, shapes, dtypes: KEYS)
    loaded: dict[bytes, Any] = {}

    def load(variant: CudaVariant, code: bytes, index: int) -> Any:
        if code not in loaded:
            folder = tmp_path / str(len(loaded))
            folder.mkdir()
            loaded[code] = emulated_convolutions([variant], [code.decode()], folder)[0]
        return loaded[code]

    monkeypatch.setattr(gpu_convolutions, "load_cubin", load)
    pack.prebuilt = tmp_path / "prebuilt"
    gpu_convolutions.prebuild(pack.prebuilt, KNOWN["h200"], checked=1, timed=1)
    assert gpu_check.run_kernels(pack)
    assert {row["passed"] for row in rows_of(pack.out / "checks.csv")} == {"True"}
    rows = rows_of(pack.out / "convolutions.csv")
    ways = ["torch channels_last", "native channels_last", "torch contiguous", "native contiguous"]
    assert [row["method"] for row in rows[:5]] == ["kernel", *ways]
    assert {row["direction"] for row in rows} == {"forward", "weight_gradient"}
    assert {row["ms"] for row in rows if row["method"] != "kernel"} == {"2.00000"}

    monkeypatch.setattr(gpu_convolutions, "load_cubin", lambda *_: _Wrong())
    kernels = gpu_convolutions.Kernels(KNOWN["h200"], 0, pack.prebuilt)
    assert {result.verdict for result in gpu_convolutions.run_checks(CPU, kernels)} == {"FAILED"}


def test_the_ablation_of_tilings(pack: Pack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = SimpleNamespace(error=lambda kernel: 0.0, run=lambda kernel: None)
    monkeypatch.setattr(gpu_tiling, "ConvBench", lambda *_: bench)
    monkeypatch.setattr(gpu_tiling, "load_cubin", lambda *_: None)
    monkeypatch.setattr(gpu_tiling, "time_pairs", lambda *_, **__: SimpleNamespace(ms=1.0, stock_ms=2.0))
    files = [case.file for case in gpu_tiling.cases()]
    for file in files:
        (tmp_path / file).touch()
    (tmp_path / gpu_tiling.LIST).write_text("\n".join(json.dumps({"file": file, "conflicts": 1.0}) for file in files))
    assert gpu_tiling.measure(pack, tmp_path)
    assert [row["time_over_one_virtual"] for row in rows_of(pack.out / "tiling.csv")] == ["0.500"] * len(files)


def test_what_would_begin_too_late_is_left_out(pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    pack.seconds = 0.0
    assert gpu_steps.run(pack)
    assert gpu_thesis.run(pack)
    assert not pack.out.exists()
    assert "left out, as 0 s are over: resnet18-32-4-fp32" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["steps"]) == gpu_check.NO_GPU
    with pytest.raises(SystemExit):
        gpu_check.main(["speed"])
    assert "no pack is called speed" in capsys.readouterr().err
