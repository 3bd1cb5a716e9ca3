"""Tests the choice between fused norms and torch, made by records of the same shape on the same machine."""

from __future__ import annotations

import logging

import pytest

from hybridpar.errors import KernelError, UsageError
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.choice import Choices, Decision, choose_norm, use_choices
from hybridpar.tvm_kernels.database import Database
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.operation import KernelKey
from hybridpar.tvm_kernels.operations.batch_norm import norm_key
from hybridpar.tvm_kernels.shapes import NormShape
from tests.tvm_kernels.standin import norm_record

SHAPE = NormShape(16, 8, "relu")
KEY = norm_key(SHAPE, 1, cpu_fingerprint())


@pytest.fixture(autouse=True)
def _kernels_that_nobody_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_kernels, "table", lambda: {"norm_forward_relu": None})


def decide(database: Database, key: KernelKey) -> Decision:
    return Choices(database).decide(key)


def test_a_shape_is_a_text() -> None:
    shape = NormShape(100352, 96, "relu6")
    assert NormShape.parse(shape.text) == shape
    for text in ("", "100x96", "100x96 gelu", "0x4 relu", "-1x4 relu", "4x4 relu x"):
        with pytest.raises(UsageError, match="is no shape of a norm"):
            NormShape.parse(text)


def test_a_record_that_wins_is_what_runs() -> None:
    record = norm_record(SHAPE)
    decision = decide(Database("", [record]), KEY)
    assert decision.kernel
    assert decision.record == record


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"ms": 3.0, "stock_ms": 2.0}, "the record says that torch is as fast"),
        ({"ms": 1.97, "stock_ms": 2.0}, "the record says that torch is as fast"),
        ({"threads": 2}, "its record is for 2 thread"),
        ({"device": "another CPU"}, "its record is for another CPU"),
        ({"rows": 32}, "its record is for 32 rows"),
        ({"layout": "contiguous"}, "its record is for contiguous"),
        ({"versions": {"torch": "0.1"}}, "its record is not of norms 2, torch"),
        ({"channels": 16}, "there is no record"),
        ({"activation": "silu"}, "there is no record"),
        ({"dtype": "bfloat16"}, "there is no record"),
    ],
)
def test_anything_else_is_left_to_torch(fields: dict[str, object], why: str) -> None:
    decision = decide(Database("", [norm_record(SHAPE, **fields)]), KEY)
    assert not decision.kernel
    assert why in decision.why


def test_the_newest_measurement_counts() -> None:
    old, new = norm_record(SHAPE, ms=0.1, tuned_at=1.0), norm_record(SHAPE, ms=9.0, tuned_at=2.0)
    assert not decide(Database("", [new, old]), KEY).kernel


def test_kernels_that_are_off_or_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database("", [norm_record(SHAPE)])
    monkeypatch.setattr(norm_kernels, "table", dict)
    assert decide(database, KEY).why.startswith("its kernel cannot be had")
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "off")
    assert decide(database, KEY).why == "HYBRIDPAR_KERNELS is off"


def test_strict_wants_a_record_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "strict")
    with pytest.raises(KernelError, match="no kernel for batch_norm_act 16x8 relu channels_last, 1 thread"):
        decide(Database(), KEY)
    assert not decide(Database("", [norm_record(SHAPE, ms=3.0)]), KEY).kernel, "a record that says torch"
    monkeypatch.setattr(norm_kernels, "table", dict)
    with pytest.raises(KernelError, match="cannot be had"):
        decide(Database("", [norm_record(SHAPE)]), KEY)


def test_a_shape_is_decided_and_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked = []
    inner = Choices.decide
    monkeypatch.setattr(Choices, "decide", lambda *given: asked.append(given) or inner(*given))
    before = use_choices(Choices(Database("", [norm_record(SHAPE)])))
    try:
        with caplog.at_level(logging.INFO):
            assert [choose_norm(16, 8, "relu", 1) for _ in range(3)] == [True] * 3
            assert not choose_norm(16, 8, "relu", 2)
        assert len(asked) == 2
        assert [record.getMessage() for record in caplog.records] == [
            "batch_norm_act 16x8 relu channels_last, 1 thread(s) runs on a tuned kernel (1.000 ms against 2.000 ms)",
            "batch_norm_act 16x8 relu channels_last, 2 thread(s) runs on torch, as its record is for 1 thread(s)",
        ]
        use_choices(Choices(Database()))
        assert not choose_norm(16, 8, "relu", 1), "other records, another decision"
        use_choices(None)
        assert not choose_norm(16, 8, "relu", 1)
    finally:
        use_choices(before)
