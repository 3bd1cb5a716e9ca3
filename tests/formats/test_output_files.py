"""Files that cannot be written, and pictures without a format, are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridpar.errors import UsageError
from hybridpar.formats.output_files import check_picture, check_writable


def test_what_cannot_be_written_is_refused(tmp_path):
    check_writable("--output", tmp_path / "file")
    for path, said in ((tmp_path / "nowhere" / "file", "there is no directory"), (tmp_path, "is a directory")):
        with pytest.raises(UsageError, match=f"--output {path}.*{said}"):
            check_writable("--output", path)


def test_a_picture_has_a_format():
    check_picture("--draw", Path("plan.svg"))
    with pytest.raises(UsageError, match=r"--draw plan\.txt") as caught:
        check_picture("--draw", Path("plan.txt"))
    assert "plan.svg" in caught.value.fix
