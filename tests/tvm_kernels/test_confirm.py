"""Tests that kernels are confirmed once on a CPU without records, and that what goes wrong with it is no error."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybridpar.codegen.cache import wanted
from hybridpar.codegen.compile_pool import Builder, Built
from hybridpar.tvm_kernels import confirm, tune
from hybridpar.tvm_kernels.choice import active_choices, use_choices
from hybridpar.tvm_kernels.confirm import confirm_kernels
from hybridpar.tvm_kernels.database import (
    Database,
    KernelRecord,
    append_records,
    default_database,
    read_database,
    user_database,
)
from hybridpar.tvm_kernels.kernel import TunedKernel, make_kernels
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from hybridpar.tvm_kernels.swap import optimize
from hybridpar.tvm_kernels.tune import search_all
from tests.tvm_kernels.standin import record_of

OTHER = "a CPU that nobody tuned for"
SHAPE = ConvShape.parse("2x16x9x9 k3x3 s1x1 p1x1 d1x1")


def keys_of(device: str) -> list[KernelKey]:
    """Forward and the weight gradient of a convolution."""
    directions = (Direction.FORWARD, Direction.WEIGHT_GRADIENT)
    return [KernelKey(direction, SHAPE, Layout.CHANNELS_LAST, 1, device) for direction in directions]


CONV, WEIGHT = keys_of(cpu_fingerprint())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "cache"))


def test_kernels_are_confirmed_once_and_recorded_for_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(OTHER)
    said = confirm_kernels(dict.fromkeys(keys, 3), default_database(), 60.0)
    found = default_database()
    for key in keys:
        record = found.best(key, current=False)
        assert record is not None, said
        assert (record.device, record.quick) == (OTHER, True)
        assert record.noise is not None
        assert f"kept in {user_database()}" in said
        assert found.best(KernelKey(key.direction, key.shape, key.layout, 1, "another")) is None
    records = [record for record in found.records if record.device == OTHER]
    assert f"confirmed {sum(one.wins for one in records)} of {len(records)} kernels on this CPU in" in said
    monkeypatch.setattr(Builder, "submit", lambda *_: pytest.fail("its machine code is there already"))
    assert all(isinstance(one, TunedKernel) for one in make_kernels(records))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was done before"))
    assert confirm_kernels(dict.fromkeys(keys, 3), found) == ""


def quick_tuner(key: KernelKey, *_: Any, only: Any, **__: Any) -> list[KernelRecord]:
    noise = 0.9 if key.direction is Direction.FORWARD else 0.1
    return [KernelRecord.of(key, only[0], ms=1.0, stock_ms=1.1, error=1e-7, noise=noise, quick=True)]


def test_whatever_comes_out_is_recorded_and_a_tune_searches_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "contents_of", lambda files, _: [Built((), b"")] * len(files))
    file, keys = tmp_path / "k.jsonl", dict.fromkeys([CONV, WEIGHT], 1.0)
    for skipped in (0, 1):
        report = search_all(keys, file, 60.0, quick=True, tuner=quick_tuner)
        assert report.skipped == skipped, "what is too unsteady to be used is not counted as done"
    assert {record.quick for record in read_database(file).records} == {True}
    asked: list[KernelKey] = []

    def tuner(key: KernelKey, *_: object, **__: object) -> list[KernelRecord]:
        asked.append(key)
        return [KernelRecord.of(key, {"tile": 1}, ms=1.0, stock_ms=3.0, error=1e-7, tuned_at=9e9)]

    for _ in range(2):
        search_all(keys, file, 60.0, tuner=tuner)
    assert sorted(asked) == sorted(keys)


def test_only_what_is_not_known_is_missing() -> None:
    own, weight = (record_of(SHAPE, key.direction, Layout.CHANNELS_LAST) for key in (CONV, WEIGHT))

    def missing(*records: Any) -> list[KernelKey]:
        database = Database("", records)
        return [key for key in (CONV, WEIGHT) if confirm._is_missing(key, database)]

    assert missing() == [CONV, WEIGHT]
    assert missing(own) == [WEIGHT]
    assert missing(own.model_copy(update={"ms": 5.0})) == [WEIGHT]
    assert missing(own.model_copy(update={"noise": 9.0})) == [WEIGHT], "what was too unsteady is not tried again"
    assert missing(own.model_copy(update={"versions": {"tvm": "0.1"}}), weight) == [CONV]
    for other in ({"device": "NVIDIA H200 sm_90"}, {"layout": Layout.CONTIGUOUS}):
        assert not confirm._is_missing(replace(CONV, **other), Database())  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["off", "No", " 0"])
def test_who_wants_no_kernels_gets_nothing_confirmed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", mode)
    assert not wanted()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it began"))
    assert confirm_kernels({CONV: 1}, Database()) == ""


def test_without_tvm_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it began"))
    monkeypatch.setattr(confirm, "versions", lambda _: {"tvm": "none"})
    assert confirm_kernels({WEIGHT: 1}, Database()) == ""


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (subprocess.TimeoutExpired("", 1.0), "it took too long and was ended"),
        (OSError("no more processes"), "no more processes"),
        (subprocess.CompletedProcess([], -11, b"", b""), "exit -11"),
        (subprocess.CompletedProcess([], 1, b"", b"first\nno compiler\n"), "no compiler"),
    ],
    ids=["too long", "not begun", "crashed", "failed"],
)
def test_what_goes_wrong_is_a_line(outcome: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def run(*_: object, **__: object) -> Any:
        append_records(user_database(), kept)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    keys = {CONV: 1, WEIGHT: 1}
    assert confirm_kernels(keys, Database()) == f"no kernel could be confirmed on this CPU: {why}"
    kept.append(record_of(SHAPE, Direction.FORWARD, Layout.CHANNELS_LAST))
    said = confirm_kernels(keys, Database())
    assert said.startswith("confirmed 1 of 1 kernels on this CPU in ")
    assert said.endswith(f"; 1 are left to torch: {why}")


def test_optimize_confirms_what_an_example_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[KernelKey] = []

    def confirmed(keys: dict[KernelKey, int], _: Database) -> str:
        asked.extend(keys)
        append_records(user_database(), [record_of(SHAPE, Direction.FORWARD, Layout.CHANNELS_LAST)])
        return "confirmed"

    monkeypatch.setattr("hybridpar.tvm_kernels.swap.confirm_kernels", confirmed)
    before = active_choices()
    try:
        layers = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        example = torch.randn(2, 16, 9, 9).contiguous(memory_format=torch.channels_last)
        optimize(nn.Sequential(*layers), example=example)
        choices = active_choices()
        assert choices is not None
        assert choices.database.best(CONV) is not None
    finally:
        use_choices(before)
    assert {CONV, WEIGHT} == set(asked)
    assert "confirmed" in caplog.text
