"""Lists of runs, comparisons, and checkpoints that may be deleted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from hybridpar.cli import main
from hybridpar.errors import UsageError
from hybridpar.formats.checkpoint_files import list_checkpoints
from hybridpar.run.directory import RUN_FILE
from hybridpar.run.runs import differing_options, find_runs, prunable, read_run, size_of
from tests.runs import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of four epochs, of which the second has other rates and all of its checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "a", "dropping", epochs=4, log=("none",))
    train(folder / "deep/b", "dropping", epochs=4, lr=0.01, checkpoints="keep=9,best=1,by=train_loss", log=("none",))
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


def saved(run: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run / "checkpoints")]


def test_runs_are_found_wherever_they_lie_once_each(runs):
    (runs / "c").mkdir()
    (runs / "c" / RUN_FILE).write_text("{")  # damaged
    assert [run.directory.name for run in find_runs([runs, runs / "a"])] == ["a", "b"]
    assert find_runs([runs / "c"]) == []
    with pytest.raises(UsageError, match="no folder"):
        find_runs([runs / "d"])
    with pytest.raises(UsageError, match="not the directory of a run"):
        read_run(runs / "c")


def test_what_differs_and_what_runs_came_to(runs):
    both = find_runs([runs])
    assert differing_options([one.options for one in both]) == {
        "lr": [0.05, 0.01],
        "checkpoints": ["epoch/60s,keep=2", "keep=9,best=1,by=train_loss"],
    }
    for run in both:
        summary = json.loads((run.directory / "summary.json").read_text())
        assert {key: run.figures[key] for key in ("steps", "test_accuracy", "images_per_second")} == {
            key: summary[key] for key in ("steps", "test_accuracy", "images_per_second")
        }
        assert run.figures["exit"] == "finished"


def test_the_last_and_the_best_are_never_deleted(runs, monkeypatch):
    (run,) = find_runs([runs / "deep"])
    best = min(run.table.epochs, key=lambda one: one.train_loss).step
    left = {f"step-{best}", "step-24"}
    assert {path.name for path in prunable(run)} == {"step-6", "step-12", "step-18", "step-24"} - left
    assert {path.name for path in prunable(run, keep=9)} == set()
    # By accuracy the first of all is the best: the summary names it, too.
    text = (runs / "deep/b/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in text]
    lines = [json.dumps(row | {"train_loss": row["epoch"]} if "event" in row else row) for row in rows]
    (runs / "deep/b/metrics.jsonl").write_text("\n".join(lines) + "\n")
    told = {path.name for path in prunable(read_run(runs / "deep/b"))}
    assert "step-6" not in told
    assert f"step-{best}" not in told  # as the summary says it


def test_pruning_says_what_it_would_do_and_does_it_when_asked(runs, capsys):
    assert main(["runs", "prune", str(runs), "--keep", "0"]) == 2
    before = saved(runs / "deep/b")
    assert len(before) == 4
    assert main(["runs", "prune", str(runs)]) == 0
    said = capsys.readouterr().out
    assert "would be deleted; nothing was" in said
    assert saved(runs / "deep/b") == before
    expected = sum(size_of(path) for run in find_runs([runs]) for path in prunable(run))
    assert expected > 0
    assert main(["runs", "prune", str(runs), "--delete"]) == 0
    assert "deleted  " in capsys.readouterr().out
    assert len(saved(runs / "deep/b")) <= 2
    assert saved(runs / "deep/b")[-1] == "step-24"
    assert main(["runs", "prune", str(runs), "--delete"]) == 0
    assert "nothing to delete" in capsys.readouterr().out
    assert train(runs / "a", "dropping", epochs=5, log=("none",), resume=True) == 0


def test_a_checkpoint_that_is_deleted_meanwhile_ends_no_list(runs, capsys):
    with mock.patch("hybridpar.run.runs.list_checkpoints", lambda path: [path / f"step-{n}" for n in (6, 7, 8)]):
        for command in (["runs", "list"], ["runs", "prune"]):
            assert main([*command, str(runs)]) == 0
    assert "3 checkpoints, 0 bytes" in capsys.readouterr().out


def test_the_command_lists_and_compares(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs.parent)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[::2] == ["runs/a", "runs/deep/b"]
    assert all("finished" in line for line in listed[1::2])
    assert main(["runs", "compare", "runs/a", "runs/deep/b"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["--lr", "0.05", "0.01"] in lines
    assert ["steps", "24", "24"] in lines
    assert main(["runs", "compare", "runs/a"]) == 2
    assert main(["runs", "list", "nowhere"]) == 2
