"""Tests that a new operation needs one class to be searched, checked, recorded and chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.tvm_kernels import operation
from hybridpar.tvm_kernels.choice import Choices
from hybridpar.tvm_kernels.database import Database, read_database
from hybridpar.tvm_kernels.machine import cpu_fingerprint
from hybridpar.tvm_kernels.measure import Bench, Timing, relative_error
from hybridpar.tvm_kernels.operation import KernelKey, Operation, operation_of, operations, register_operation
from hybridpar.tvm_kernels.search import search_all
from hybridpar.tvm_kernels.shapes import Layout
from hybridpar.tvm_kernels.table import rows_of, summary_lines


@dataclass(frozen=True, order=True)
class Matrix:
    """Its sizes."""

    rows: int
    columns: int

    @property
    def text(self) -> str:
        return f"{self.rows}x{self.columns}"

    @classmethod
    def parse(cls, text: str) -> Matrix:
        return cls(*map(int, text.split("x")))

    def unlike(self, other: Matrix) -> str | None:
        return "" if self == other else None

    def distance(self, other: Matrix) -> float:
        return abs(self.rows - other.rows)


KEY = KernelKey("sums", Matrix(64, 8), Layout.CONTIGUOUS, 1, cpu_fingerprint(), op="column_sums")


class SumsBench(Bench):
    """Sums of the columns of a matrix."""

    def __init__(self, shape: Matrix, seed: int) -> None:
        self.x = torch.randn(shape.rows, shape.columns, generator=torch.Generator().manual_seed(seed))

    def run(self, kernel: Callable[[Tensor], Tensor]) -> Tensor:
        return kernel(self.x)

    @property
    def instead(self) -> Callable[[], object]:
        return self._torch

    def _torch(self) -> Tensor:
        return self.x.sum(0)

    def errors(self, kernel: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        true = self.x.double().sum(0)
        return relative_error(kernel(self.x), true), relative_error(self._torch(), true)


class ColumnSums(Operation):
    """With one right way to do it and a wrong one."""

    name = "column_sums"
    shape = Matrix
    limits: ClassVar[Mapping[str, float]] = {"sums": 1e-5}

    def reject(self, key: KernelKey, parameters: Mapping[str, int]) -> str | None:
        return None if parameters.keys() == {"way"} else "the parameter is way"

    def space(self, key: KernelKey) -> list[dict[str, int]]:
        return [{"way": way} for way in (0, 1)]

    def load(self, key: KernelKey, parameters: Mapping[str, int], *_: Any) -> Any:
        ways = (lambda x: x.mean(0)), (lambda x: torch.ones(len(x)) @ x)
        return ways[parameters["way"]]

    def bench(self, key: KernelKey, seed: int) -> SumsBench:
        return SumsBench(key.shape, seed)

    def weight(self, key: KernelKey) -> float:
        return float(key.shape.rows)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "_OPERATIONS", dict(operations()))
    register_operation(ColumnSums)


def test_a_new_operation_is_searched_checked_recorded_and_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Bench, "compare", lambda *_: Timing(1.0, 2.0, 2.0, 5))
    report = search_all([KEY], tmp_path / "k.jsonl", 5.0)
    assert (report.tuned, report.empty) == (1, 0)
    assert "a kernel of sums 64x8 {'way': 0} is wrong" in caplog.text
    database = read_database(tmp_path / "k.jsonl")
    (record,) = database.records
    assert (record.key, record.parameters) == (KEY, {"way": 1})  # type: ignore[attr-defined]
    decision = Choices(database).decide(KEY)
    assert decision.text == f"{KEY.text} runs on a tuned kernel (1.000 ms against 2.000 ms)"
    x = torch.randn(64, 8)
    torch.testing.assert_close(decision.kernel(x), x.sum(0))
    assert summary_lines(rows_of(database)) == ["sums: 1 of 1 tuned, 2.00x torch as chosen (geometric mean)"]
    assert search_all([KEY], tmp_path / "k.jsonl", 5.0).skipped == 1


def test_a_name_is_taken_once_for_each_target() -> None:
    with pytest.raises(ValueError, match="'column_sums' is registered twice for cpu"):
        register_operation(ColumnSums)


def test_what_there_is_no_operation_for_runs_on_torch() -> None:
    there = KernelKey("sums", KEY.shape, KEY.layout, 1, "NVIDIA H100 80GB HBM3 sm_90", op="column_sums")
    with pytest.raises(KernelsUnavailable, match="there are no kernels of column_sums for NVIDIA H100"):
        operation_of(there)
    assert "there are no kernels of column_sums" in Choices(Database()).decide(there).why
