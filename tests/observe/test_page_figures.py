"""Tests the figures of the report page: what is drawn is what was recorded, few points of it, of all runs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.observe.metrics import MetricsWriter, read_metrics
from hybridpar.observe.page_figures import curves, parts_of_steps, step_on_lanes, thinned
from hybridpar.observe.plots import running_mean
from tests.observe.timelines import a_timeline


@given(st.integers(1, 500), st.integers(2, 60), st.integers(0, 2**32 - 1))
def test_thinned_values_have_the_least_and_the_largest_of_each_stretch(count, points, seed):
    values = np.random.default_rng(seed).standard_normal(count)
    index = thinned(values, points)
    assert 1 <= len(index) <= points
    assert index.tolist() == sorted(set(index.tolist()))
    assert {values.argmin(), values.argmax()} <= set(index.tolist())
    if count <= points:
        assert index.tolist() == list(range(count))


def record(folder, make_step, make_epoch, losses, **fields):
    with MetricsWriter(folder) as writer:
        for step, loss in enumerate(losses, start=1):
            writer.write_step(make_step(step, loss=loss, skipped=math.isnan(loss), **fields))
        writer.write_epoch(make_epoch(0, test_loss=None))
    return read_metrics(folder)


def titles_of(figure):
    return {axis.text: number for number, axis in enumerate(figure.layout.annotations, start=1)}


def traces_of(figure, title):
    number = titles_of(figure)[title]
    return [trace for trace in figure.data if trace.yaxis == f"y{number if number > 1 else ''}"]


def test_curves_are_what_was_recorded_by_step_and_by_time(tmp_path, make_step, make_epoch):
    losses = [3.0, 2.0, math.nan, 1.5, 1.0]
    figure = curves(["run"], [record(tmp_path, make_step, make_epoch, losses)])
    assert list(titles_of(figure)) == ["Loss", "Test accuracy (%)", "Learning rate", "Time of a step (ms)"]
    mean, each, skipped = traces_of(figure, "Loss")
    assert list(each.x) == [1, 2, 4, 5]
    assert list(each.y) == [3.0, 2.0, 1.5, 1.0]
    np.testing.assert_allclose(mean.y, running_mean(np.array([3.0, 2.0, 1.5, 1.0]), 5), rtol=1e-4)
    assert (list(skipped.x), skipped.mode, skipped.marker.symbol) == ([3], "markers", "x")
    (accuracy,) = traces_of(figure, "Test accuracy (%)")
    assert (list(accuracy.x), list(accuracy.y)) == ([10], [87.5])
    steps, seconds = (button.args[0]["x"] for button in figure.layout.updatemenus[0].buttons)
    assert [list(x) for x in steps] == [list(trace.x) for trace in figure.data]
    assert list(seconds[list(figure.data).index(each)]) == pytest.approx([0.02, 0.04, 0.08, 0.1])


def test_all_curves_are_zoomed_together_and_the_loss_can_be_logarithmic(tmp_path, make_step, make_epoch):
    figure = curves(["run"], [record(tmp_path, make_step, make_epoch, [2.0, 1.0])])
    axes = [figure.layout[name] for name in figure.layout if name.startswith("xaxis")]
    assert len(axes) == 4
    assert len({axis.matches for axis in axes} - {None}) == 1
    assert [button.args[0] for button in figure.layout.updatemenus[1].buttons] == [
        {"yaxis.type": "linear"},
        {"yaxis.type": "log"},
    ]


def test_each_run_has_one_legend_entry_and_its_look(tmp_path, make_step, make_epoch):
    names = [f"<b>{number}" for number in range(10)]
    norms = [4.0 if number == 3 else None for number in range(10)]
    tables = [
        record(tmp_path / str(number), make_step, make_epoch, [2.0, 1.0], residual_norm=norm)
        for number, norm in enumerate(norms)
    ]
    figure = curves(names, tables)
    entries = [trace for trace in figure.data if trace.showlegend]
    assert [trace.name for trace in entries] == [f"&lt;b&gt;{number}" for number in range(10)]
    assert len({(trace.line.color, trace.line.dash) for trace in entries}) == 10
    assert len({trace.legendgroup for trace in entries}) == 10
    residual = traces_of(figure, "Residual norm: not sent yet")
    assert {trace.legendgroup for trace in residual} == {entries[3].legendgroup}


def test_a_run_without_steps_has_no_curves_and_no_bar(tmp_path):
    assert curves(["run"], [read_metrics(tmp_path)]) is None
    empty = {"step_ms_median": None}
    assert parts_of_steps(["run"], [empty]) is None


def test_parts_of_a_step_are_stacked_in_a_bar_per_run():
    summary = {"workers": 2, "step_ms_median": 20.0, "compute_ms": 15.0, "exposed_sync_ms": 3.0, "data_ms": 1.0}
    figure = parts_of_steps(["a", "<b>"], [summary, summary | {"data_ms": None}])
    assert figure.layout.barmode == "stack"
    assert {bar.name: list(zip(bar.y, bar.x, strict=True)) for bar in figure.data} == {
        "compute": [("a", 15.0), ("&lt;b&gt;", 15.0)],
        "exposed sync": [("a", 3.0), ("&lt;b&gt;", 3.0)],
        "waiting for data": [("a", 1.0)],
        "other": [("a", 1.0), ("&lt;b&gt;", 2.0)],
    }
    assert figure.data[0].text[0] == "15.00 ms, 75%"


def test_a_step_has_its_prediction_above_it_and_every_action_in_place():
    timeline = a_timeline()
    figure = step_on_lanes(timeline)
    step = timeline.typical_step()
    titles = [title.text for title in figure.layout.annotations]
    assert [title.split(":")[0] for title in titles] == ["predicted", f"measured, step {step}"]
    for predicted, axis in ((True, "y"), (False, "y2")):
        rows = timeline.at(step, predicted=predicted)
        bars = [bar for bar in figure.data if bar.yaxis == axis]
        opaque = [
            (base, base + x)
            for bar in bars
            for base, x, alpha in zip(bar.base, bar.x, bar.marker.opacity, strict=True)
            if alpha == 1.0
        ]
        begin = min(row.spans.computed.begin for row in rows)
        spans = [(row, span) for row in rows for span in row.spans.spans if span.queue != "control"]
        ends = sorted(1e3 * (row.spans.origin - begin) + span.end_ms for row, span in spans)
        assert sorted(end for _, end in opaque) == pytest.approx(ends, abs=1e-3)
    assert sorted(bar.name for bar in figure.data if bar.showlegend) == sorted({bar.name for bar in figure.data})
    forward = next(bar for bar in figure.data if bar.name == "forward")
    assert forward.hovertext[0].startswith("F0 stage 0: 10 ms, from 0 to 10 ms")
    assert forward.text[0] == "0"
