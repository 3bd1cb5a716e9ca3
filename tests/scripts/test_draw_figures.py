"""The figures of the documents show what committed rows and records, and the simulation, say today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import draw_figures

IMAGES = draw_figures.IMAGES


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", draw_figures.FIGURES)
def test_the_docs_have_the_figure_of_todays_rows(name, tmp_path, monkeypatch):
    monkeypatch.setattr(draw_figures, "IMAGES", tmp_path)
    draw_figures.FIGURES[name]()
    drawn = texts(tmp_path / f"{name}.svg")
    assert len(drawn) > 10
    assert drawn == texts(IMAGES / f"{name}.svg")
