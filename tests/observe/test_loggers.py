"""Loggers: what each tool gets, and that a tool that fails costs nothing but its own lines."""

from __future__ import annotations

import importlib
import importlib.util
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hybridpar.errors import TrainingError, UsageError
from hybridpar.observe.loggers import LOGGERS, Ending, LoggedRun, Logger, Loggers, logger_names
from hybridpar.observe.records import EPOCH_FIGURES, STEP_FIGURES
from tests.runs import train

PAGE = Path(__file__).parents[2] / "docs/train.md"

OF_STEPS = {row.name for row in STEP_FIGURES if row.log}
OF_EPOCHS = {row.name for row in EPOCH_FIGURES if row.log}


class Kept(Logger):
    """Keeps what it is given, or does what `mode` says."""

    package: ClassVar[str] = "json"
    made: ClassVar[list[Kept]]
    mode: ClassVar[str]
    release: ClassVar[threading.Event]

    def __init__(self, run: LoggedRun) -> None:
        self._meet("start")
        self.where = "http://example.org/run"
        self.lines: list[tuple[int, Mapping[str, float]]] = []
        self.ending: str | None = None
        Kept.made.append(self)

    def _meet(self, place: str) -> None:
        if Kept.mode == f"fails: {place}":
            raise RuntimeError("the server says no\nand more")
        if Kept.mode == f"hangs: {place}":
            Kept.release.wait()

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._meet("write")
        self.lines.append((step, figures))

    def close(self, ending: Ending) -> None:
        self._meet("close")
        self.ending = ending


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Kept]]:
    monkeypatch.setattr(LOGGERS, "_entries", dict(LOGGERS._entries))
    for name in ("kept", "other"):
        LOGGERS.register(name, "for tests")(Kept)
    Kept.made, Kept.mode, Kept.release = [], "", threading.Event()
    yield Kept
    Kept.release.set()


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., tuple[Loggers, list[str]]]:
    """Starts loggers of a run, and returns them with what they say."""

    def make(*names: str, **more: Any) -> tuple[Loggers, list[str]]:
        said: list[str] = []
        return Loggers(names, LoggedRun(tmp_path, {"lr": 0.1, "model": "plain"}, **more), said.append), said

    return make


def test_records_come_in_order_with_what_was_measured(kept, start, make_step, make_epoch):
    loggers, said = start("kept")
    step = make_step(1, grad_norm=None)
    loggers.put(step)
    loggers.put(make_step(2, grad_norm=3.0))
    loggers.put(make_epoch(0, step=2, ema_test_accuracy=None))
    assert loggers.close("interrupted")
    (one,) = kept.made
    assert [step for step, _ in one.lines] == [1, 2, 2]
    first, second, end = (figures for _, figures in one.lines)
    assert set(first) == {name for name in OF_STEPS if getattr(step, name) is not None}
    assert "grad_norm" not in first
    assert second["grad_norm"] == 3.0
    assert second["images_per_second"] == 3200.0
    assert set(end) == {name for name in OF_EPOCHS if "ema" not in name}
    assert one.ending == "interrupted"
    assert said == ["kept     http://example.org/run"]


@pytest.mark.parametrize("place", ["start", "write", "close"])
def test_a_logger_that_raises_loses_its_own_lines_with_one_warning(kept, start, make_step, place):
    kept.mode = f"fails: {place}"
    loggers, said = start("kept", "other")
    for step in range(1, 4):
        loggers.put(make_step(step))
    assert loggers.close("finished")
    warnings = [text for text in said if text.startswith("warning")]
    assert len(warnings) == 2  # one of each logger
    assert "kept failed: RuntimeError the server says no; it gets no more records" in warnings[0]


def test_a_logger_that_does_not_end_holds_up_nothing(kept, start, make_step):
    kept.mode = "hangs: close"
    loggers, said = start("kept")
    loggers.put(make_step(1))
    assert not loggers.close("finished", seconds=0.0)
    assert "did not end in time" in said[-1]


