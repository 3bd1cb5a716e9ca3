"""The picture of the scaling curve can be read, whatever its range."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from hybridpar.planner.scaling import draw_curve, k_hat, scaling_curve
from tests.planner.small import inputs


@pytest.mark.parametrize("factor", [1.05, 1.3, 5.0, 100.0, 1e5])
def test_a_few_times_are_named_around_those_that_are_drawn(monkeypatch, tmp_path, factor):
    asked = inputs()
    first, last = scaling_curve(asked)
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: drawn.append(figure))
    assert last.step_ms is not None
    draw_curve([replace(first, plain_ms=factor * last.step_ms), last], k_hat(asked), "", tmp_path / "x.svg")
    (figure,) = drawn
    figure.draw_without_rendering()
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    named = [
        tick
        for tick, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        if low <= tick <= high and label.get_text()
    ]
    assert 2 <= len(named) <= 20
    assert not any(label.get_text() for label in axes.get_yticklabels(minor=True))


def test_it_is_written(tmp_path: Path):
    asked = inputs()
    draw_curve(scaling_curve(asked), k_hat(asked), "a model", tmp_path / "x.svg")
    assert "<svg" in (tmp_path / "x.svg").read_text()
