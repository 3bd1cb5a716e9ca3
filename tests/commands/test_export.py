"""Tests `hybridpar export`: what it prints and writes, and what it refuses; the formats are tested in tests/models."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from hybridpar.cli import main
from tests.runs import train

pytestmark = pytest.mark.usefixtures("modes")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("export") / "run"
    assert train(run_dir, epochs=1, model_ema="0.9998") == 0
    return run_dir


def export(run_dir, target, *words, form="torch-export"):
    return main(["export", str(run_dir), "--format", form, "-o", str(target), *words])


def test_the_average_is_exported_unless_the_weights_are_asked_for(run_dir, tmp_path, capsys):
    from safetensors.torch import load_file

    saved = run_dir / "checkpoints" / "step-6"
    for words, file in (([], "model_ema"), (["--weights", "raw"], "model")):
        assert export(run_dir, tmp_path / f"{file}.pt2", *words) == 0
        exported = torch.export.load(tmp_path / f"{file}.pt2").state_dict
        assert all(
            torch.equal(exported[name], tensor) for name, tensor in load_file(saved / f"{file}.safetensors").items()
        )
    out = capsys.readouterr().out
    assert "moving average of step 6" in out
    assert "batches of 8, 7, 1 images" in out


def test_the_file_says_what_the_model_tells_apart(run_dir, tmp_path):
    assert export(run_dir, tmp_path / "net.pt2") == 0
    told = {"hybridpar.json": ""}
    torch.export.load(tmp_path / "net.pt2", extra_files=told)
    facts = json.loads(told["hybridpar.json"])
    assert facts["classes"] == [f"pattern-{label}" for label in range(10)]
    assert (facts["image_size"], facts["step"], facts["weights"]) == (8, 6, "ema")


def test_a_file_that_is_there_is_replaced_with_force_alone(run_dir, tmp_path, capsys):
    target = tmp_path / "net.pt2"
    target.write_text("other")
    assert export(run_dir, target) == 2
    assert "--force" in capsys.readouterr().err
    assert target.read_text() == "other"
    assert export(run_dir, target, "--force") == 0
    assert torch.export.load(target).module()(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    assert export(run_dir, tmp_path, "--force") == 2
    assert "is a directory" in capsys.readouterr().err


def test_the_data_set_is_not_needed(run_dir, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    facts = json.loads((copy / "run.json").read_text())
    facts["options"] |= {"data": "folder", "data_root": str(tmp_path / "gone")}
    (copy / "run.json").write_text(json.dumps(facts))
    assert export(copy, tmp_path / "net.pt2") == 0


@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        ("net.pt", [], "ends in .pt2"),
        ("net.pt2", ["--model", "nothing"], "unknown model"),
    ],
)
def test_a_wrong_request_is_refused_and_leaves_no_file(run_dir, tmp_path, name, words, told, capsys):
    assert export(run_dir, tmp_path / name, *words) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
