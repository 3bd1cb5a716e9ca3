"""A trained model is tested as its run tested it: the same accuracy, on any number of workers, every image once."""

from __future__ import annotations

import csv
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from hybridpar.config import TrainConfig
from hybridpar.config.train import TrainedOptions
from hybridpar.data import ImageData, MemoryImages
from hybridpar.data.sources import IMAGENET_MEAN, IMAGENET_STD
from hybridpar.errors import CheckpointError, UsageError
from hybridpar.formats.checkpoint_files import latest_checkpoint
from hybridpar.observe.metrics import read_metrics
from hybridpar.run.evaluate import _noted, _put_together, evaluate_trained
from hybridpar.run.trained import find_trained, load_trained
from hybridpar.train.results import Evaluation
from tests.ranks import run_ranks
from tests.runs import assert_same_state, check_run, restored_modes, train, train_rank


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of two workers with a moving average, whose 25 test images no number of workers divides evenly."""
    run_dir = tmp_path_factory.mktemp("evaluated") / "run"
    run_ranks(train_rank, 2, run_dir, "plain", None, {"data": "synthetic:samples=100", "model_ema": "0.95"})
    return run_dir


def evaluated(run_dir, **options):
    with restored_modes():
        return evaluate_trained(find_trained(str(run_dir), TrainedOptions(**options)))


def evaluated_on_rank(world, run_dir):
    result = evaluated(run_dir, weights="raw")
    return None if result is None else (result.plain(), result.targets)


def evaluated_file_on_rank(world, file):
    result = evaluated(file, model="tests.small_nets:plain", data="synthetic", image_size=8)
    return None if result is None else result.accuracy


def test_the_accuracy_is_that_of_the_run(run_dir):
    summary = check_run(run_dir)
    averaged, raw = evaluated(run_dir, weights="last"), evaluated(run_dir, weights="last,raw")
    trained = find_trained(str(run_dir), TrainedOptions(weights="last,raw"))
    assert (averaged.accuracy, raw.accuracy) == (summary["ema_test_accuracy"], summary["test_accuracy"])
    assert summary["ema_test_accuracy"] != summary["test_accuracy"]  # else this shows nothing
    assert raw.images == 25
    assert (trained.step, trained.weights) == (summary["steps"], "raw")


def test_any_number_of_workers_sees_every_image_once(run_dir):
    alone = evaluated(run_dir, weights="raw")
    figures, targets = run_ranks(evaluated_on_rank, 4, run_dir)[0]
    assert np.array_equal(targets, torch.arange(25) % 10)  # the labels of the data set, in order
    expected = alone.plain()
    assert figures.pop("test_loss") == pytest.approx(expected.pop("test_loss"), rel=1e-6)
    assert figures.pop("calibration_error") == pytest.approx(expected.pop("calibration_error"), rel=1e-5)
    del figures["calibration"], expected["calibration"]
    assert figures == expected


def test_a_damaged_checkpoint_does_not_give_way_to_another(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    trained = find_trained(str(run), TrainedOptions())
    shutil.copytree(trained.checkpoint, trained.checkpoint.with_name("step-99"))
    for file in trained.checkpoint.glob("*.safetensors"):
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="its content is not what the manifest says"):
        load_trained(trained, 10)


def test_a_checkpoint_can_be_named_from_anywhere(run_dir, monkeypatch):
    newest = latest_checkpoint(run_dir / "checkpoints")
    for place, source, weights in (
        (run_dir, ".", "last"),
        (run_dir, f"checkpoints/{newest.name}", None),
        (newest, ".", None),
        (run_dir, str(newest), "raw"),
    ):
        monkeypatch.chdir(place)
        trained = find_trained(source, TrainedOptions(weights=weights))
        assert (trained.name, trained.step) == ("tests.small_nets:plain", 14)
        assert trained.checkpoint.resolve() == newest


def test_a_file_of_weights_needs_model_and_data(run_dir):
    file = str(latest_checkpoint(run_dir / "checkpoints") / "model.safetensors")
    with pytest.raises(UsageError, match="without --model"):
        find_trained(file, TrainedOptions())
    with pytest.raises(UsageError, match="without --data"):
        find_trained(file, TrainedOptions(model="tests.small_nets:plain"))
    raw = evaluated(run_dir, weights="raw")
    same = evaluated(file, model="tests.small_nets:plain", data="synthetic", image_size=8)
    assert run_ranks(evaluated_file_on_rank, 2, file)[0] == same.accuracy  # sent by worker 0
    assert same.images == 256  # another number of samples, as nothing says how many the run had
    assert raw.classes == same.classes


def test_of_several_classes_each_is_right_by_itself():
    labels = torch.tensor([[1, 0], [0, 0], [1, 1]], dtype=torch.bool)
    source = MemoryImages(torch.zeros(3, 3, 8, 8, dtype=torch.uint8), labels)
    form = {"sample_shape": (3, 8, 8), "test_size": 8, "mean": IMAGENET_MEAN, "std": IMAGENET_STD, "multi_label": True}
    data = ImageData(name="several", class_names=("a", "b"), **form, train=source, test=source)
    scores = torch.tensor([[1.0, -1.0]] * 3)
    parts = [_noted(scores[part], labels[part].float(), 2, TrainConfig()) for part in (slice(2), slice(2, 3))]
    result = _put_together([*parts, {}], data, Evaluation(1 / 3, 0.5, 3), 4)
    assert (result.right_of_class.tolist(), result.images_of_class.tolist()) == ([2, 2], [3, 3])
    assert (result.images, result.unreadable, result.confusion, result.top5_accuracy) == (3, 1, None, None)


def test_a_model_with_other_outputs_than_classes_is_refused():
    with pytest.raises(UsageError, match="a score for each"):
        _noted(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), 3, TrainConfig())


def write_table(file, labels):
    """A table of grey images, as bright as their number, three to train and one to test for each label."""
    rows = []
    for number, label in enumerate(4 * labels):
        image = file.parent / f"{number}.png"
        Image.new("RGB", (8, 8), (20 * (number % len(labels)),) * 3).save(image)
        rows.append((image.name, label, "test" if number < len(labels) else "train"))
    with open(file, "w", newline="") as opened:
        csv.writer(opened).writerows([("path", "label", "split"), *rows])


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A table of images with several labels, and options to train on it."""
    table = tmp_path_factory.mktemp("several") / "all.csv"
    write_table(table, ["", "a", "b", "c", "a;b", "a;c", "b;c", "a;b;c"])
    return {"data": "csv", "data_root": table, "batch_size": 8, "loader_workers": 0, "plan": "none"}


