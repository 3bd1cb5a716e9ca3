"""Tests `hybridpar evaluate`, `predict` and `export`: what they print and write, and what they refuse."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hybridpar.cli import main
from hybridpar.config import TrainConfig
from hybridpar.config.train import TrainedOptions
from hybridpar.data import load_dataset
from hybridpar.run.data import batches_to_test
from hybridpar.run.evaluate import evaluate_trained
from hybridpar.run.trained import find_trained
from tests.runs import restored_modes, train


@pytest.fixture(autouse=True)
def modes():
    with restored_modes():
        yield


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of one epoch that keeps a moving average."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert train(run_dir, epochs=1, model_ema="0.9998") == 0
    return run_dir


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The test images of the run as files."""
    folder = tmp_path_factory.mktemp("images")
    test = load_dataset(TrainConfig(data="synthetic:samples=96", image_size=8)).test
    for number, image in enumerate(test.images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number:02}.png")
    return folder


def export(run_dir, target, *words, form="torch-export"):
    return main(["export", str(run_dir), "--format", form, "-o", str(target), *words])


def test_a_test_is_written_once_and_replaced_with_force(run_dir, tmp_path, capsys):
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
    assert figures["test_accuracy"] == summary["ema_test_accuracy"]
    assert (figures["weights"], figures["step"], figures["images"]) == ("ema", 6, 24)
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    assert main(["evaluate", str(run_dir), "-o", str(target / "evaluation.json" / "below")]) == 1
    assert "Name a directory that you can write, with --run-dir or --output." in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_refused(tmp_path, capsys):
    train(tmp_path, steps=1, checkpoints="never")
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "holds no whole one" in capsys.readouterr().err


def test_files_get_the_classes_that_a_test_gives_them(run_dir, images, capsys):
    result = evaluate_trained(find_trained(str(run_dir), TrainedOptions()))
    assert main(["predict", str(run_dir), str(images), "--batch-size", "5"]) == 0
    out, err = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["file"] for row in rows] == [str(images / f"{number:02}.png") for number in range(24)]
    assert [row["class"] for row in rows] == [result.classes[one] for one in result.predictions]
    assert [float(row["probability"]) for row in rows] == pytest.approx(result.confidences.tolist(), rel=1e-5)
    assert "24 classified" in err


def test_loader_processes_are_those_of_the_command_and_not_of_the_run(tmp_path, images, monkeypatch):
    train(tmp_path, steps=1, loader_workers=1)
    used = []

    def noted(data, config, device):
        used.append(config.loader_workers)
        return batches_to_test(data, replace(config, loader_workers=0), device)

    monkeypatch.setattr("hybridpar.run.evaluate.batches_to_test", noted)
    for words in ([], ["--loader-workers", "3"]):
        assert main(["predict", str(tmp_path), str(images / "00.png"), *words]) == 0
    assert used == [0, 3]


def test_several_classes_are_named_with_the_most_probable_first(run_dir, images, capsys):
    assert main(["predict", str(run_dir), str(images / "00.png"), "--top", "99"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert list(row)[:5] == ["file", "class", "probability", "class_2", "probability_2"]
    values = [float(value) for name, value in row.items() if name.startswith("probability")]
    assert len({value for name, value in row.items() if name.startswith("class")}) == 10
    assert values == sorted(values, reverse=True)
    assert sum(values) == pytest.approx(1, abs=1e-5)


def test_what_cannot_be_read_is_left_out_told_and_counted(run_dir, images, tmp_path, capsys, caplog):
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes((images / "00.png").read_bytes()[:60])
    files = [images / "01.png", damaged, images / "02.png", tmp_path / "nowhere.png"]
    assert main(["predict", str(run_dir), *map(str, files)]) == 1
    out, err = capsys.readouterr()
    assert [line.partition(",")[0] for line in out.splitlines()[1:]] == [str(images / f"0{one}.png") for one in (1, 2)]
    assert "2 classified, 2 cannot be read and are left out" in err
    assert "damaged.png" in caplog.text
    assert "nowhere.png" in caplog.text


def test_a_file_is_written_as_a_whole_and_not_replaced(run_dir, images, tmp_path, capsys):
    (tmp_path / "made").mkdir()
    target = tmp_path / "made" / "out.csv"
    latin = tmp_path / os.fsdecode(b"\xe9t\xe9.png")  # a name that is not UTF-8
    shutil.copy(images / "00.png", latin)
    words = ["predict", str(run_dir), str(latin), "-o", str(target)]
    assert main(words) == 0
    assert capsys.readouterr().out == ""
    before = target.read_bytes()
    assert os.fsencode(latin) in before
    assert main(words) == 2
    assert main([*words, "--force"]) == 0
    assert target.read_bytes() == before
    assert [file.name for file in target.parent.iterdir()] == ["out.csv"]


def test_with_binary_cross_entropy_each_class_has_a_probability_of_its_own(tmp_path, images, capsys):
    train(tmp_path, steps=1, loss="bce:smoothing=0.1")
    capsys.readouterr()
    assert main(["predict", str(tmp_path), str(images / "00.png"), "--top", "10"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert abs(sum(float(value) for name, value in row.items() if name.startswith("probability")) - 1) > 0.1


def test_the_average_is_exported_unless_the_weights_are_asked_for(run_dir, tmp_path, capsys):
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
    ("words", "told"),
    [
        (["evaluate", "nowhere"], "there is no run"),
        (["evaluate", "RUN", "--nproc", "0"], "at least 1"),
        (["predict", "RUN"], "no image is named"),
        (["predict", "RUN", "EMPTY"], "there is no image in"),
        (["predict", "RUN", "IMAGE", "--top", "0"], "at least 1"),
        (["export", "RUN", "--format", "torch-export", "-o", "EMPTY/net.pt"], "ends in .pt2"),
        (["export", "RUN", "--format", "torch-export", "-o", "EMPTY/net.pt2", "--model", "nothing"], "unknown model"),
    ],
)
def test_a_wrong_request_is_refused_and_leaves_no_file(run_dir, images, tmp_path, words, told, capsys):
    places = {"RUN": run_dir, "IMAGE": images / "00.png", "EMPTY": tmp_path}
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
