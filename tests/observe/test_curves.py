"""Tests the curves of a page: few points, nothing that sticks out is lost, and all runs in one chart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.observe.curves import bucketed, charts_of
from hybridpar.observe.metrics import MetricsWriter, read_metrics


@given(st.integers(1, 500), st.integers(1, 60), st.integers(0, 2**32 - 1), st.booleans())
def test_a_point_has_the_range_of_its_steps(count, points, seed, noisy):
    values = np.random.default_rng(seed).standard_normal(count)
    steps = np.arange(1.0, count + 1)
    line = bucketed(steps, steps / 10, values, points, noisy=noisy)
    assert len(line["x"]) == len(line["t"]) == len(line["y"]) == min(points, count)
    assert line["x"] == sorted(set(line["x"]))
    if count > points:
        assert min(line["lo"]) == pytest.approx(values.min(), rel=1e-4)
        assert max(line["hi"]) == pytest.approx(values.max(), rel=1e-4)
        assert all(low <= high for low, high in zip(line["lo"], line["hi"], strict=True))
    else:
        assert "hi" not in line
        assert line["lo" if noisy else "y"] == pytest.approx(values, rel=1e-4)


def test_charts_have_the_lines_of_all_runs_and_nothing_that_was_not_recorded(tmp_path, make_step, make_epoch):
    for name, norm in (("a", 4.0), ("b", None)):
        with MetricsWriter(tmp_path / name) as writer:
            for step in range(1, 11):
                writer.write_step(make_step(step, residual_norm=norm if step == 5 else None, skipped=step == 7))
            writer.write_epoch(make_epoch(0, test_loss=None))
    charts = {chart["key"]: chart for chart in charts_of([read_metrics(tmp_path / name) for name in "ab"])}
    assert list(charts) == ["loss", "accuracy", "lr", "step", "residual"]
    assert [(line["run"], line["name"]) for line in charts["loss"]["lines"]] == [(0, "train"), (1, "train")]
    assert charts["loss"]["marks"] == [[7], [7]]
    assert [(line["run"], line["x"], line["y"]) for line in charts["residual"]["lines"]] == [(0, [5], [4.0])]
    (first, _) = charts["accuracy"]["lines"]
    assert (first["x"], first["t"], first["y"]) == ([10], [0.2], [87.5])
