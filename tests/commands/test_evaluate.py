"""Tests `hybridpar evaluate`: what it prints and writes, and what it refuses before anything is loaded."""

from __future__ import annotations

import json

import pytest

from hybridpar.cli import main
from tests.runs import train

pytestmark = pytest.mark.usefixtures("modes")


def test_files_are_written_once_and_replaced_with_force(run_dir, tmp_path, capsys):
    target = tmp_path / "result"
    words = ["evaluate", str(run_dir), "-o", str(target)]
    assert main(words) == 0
    out = capsys.readouterr().out
    files = {"confusion.html", "evaluation.json"}
    assert {file.name for file in target.iterdir()} == files
    assert all(str(target / name) in out for name in files)
    assert "step-6" in out
    figures = json.loads((target / "evaluation.json").read_text())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert figures["test_accuracy"] == summary["test_accuracy"]
    assert (figures["weights"], figures["step"], figures["images"]) == ("raw", 6, 24)
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "there is no run"),
        (["RUN", "--nproc", "0"], "at least 1"),
        (["RUN", "--weights", "ema"], "no moving average"),
    ],
)
def test_a_wrong_request_is_refused(run_dir, words, told, capsys):
    assert main(["evaluate", *(str(run_dir) if word == "RUN" else word for word in words)]) == 2
    assert told in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_refused(tmp_path, capsys):
    train(tmp_path, steps=1, checkpoints="never")
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "no whole checkpoint" in capsys.readouterr().err