@pytest.mark.parametrize("options", [{}, {"mix": "mixup=0.2"}], ids=["plain", "mixed"])
def test_several_labels_are_trained_and_tested_by_binary_cross_entropy(several, options, tmp_path):
    for loss in ("auto", "bce"):
        train(tmp_path / loss, epochs=1, loss=loss, **several, **options)
    train(tmp_path / "auto", epochs=2, resume=True, **several, **options)
    train(tmp_path / "bce", epochs=2, resume=True, loss="bce", **several, **options)
    assert_same_state(tmp_path / "auto", tmp_path / "bce")
    results = [evaluated(tmp_path / loss, weights="last").plain() for loss in ("auto", "bce")]
    assert results[0] == results[1]
    assert results[0]["test_loss"] == pytest.approx(read_metrics(tmp_path / "auto").epochs[-1].test_loss)


def test_servers_train_several_labels_alike(several, tmp_path):
    for loss in ("auto", "bce"):
        train(tmp_path / loss, sync="ps:servers=0", steps=2, loss=loss, **several)
    assert_same_state(tmp_path / "auto", tmp_path / "bce")


def test_classes_are_known_by_name(tmp_path):
    """Folders are numbered in order of text, tables by number; and a set of test images may lack a class."""
    table = tmp_path / "images" / "all.csv"
    table.parent.mkdir()
    write_table(table, ["1", "2", "10"])
    with open(table, newline="") as opened:
        for number, (name, label, split) in enumerate(list(csv.reader(opened))[1:]):
            folder = tmp_path / "folder" / split / label
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(table.parent / name, folder / f"{number}.png")
    options = {"data": "folder", "data_root": tmp_path / "folder", "batch_size": 9, "loader_workers": 0, "plan": "none"}
    train(tmp_path / "run", epochs=4, **options)
    known = evaluated(tmp_path / "run")
    same = evaluated(tmp_path / "run", data="csv", data_root=table)
    assert same.plain() == known.plain()
    assert known.classes == ("1", "10", "2")
    shutil.rmtree(tmp_path / "folder" / "test" / "10")
    fewer = evaluated(tmp_path / "run")
    shutil.rmtree(tmp_path / "folder" / "train" / "10")
    least = evaluated(tmp_path / "run")
    assert fewer.plain() == least.plain()
    assert (fewer.images, [*fewer.right_of_class[::2]]) == (2, [*known.right_of_class[::2]])
    (tmp_path / "folder" / "train" / "2").rename(tmp_path / "folder" / "train" / "cat")
    (tmp_path / "folder" / "test" / "2").rename(tmp_path / "folder" / "test" / "cat")
    with pytest.raises(UsageError, match="does not know 1 of the classes of the data: cat"):
        evaluated(tmp_path / "run")