def test_a_run_with_a_failing_logger_is_a_run(kept, tmp_path, capsys):
    kept.mode = "fails: write"
    assert train(tmp_path / "run", log=("kept",)) == 0
    assert capsys.readouterr().out.count("warning: the logger kept failed") == 1
    kept.mode = ""
    with pytest.raises(TrainingError):
        train(tmp_path / "failing", log=("kept",), fault="NAN@0:2")
    assert kept.made[-1].ending == "failed", "a run that fails says so"


def test_names_are_read_and_wrong_ones_refused(kept, monkeypatch):
    assert logger_names(["kept,none".partition(",")[0], " kept"]) == ("kept",)
    assert logger_names(["none"]) == ()
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else there("json"))
    assert logger_names(["kept,tensorboard"]) == ("kept", "tensorboard")
    assert logger_names([]) == ("tensorboard",)
    for given, said in (
        (["wandb"], "pip install 'hybridpar[wandb]'"),
        (["tensorbord"], "Did you mean tensorboard"),
        (["kept", "none"], "no logger"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            logger_names(given)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert logger_names([]) == ()


def test_tensorboard_gets_the_scalars_and_hides_steps_run_again(start, tmp_path, make_step, make_epoch, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    # Files are read by name, and those of one second and process are numbered: 9 would be read after 10.
    monkeypatch.setattr(writer, "_global_uid", type(writer._global_uid)(0))
    loggers, _ = start("tensorboard")
    for step in (1, 2, 3):
        loggers.put(make_step(step, loss=1.0))
    loggers.close("failed")
    loggers, said = start("tensorboard", resumed_from=2)
    for step in (3, 4):
        loggers.put(make_step(step, loss=7.0))
    loggers.put(make_epoch(0, step=4))
    loggers.close("finished")
    assert not said
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"loss", "lr", "images_per_second", "test_accuracy"} < set(events.Tags()["scalars"])
    found = [(scalar.step, scalar.value) for scalar in events.Scalars("loss")]
    assert found == [(1, 1.0), (2, 1.0), (3, 7.0), (4, 7.0)]
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("test_accuracy")] == [(4, 0.875)]


def test_mlflow_gets_a_run_and_a_resumed_run_goes_on_in_it(start, make_step, make_epoch, tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    for resumed, ending in ((None, "failed"), (2, "finished")):
        loggers, (news,) = start("mlflow", resumed_from=resumed)
        loggers.put(make_step(3 if resumed else 1))
        loggers.put(make_epoch(0, step=3))
        loggers.close(ending, seconds=60)
        assert news.startswith("mlflow   run ")
    client = tracking.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1", "model": "plain"}
    assert run.data.metrics["test_accuracy"] == 0.875
    assert [one.step for one in client.get_metric_history(run.info.run_id, "loss")] == [1, 3]


def test_wandb_writes_offline_where_there_is_no_key(start, make_step, monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    given = []
    start = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: given.append(options) or start(**options))
    for resumed in (None, 1):
        loggers, (news,) = start("wandb", resumed_from=resumed)
        loggers.put(make_step(1 if resumed is None else 2))
        loggers.close("finished", seconds=60)
        assert "no API key" in news
        assert "wandb sync" in news
    assert given[0]["id"] == given[1]["id"]
    assert given[0]["config"] == {"lr": 0.1, "model": "plain"}
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 2


def test_what_is_logged_is_what_the_page_says():
    text = PAGE.read_text()
    part = text[text.index("## Loggers") : text.index("## After training")]
    rows = dict(re.findall(r"^\| (of a step|of an epoch) \| (.*) \|$", part, flags=re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", rows["of a step"])) == OF_STEPS
    assert set(re.findall(r"`(\w+)`", rows["of an epoch"])) == OF_EPOCHS
    assert {name for name in LOGGERS if f"| {name} |" in part} >= {"tensorboard", "wandb", "mlflow"}
