"""Tests the tuning records that come with the package: how they are selected, their size, and the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import pytest

from hybridpar.tvm_kernels.database import (
    append_records,
    parse_records,
    read_database,
)
from hybridpar.tvm_kernels.shapes import Direction, Layout
from hybridpar.tvm_kernels.space import reject
from scripts.package_kernels import MOST_BYTES, distill, main, short_line
from tests.tvm_kernels.standin import record_of

ROOT = Path(__file__).parents[2]
SHAPES = [f"{batch}x16x9x9 k3x3 s1x1 p1x1 d1x1" for batch in (1, 2, 4)]
OWN = {"lanes": 8, "tile_rows": 1, "tile_columns": 3, "strip": 9, "columns_outer": 0, "unroll": 1, "stream": 0}


def records(ms: float, **fields):
    return [
        record_of(shape, Direction.FORWARD, Layout.CHANNELS_LAST, parameters=OWN, ms=ms, stock_ms=2.0 + place, **fields)
        for place, shape in enumerate(SHAPES)
    ]


def test_a_short_line_says_the_same(tmp_path):
    (record, *_) = records(1.23456, noise=0.123456, tuned_at=12.3)
    (tmp_path / "k.jsonl").write_text(short_line(record) + "\n")
    (read,) = read_database(tmp_path / "k.jsonl").records
    assert read == record.model_copy(update={"ms": 1.235, "noise": 0.12, "tuned_at": 12.0})
    assert len(short_line(record)) < 0.9 * len(record.line())


@pytest.mark.parametrize(
    "useless",
    [
        {"ms": 9.0},
        {"parameters": {"lanes": 7}},
    ],
)
def test_what_nobody_would_run_is_left_out(tmp_path, useless):
    record = record_of(SHAPES[0], Direction.FORWARD, Layout.CHANNELS_LAST, **{"parameters": OWN, **useless})
    append_records(tmp_path / "k.jsonl", [record])
    assert distill([tmp_path / "k.jsonl"]) == []


def test_the_packaged_database_is_small_and_sound():
    packaged = resources.files("hybridpar.tvm_kernels").joinpath("kernels.jsonl")
    text = packaged.read_text("utf-8")
    assert len(text.encode()) <= MOST_BYTES
    read = parse_records(text)
    assert read.damaged == 0
    assert len(read) == len(text.splitlines())
    for record in read.records:
        assert reject(record.key, record.parameters) is None
        assert record.wins


def test_the_script_writes_what_it_says(tmp_path, monkeypatch):
    append_records(tmp_path / "k.jsonl", records(1.0))
    monkeypatch.setattr(sys, "argv", ["package_kernels", str(tmp_path / "k.jsonl"), "-o", str(tmp_path / "out")])
    for _ in range(2):  # the second time it reads its own output too
        assert main() == 0
        assert read_database(tmp_path / "out").records == records(1.0)


def test_the_wheel_has_it(tmp_path):
    pytest.importorskip("setuptools")
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "hybridpar"):
        (source / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=source, check=True, capture_output=True, text=True
    )
    wheel = tmp_path / done.stdout.split()[-1]
    assert "hybridpar/tvm_kernels/kernels.jsonl" in zipfile.ZipFile(wheel).namelist()
