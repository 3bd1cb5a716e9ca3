"""What is wrong with a file is told in a few words, whatever it is, and costs little time and memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar.errors import PlanError, UsageError
from hybridpar.formats.file_reader import (
    Unreadable,
    parse_json,
    parse_toml,
    read_json,
    read_text,
    read_torch,
)


def test_no_part_of_an_error_is_long():
    error = UsageError("what " * 9_000, "why " * 9_000, "fix " * 9_000)
    assert len(str(error)) < 6_100


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (parse_json, "{", "not JSON: .*line 1"),
        (parse_json, "1" * 5_000, "too many digits"),
        (parse_json, "[" * 3_000, "not JSON"),
        (parse_json, '{"a": "\\ud800"}', "not JSON: .*surrogates"),
        (parse_json, b"\xff", "not JSON: .*utf-8"),
        (parse_toml, "a = \nb = 1", "not TOML: .*line 1"),
        (parse_toml, "a = 2024-13-41", "not TOML"),
        (parse_toml, "a = " + "[" * 2_000, "not TOML"),
        (parse_toml, ".".join("a" * 20_000) + " = 1", "line has more than"),
    ],
)
def test_a_bad_text_is_told(parse: Any, text: str, said: str):
    with pytest.raises(Unreadable, match=said) as caught:
        parse(text)
    assert len(str(caught.value)) < 300


def test_what_is_written_is_read():
    value = {"seed": 2**64 - 1, "text": "ä😀", "deep": json.loads("[" * 98 + "]" * 98), "no": None, "f": -1.5e300}
    assert parse_json(json.dumps(value)) == value


def test_a_file_is_one_error_of_the_class_that_was_asked_for(tmp_path: Path):
    file = tmp_path / "plan.json"
    for name, said in (
        ("missing", "No such file"),
        (".", "Is a directory"),
        ("a\0b", "null"),
        ("x" * 5_000, "too long"),
    ):
        with pytest.raises(PlanError, match=said) as caught:
            read_json(tmp_path / name, "the plan", PlanError, "Name one.")
        assert len(str(caught.value)) < 400
        assert caught.value.fix == "Name one."
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"the plan .*plan.json: it is not text in UTF-8"):
        read_json(file, "the plan", PlanError)


def test_no_more_of_a_file_is_read_than_it_may_have():
    with pytest.raises(UsageError, match="more than 1,000 bytes"):
        read_text(Path("/dev/zero"), "the text", UsageError, most=1_000)


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def test_what_torch_saves_is_read(tmp_path: Path):
    shared = torch.arange(6.0)
    saved = {
        "net": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict(),
        "views": [shared, shared[2:], shared.view(2, 3).T, torch.ones(()).expand(50), torch.empty(0, 3)],
        "dtypes": [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.uint16, torch.bool, torch.int64)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "plain": [None, 2**70, 1j, {1, 2}, (1, (2, 3)), "ä", b"bytes", bytearray(b"x"), bytearray(), {(1, 2): 3.5}],
        "torch": [torch.Size([1, 2]), torch.device("cpu"), torch.float32],
        "ordered": OrderedDict(a=1),
    }
    torch.save(saved, tmp_path / "file.pt")
    loaded = read_torch(tmp_path / "file.pt")
    assert str(loaded) == str(saved)
    assert loaded["net"]._metadata == saved["net"]._metadata


def test_what_would_run_code_is_refused(tmp_path: Path):
    torch.save({"value": Calls(eval, "1 + 1")}, tmp_path / "file.pt")
    with pytest.raises(Unreadable, match="more than tensors and plain values"):
        read_torch(tmp_path / "file.pt")


def test_other_files_are_refused(tmp_path: Path):
    file = tmp_path / "file.pt"
    torch.save([1, 2], file)
    with pytest.raises(Unreadable, match="a list where a dictionary"):
        read_torch(file)
    for content in (b"", b"\x80\x02}.", b"PK\x03\x04" + bytes(100)):
        file.write_bytes(content)
        with pytest.raises(Unreadable):
            read_torch(file)
    with pytest.raises(Unreadable, match="no regular file"):
        read_torch(Path("/dev/zero"))
