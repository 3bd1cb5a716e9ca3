"""Tests the report page: its file holds all it needs, and what is drawn is what was recorded, of all runs."""

import math
from contextlib import closing

import numpy as np
import pytest
from plotly.graph_objects import Bar, Figure

from hybridpar.observe.metrics import MetricsWriter, read_metrics
from hybridpar.observe.page import (
    confusion_matrix,
    curves,
    element,
    is_page,
    step_on_lanes,
    table,
    write_page,
)
from tests.observe.timelines import a_timeline

NAME = "</script><script>alert(1)</script><b>\udcff"


def test_names_in_runs_are_no_markup(tmp_path):
    parts = [element("h2", NAME), table([[NAME, NAME]], caption=NAME), Figure([Bar(name=NAME, y=[NAME], x=[1])])]
    write_page(tmp_path / "page.html", NAME, parts)
    text = (tmp_path / "page.html").read_text()
    assert is_page(tmp_path / "page.html")
    assert "<script>alert" not in text
    assert text.count("alert(1)") == 8
    assert text.count("<script>") == text.count("</script>") == 2
    assert "<b>" not in text.rpartition("</head>")[2]


def record(folder, make_step, make_epoch, losses, **fields):
    with closing(MetricsWriter(folder)) as writer:
        for step, loss in enumerate(losses, start=1):
            writer.write(make_step(step, loss=loss, skipped=math.isnan(loss), **fields))
        writer.write(make_epoch(0, test_loss=None))
    return read_metrics(folder)


def traces_of(figure, title):
    number = [axis.text for axis in figure.layout.annotations].index(title) + 1
    return [trace for trace in figure.data if trace.yaxis == f"y{number if number > 1 else ''}"]


def test_curves_are_what_was_recorded_by_step_and_by_time(tmp_path, make_step, make_epoch):
    losses = [3.0, 2.0, math.nan, 1.5, 1.0]
    figure = curves(["run"], [record(tmp_path, make_step, make_epoch, losses)])
    titles = [axis.text for axis in figure.layout.annotations]
    assert titles == ["Loss", "Test accuracy (%)", "Learning rate", "Time of a step (ms)"]
    (loss,) = traces_of(figure, "Loss")
    assert (list(loss.x), list(loss.y)) == ([1, 2, 4, 5], [3.0, 2.0, 1.5, 1.0])
    (accuracy,) = traces_of(figure, "Test accuracy (%)")
    assert (list(accuracy.x), list(accuracy.y)) == ([10], [87.5])
    by_step, by_time, linear, log = figure.layout.updatemenus[0].buttons
    assert [list(x) for x in by_step.args[0]["x"]] == [list(trace.x) for trace in figure.data]
    assert list(by_time.args[0]["x"][list(figure.data).index(loss)]) == pytest.approx([0.02, 0.04, 0.08, 0.1])
    assert [button.args[1]["yaxis.type"] for button in (linear, log)] == ["linear", "log"]
    axes = [figure.layout[name] for name in figure.layout if name.startswith("xaxis")]
    assert len({axis.matches for axis in axes} - {None}) == 1, "all are zoomed together"


def test_of_many_steps_the_means_of_stretches_are_drawn_and_what_sticks_out(tmp_path, make_step, make_epoch):
    losses = [float(step % 2) for step in range(1000)]
    losses[700] = 9.0
    mean, least, largest = traces_of(curves(["run"], [record(tmp_path, make_step, make_epoch, losses)]), "Loss")
    assert len(mean.x) == 500
    assert (mean.y[0], least.y[0], largest.y[0], largest.y[350], mean.y[350]) == (0.5, 0.0, 1.0, 9.0, 5.0)


def test_a_run_without_steps_has_no_curves(tmp_path):
    assert curves(["run"], [read_metrics(tmp_path)]) is None


def test_a_step_has_its_prediction_above_it_and_every_action_in_place():
    timeline = a_timeline()
    figure = step_on_lanes(timeline)
    titles = [title.text for title in figure.layout.annotations]
    assert [title.split(":")[0] for title in titles] == ["predicted", "measured, step 5, the one of median length"]
    for (_, rows), drawn in zip(timeline.panels(), figure.data, strict=True):
        begin = min(row.spans.computed.begin for row in rows)
        ends = sorted(1e3 * (row.spans.origin - begin) + span.end_ms for row in rows for span in row.spans.spans)
        assert sorted(base + x for base, x in zip(drawn.base, drawn.x, strict=True)) == pytest.approx(ends, abs=1e-3)
    predicted = figure.data[0]
    assert (predicted.y[0], predicted.text[0]) == ("worker 0 compute lane 0", "0")
    assert predicted.hovertext[0] == "F0 stage 0: 10 ms, from 0"
    assert "forward" in figure.layout.title.text


def test_rows_of_the_confusion_matrix_are_classes():
    (matrix,) = confusion_matrix(np.array([[3, 1], [0, 4]]), ["a", "<b>"]).data
    np.testing.assert_allclose(matrix.z, [[math.sqrt(0.75), 0.5], [0.0, 1.0]])
    assert list(matrix.y) == ["a", "&lt;b&gt;"]
