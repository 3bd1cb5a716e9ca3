"""Tests the database of tuning records: nothing is lost in it, and damaged lines do no harm."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
from pathlib import Path

import pytest

from hybridpar.errors import UsageError
from hybridpar.tvm_kernels import database as module
from hybridpar.tvm_kernels.database import (
    Database,
    append_records,
    default_database,
    read_database,
    user_database,
)
from hybridpar.tvm_kernels.shapes import Direction, Layout
from tests.tvm_kernels.standin import all_records, record_of

SHAPE = "8x96x56x56 k3x3 s1x1 p1x1 d1x1"
ONE = record_of(SHAPE, Direction.FORWARD, Layout.CHANNELS_LAST)


def test_what_was_written_is_read(tmp_path):
    records = all_records(SHAPE, stock_ms=1.5)
    append_records(tmp_path / "k.jsonl", records[:2])
    append_records(tmp_path / "k.jsonl", records[2:])
    read = read_database(tmp_path / "k.jsonl")
    assert read.records == records
    assert read.damaged == 0
    assert set(read) == {record.key for record in records}


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_that_was_cut_off_loses_itself_alone(tmp_path, cut):
    file = tmp_path / "k.jsonl"
    records = all_records(SHAPE)
    append_records(file, records[:3])
    file.write_bytes(file.read_bytes()[:-cut])
    append_records(file, records[3:])
    lost = 0 if cut == 1 else 1  # the end of a line alone is put back
    read = read_database(file)
    assert read.records == [*records[: 3 - lost], *records[3:]]
    assert read.damaged == lost


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00garbage",
        b"[1, 2, 3]",
        b"[" * 100_000,
        ONE.line().replace('"forward"', '"sideways"').encode(),
        ONE.line().replace(SHAPE, "8x96x2x2 k31x31 s1x1 p1x1 d1x1").encode(),
        ONE.line().replace('"ms": 1.0', '"ms": -1.0').encode(),
        ONE.line().replace('"tile": 2', '"tile": [2]').encode(),
        ONE.line().replace('"threads": 1', '"threads": 0').encode(),
    ],
)
def test_garbage_is_counted(tmp_path, line, caplog):
    file = tmp_path / "k.jsonl"
    append_records(file, [ONE])
    with file.open("ab") as out:
        out.write(b"\n\n" + line + b"\n")
    append_records(file, all_records(SHAPE))
    with caplog.at_level(logging.WARNING):
        read = read_database(file)
    assert (len(read), read.damaged) == (6, 1)
    assert f"{file}: 1 line(s) are no records" in caplog.text


def test_times_of_other_versions_are_not_believed(tmp_path, caplog):
    old = ONE.model_copy(update={"versions": dict(ONE.versions) | {"tvm": "0.1"}})
    append_records(tmp_path / "k.jsonl", [old])
    read = read_database(tmp_path / "k.jsonl")
    assert read.best(ONE.key) is None
    assert read.best(ONE.key, current=False) == old
    assert "tvm" in caplog.text
    assert "tune again" in caplog.text


def test_the_newest_search_counts_and_in_it_the_fastest():
    records = [ONE.model_copy(update={"tuned_at": at, "ms": ms}) for at, ms in ((1, 0.1), (2, 0.9), (2, 0.8), (1, 0.2))]
    best = Database("", records).best(ONE.key)
    assert best is not None
    assert (best.tuned_at, best.ms) == (2, 0.8)


@pytest.mark.parametrize("content", [None, b"no database\n", b"\x80\x02junk"])
def test_a_file_that_is_none_is_named(tmp_path, content):
    file = tmp_path / "k.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match="hybridpar tune") as caught:
        read_database(file)
    assert str(file) in caught.value.what


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write .*k\.jsonl: "):
        append_records(tmp_path / "file" / "k.jsonl", [ONE])


def _write(file: Path, writer: int, ready: multiprocessing.synchronize.Barrier) -> None:
    ready.wait()
    for number in range(50):
        append_records(file, [ONE.model_copy(update={"device": f"{writer}", "tuned_at": float(number)})])


def test_two_writers_mix_whole_lines(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(2)
    writers = [context.Process(target=_write, args=(tmp_path / "k.jsonl", one, ready)) for one in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    read = read_database(tmp_path / "k.jsonl")
    assert read.damaged == 0
    for writer in "01":
        assert [one.tuned_at for one in read.records if one.device == writer] == list(range(50))


def test_what_was_tuned_here_comes_before_what_is_packaged(monkeypatch, tmp_path):
    packaged = ONE.model_copy(update={"ms": 0.1, "tuned_at": 5.0})
    (tmp_path / "kernels.jsonl").write_text(packaged.line() + "\n")
    monkeypatch.setattr(module.importlib.resources, "files", lambda package: tmp_path)
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "cache"))
    best = default_database().best(ONE.key)
    assert best is not None
    assert best.ms == 0.1
    append_records(user_database(), [ONE.model_copy(update={"tuned_at": 1.0})])
    best = default_database().best(ONE.key)
    assert best is not None
    assert best.ms == 1.0


def test_a_damaged_database_of_the_user_costs_one_line(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path))
    user_database().write_text("broken\n")
    assert isinstance(default_database(), Database)
    assert "is not a kernel database" in caplog.text


# ----------------------------------------------------------------------------------------------- the one rule


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"error": 3e-2}, "its error is 3.0e-02, and at most"),
        ({"error": 3e-3, "stock_error": 1e-5}, "its error is 3.0e-03"),
        ({"error": math.nan}, "its error is nan"),
        ({"error": None}, "its error is unknown"),
        ({"noise": 1.04}, "its measurements lay 104 % apart, within which lies its gain of 2.00x"),
        ({"noise": 0.96, "ms": 3.0}, "its measurements lay 96 % apart, and at most 25 %"),
        ({"noise": math.nan}, "its measurements lay nan % apart"),
    ],
    ids=str,
)
def test_a_record_that_is_wrong_or_unsteady_is_not_used(tmp_path, caplog, fields, why):
    record = ONE
    doubtful = record.model_copy(update={**fields, "tuned_at": 5.0})
    assert why in doubtful.doubt
    assert record.wins
    assert not doubtful.wins
    database = Database("", [])
    database.add([doubtful])
    assert database.best(record.key) is None
    database.add([record])
    assert database.best(record.key) == record, "an older one that is right"
    append_records(tmp_path / "k.jsonl", [doubtful])
    # A line whose error is no number is a damaged one, and such a file is none.
    with caplog.at_level(logging.WARNING), contextlib.suppress(UsageError):
        assert read_database(tmp_path / "k.jsonl").best(record.key) is None
        assert len(caplog.records) == 1


def test_a_record_promises_the_lower_end_of_its_gain():
    fields = {"ms": 1.0, "stock_ms": 3.0, "noise": 0.5}
    assert ONE.model_copy(update=fields).saved_ms == pytest.approx(1.0)
    assert ONE.model_copy(update={**fields, "noise": None}).saved_ms == pytest.approx(2.0)
    within = ONE.model_copy(update={**fields, "stock_ms": 1.1, "noise": 0.2})
    assert (within.saved_ms, within.wins, within.doubt) == (0.0, False, ""), "a gain within the noise is none"


def test_a_kernel_may_be_as_far_off_as_torch_is_there():
    assert ONE.model_copy(update={"error": 3e-5}).doubt
    assert not ONE.model_copy(update={"error": 3e-5, "stock_error": 1e-5}).doubt
    assert not ONE.model_copy(update={"error": 8e-4, "stock_error": 8e-4}).doubt
    half = ONE.model_copy(update={"error": 3e-3, "dtype": "bfloat16"})
    assert not half.doubt, "its last rounding alone is that far off"
    assert not record_of(SHAPE, Direction.WEIGHT_GRADIENT, Layout.CONTIGUOUS, error=5e-5).doubt
