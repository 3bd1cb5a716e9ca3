"""Tests `hybridpar tune`: which shapes it searches, what it keeps when interrupted, and wrong requests."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from hybridpar.cli import main
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.commands.tune import TuneRequest, find_work
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.machine.process import available_cores, threads_per_worker
from hybridpar.partition.profile_cache import profile_key
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import find_units
from hybridpar.planner.resolve import resolve
from hybridpar.run.kernel_use import prepare_kernels
from hybridpar.tvm_kernels import choice, machine, optimize, tune
from hybridpar.tvm_kernels.database import Database
from hybridpar.tvm_kernels.machine import Machine
from hybridpar.tvm_kernels.shapes import Direction, Layout
from tests.small_nets import separable
from tests.tvm_kernels.standin import all_records
from tests.tvm_kernels.test_tune import Tuner

SHAPE = "2x8x9x9 k3x3 s1x1 p1x1 d1x1"


@pytest.fixture
def call(tmp_path, capsys, monkeypatch):
    """Run the command in this process, in an empty directory, with a tuner that finds candidates at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    tuner = Tuner()
    monkeypatch.setattr(tune.search_all, "__kwdefaults__", {**tune.search_all.__kwdefaults__, "tuner": tuner})

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(["tune", *arguments, *(() if "--show" in arguments else ("--no-tune-process",))])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    run.tuner = tuner
    return run


def test_shapes_are_tuned_shown_and_skipped_the_next_time(call):
    options = ("--shape", SHAPE, "--threads", "1", "-o", "k.jsonl")
    code, table, said = call(*options)
    assert code == 0
    assert table.count(SHAPE) == 3
    assert "3.00x" in table
    assert "forward: 1 of 1 tuned, 3.00x torch as chosen" in table
    assert "3 searches done, 0 were done before" in said
    code, _, said = call(*options)
    assert (code, len(call.tuner.asked)) == (0, 3)
    assert "0 searches done, 3 were done before" in said
    code, table, _ = call("--show", "k.jsonl")
    assert code == 0
    assert all(str(direction) in table for direction in Direction)


def test_a_models_convolutions_are_tuned_once_for_each_shape(call):
    code, table, _ = call(
        *("mobilenet_v2", "--data", "synthetic:samples=64", "--image-size", "64", "--batch-size", "2"),
        *("--nproc", "1", "--threads", "1", "-o", "k.jsonl"),
    )
    assert code == 0
    assert len(call.tuner.asked) == len(set(call.tuner.asked)) == 30
    assert "2x32x32x32 k3x3 s1x1 p1x1 d1x1" in table


def test_what_training_asks_for_is_what_is_tuned(monkeypatch):
    workers = 2
    options: dict[str, Any] = {"nproc": workers, "micro_batches": 2, "batch_size": 32, "image_size": 8}
    options["data"] = "synthetic:samples=64"
    work = find_work(TuneRequest(model="tests.small_nets:separable", **options))
    run = TrainConfig(kernels="auto", **options)

    class _World:
        size, device = workers, torch.device("cpu")

    asked, decide = [], choice.Choices.decide
    monkeypatch.setattr(choice.Choices, "decide", lambda choices, key: asked.append(key) or decide(choices, key))
    monkeypatch.setattr(choice, "_active", choice.Choices(Database(), None))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_per_worker(workers, available_cores()))
    try:
        plan, world = resolve(run, workers), _World()
        use = prepare_kernels(optimize(separable(), Database()), run, plan, world, (3, 8, 8))  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    assert use is not None
    assert set(asked) == set(work)
    assert len(work) == 6
    assert {key.layout for key in work} == {Layout.CHANNELS_LAST}


def test_ctrl_c_keeps_what_there_is(call):
    call.tuner.stop_at = 3
    code, table, said = call("--shape", SHAPE, "--threads", "1", "-o", "k.jsonl")
    assert code == 130
    assert table.count(SHAPE) == 2
    assert "1 left: the same command goes on" in said


def test_without_a_compiler_it_says_so(call, monkeypatch):
    def nothing(*_: object, **__: object) -> None:
        raise KernelsUnavailable("apache-tvm is not installed")

    monkeypatch.setattr(tune, "search_all", nothing)
    code, _, error = call("--shape", SHAPE, "-o", "k.jsonl")
    assert code == 1
    assert "apache-tvm is not installed" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], ["nothing to tune"]),
        (["mobilenet_v2", "--shape", SHAPE], ["exclude each other"]),
        (["--show", "no_database"], ["no_database is not a kernel database"]),
        (["--shape", "no shape"], ["'no shape' is not a shape"]),
        (["--shape", SHAPE, "--budget", "1s"], ["too short to try one candidate", "--budget"]),
        (["--shape", SHAPE, "--budget", "soon"], ["'soon' is not a time", "10m"]),
        (["--shape", SHAPE, "-o", "no/where.jsonl"], ["there is no directory"]),
        (["--shape", SHAPE, "-o", "no_database"], ["is not a kernel database", "or a new one for"]),
        (["--shape", SHAPE, "--memory-format", "contiguous"], ["--memory-format contiguous with --target cpu"]),
        (["vgg11"], ["vgg11 has no depthwise convolution", "mobilenet_v2"]),
        (["mobilenet_v2", "--data", "cifer10"], ["unknown data set 'cifer10'"]),
        (["mobilenet_v2", "--amp", "fp16"], ["--amp fp16 with --target cpu"]),
    ],
)
def test_wrong_requests_exit_with_2(call, tmp_path, arguments, said):
    (tmp_path / "no_database").write_text("no shape\n")
    code, _, error = call(*arguments)
    assert code == 2
    assert "Traceback" not in error
    for part in said:
        assert part in error
    assert not call.tuner.asked


def test_bf16_is_tuned_where_the_cpu_has_instructions_for_it(monkeypatch):
    request = TuneRequest(shape=(SHAPE,), amp="bf16")
    monkeypatch.setattr(machine, "this_machine", lambda: Machine(16, 32))
    with pytest.raises(UsageError, match="AVX512_BF16"):
        find_work(request)
    monkeypatch.setattr(machine, "this_machine", lambda: Machine(16, 32, bfloat16=True))
    assert {key.dtype for key in find_work(request)} == {"bfloat16"}


def test_times_of_a_profile_are_told_apart_by_kernels(monkeypatch):
    x, keys = torch.randn(2, 3, 8, 8), []
    monkeypatch.setattr(choice, "_active", None)
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")
    for records in (None, [], all_records(SHAPE)):
        model = separable() if records is None else optimize(separable(), Database("", records))
        keys.append(profile_key(find_units(trace_model(model, (x,)), (x,)), (x,), 1, 2))
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == 3
