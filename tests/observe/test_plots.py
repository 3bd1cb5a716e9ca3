"""Tests the plot of a run's metrics, also of runs that are short, odd or incomplete."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.observe.metrics import MetricsWriter
from hybridpar.observe.plots import draw_loss, running_mean

figures = pytest.importorskip("matplotlib.figure")
image = pytest.importorskip("matplotlib.image")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved while the test runs."""
    saved = []
    save = figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *a, **k: (saved.append(self), save(self, *a, **k))[1])
    return saved


def write(run_dir, make_step, make_epoch, losses, accuracies=()):
    with MetricsWriter(run_dir) as writer:
        for step, loss in enumerate(losses, start=1):
            writer.write_step(make_step(step, loss=loss, skipped=math.isnan(loss)))
        for epoch, accuracy in enumerate(accuracies):
            writer.write_epoch(make_epoch(epoch, test_accuracy=accuracy))


def test_the_picture_shows_what_the_metrics_say(tmp_path, make_step, make_epoch, info, drawn):
    losses = [2 / (1 + step / 10) for step in range(60)]
    losses[20] = losses[41] = math.nan
    write(tmp_path, make_step, make_epoch, losses, [0.5, 0.8, 0.7])
    assert draw_loss(tmp_path, info) == tmp_path / "loss.png"
    pixels = image.imread(tmp_path / "loss.png")
    assert pixels.shape[:2] == (630, 900)
    assert pixels[..., :3].std() > 0.05
    (figure,) = drawn
    upper, lower = figure.axes[:2]
    lines = {line.get_label(): line for line in upper.lines}
    np.testing.assert_array_equal(lines["each step"].get_ydata(), losses)
    assert np.isfinite(lines["running mean"].get_ydata()).all()
    assert lines["skipped (2)"].get_xdata().tolist() == [21, 42]
    assert lower.lines[0].get_xdata().tolist() == [10, 20, 30]
    assert lower.lines[0].get_ydata() == pytest.approx([50, 80, 70])
    assert "best 80.00%, last 70.00%" in [text.get_text() for text in lower.texts]
    assert upper.get_title(loc="left") == "resnet18 on cifar10, 2 workers"
    assert [axes.get_ylabel() for axes in figure.axes] == ["training loss", "test accuracy", "learning rate"]


@pytest.mark.parametrize(
    ("losses", "accuracies"),
    [
        ([1.0], []),
        ([math.nan, math.nan], [None]),
        ([math.nan, math.inf, 1e30, 2.0], [0.0]),
        ([0.0, 0.0, 0.0], [1.0, 1.0]),
        ([-1.0, -2.0], [0.5] * 60),
    ],
)
def test_every_odd_run_gives_a_picture(tmp_path, make_step, make_epoch, losses, accuracies, recwarn):
    write(tmp_path, make_step, make_epoch, losses, accuracies)
    assert draw_loss(tmp_path) == tmp_path / "loss.png"
    assert image.imread(tmp_path / "loss.png").shape[:2] == (630, 900)
    assert [str(warning.message) for warning in recwarn] == []


def test_without_matplotlib_there_is_one_line_and_no_picture(tmp_path, make_step, make_epoch, monkeypatch, capsys):
    write(tmp_path, make_step, make_epoch, [1.0])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert draw_loss(tmp_path) is None
    assert capsys.readouterr().out == "loss.png needs matplotlib: pip install 'hybridpar[plots]'\n"
    assert not (tmp_path / "loss.png").exists()


@given(st.lists(st.floats(-100, 100) | st.just(math.nan), min_size=1, max_size=30), st.integers(1, 12))
def test_running_mean_is_the_mean_of_what_the_window_holds(values, window):
    smooth = running_mean(np.array(values), window)
    half = window // 2
    for index, value in enumerate(smooth):
        present = [x for x in values[max(index - half, 0) : index + half + 1] if not math.isnan(x)]
        assert value == pytest.approx(sum(present) / len(present), abs=1e-9) if present else math.isnan(value)
