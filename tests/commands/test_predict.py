"""Tests `hybridpar predict`: the classes are those of a test of the run, unreadable files are left out and counted."""

from __future__ import annotations

import csv
import io
import os
import shutil

import pytest
from PIL import Image

from hybridpar.cli import main
from hybridpar.config import TrainConfig
from hybridpar.config.train import TrainedOptions
from hybridpar.data import load_dataset
from hybridpar.run.evaluate import evaluate_trained
from hybridpar.run.trained import find_trained
from tests.runs import train

pytestmark = pytest.mark.usefixtures("modes")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The test images of the run as files."""
    folder = tmp_path_factory.mktemp("images")
    test = load_dataset(TrainConfig(data="synthetic:samples=96", image_size=8)).test
    for number, image in enumerate(test.images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number:02}.png")
    return folder


def test_files_get_the_classes_that_a_test_gives_them(run_dir, images, capsys):
    result = evaluate_trained(find_trained(str(run_dir), TrainedOptions()))
    assert main(["predict", str(run_dir), str(images), "--batch-size", "5"]) == 0
    out, err = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["file"] for row in rows] == [str(images / f"{number:02}.png") for number in range(24)]
    assert [row["class"] for row in rows] == [result.classes[one] for one in result.predictions]
    assert [float(row["probability"]) for row in rows] == pytest.approx(result.confidences.tolist(), rel=1e-5)
    assert "24 classified" in err


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
    train(tmp_path, steps=1, loss="bce")
    capsys.readouterr()
    assert main(["predict", str(tmp_path), str(images / "00.png"), "--top", "10"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert abs(sum(float(value) for name, value in row.items() if name.startswith("probability")) - 1) > 0.1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["RUN"], "no image is named"),
        (["RUN", "EMPTY"], "there is no image in"),
        (["RUN", "IMAGE", "--top", "0"], "at least 1"),
    ],
)
def test_a_wrong_request_is_refused(run_dir, images, tmp_path, words, told, capsys):
    places = {"RUN": str(run_dir), "IMAGE": str(images / "00.png"), "EMPTY": str(tmp_path)}
    assert main(["predict", *(places.get(word, word) for word in words)]) == 2
    assert told in capsys.readouterr().err
