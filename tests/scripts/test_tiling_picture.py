"""The picture of two-level tiling in the docs is what the schedules' numbers give."""

from __future__ import annotations

import textwrap
from pathlib import Path

from scripts.tiling_picture import picture


def test_the_docs_have_the_picture_of_these_schedules() -> None:
    assert textwrap.indent(picture(), "    ") in (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
