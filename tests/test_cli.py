"""Every wrong request is answered with one error: the value, the rule, what to do; and an exit code for scripts."""

from __future__ import annotations

import socket
import sys

import pytest
from PIL import Image

from hybridpar.cli import main
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from tests.ranks import run_ranks
from tests.runs import check_run, faulty, restored_modes, small_arguments, train_rank


@pytest.fixture
def call(tmp_path, capsys, monkeypatch):
    """Run the command in this process, in an empty directory; returns exit code and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str]:
        with restored_modes():
            try:
                code = main([*arguments, "--workers=1", "--no-tune-process"])
            except SystemExit as leaving:
                code = int(leaving.code or 0)
        return code, capsys.readouterr().err

    return run


def assert_one_error(error: str, *said: str) -> None:
    assert error.count("error: ") == 1, error
    assert "Traceback" not in error
    for part in said:
        assert part in error


def test_a_run_exits_with_0(call, tmp_path):
    code, error = call(*small_arguments(tmp_path / "run"))
    assert (code, error) == (0, "")
    check_run(tmp_path / "run", steps=12)


def test_a_stopped_run_exits_with_the_signal(call, tmp_path):
    with faulty("TERM@0:3"):
        code, _ = call(*small_arguments(tmp_path / "run"))
    assert code == 143
    check_run(tmp_path / "run", ended="interrupted")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resnet19"], ["unknown model 'resnet19'", "resnet18"]),
        (["resnet18", "--data", "cifer10"], ["unknown data set 'cifer10'", "cifar10"]),
        (["no_module:net"], ["cannot import 'no_module'", "current directory"]),
        (["tests.small_nets:plane"], ["no factory 'plane'", "Did you mean plain"]),
        (["tests.small_nets:broken"], ["tests.small_nets:broken failed: IndexError", "small_nets.py, line", "--debug"]),
        (["resnet18", "--lr", "-1"], ["--lr is -1.0", "greater than 0"]),
        (["resnet18", "--checkpoint-every", "often"], ["'often'", "60s"]),
        (["resnet18", "--batch-size", "1"], ["--batch-size is 1", "Use --batch-size 2 or more"]),
        (["resnet18", "--batch-size", "8", "--micro-batches", "6"], ["Use --batch-size 12 or more"]),
        (["mobilenet_v2", "--stem", "cifar"], ["does not fit mobilenet_v2", "Only ResNets"]),
        (["resnet18", "--nesterov", "--momentum", "0"], ["--nesterov", "momentum"]),
    ],
)
def test_a_wrong_request_exits_with_2(call, arguments, said, tmp_path):
    code, error = call("train", *arguments)
    assert code == 2
    assert_one_error(error, *said)
    assert not list(tmp_path.iterdir()), "a request that cannot run leaves nothing behind"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "resnet18", "--epoch", "3"], "--epochs"),
        (["train", "resnet18", "--optimizer", "sdg"], "sgd"),
        (["train", "resnet18", "--lr", "fast"], "fast"),
        (["train"], "MODEL"),
        (["trane", "resnet18"], "train"),
    ],
)
def test_a_command_line_that_cannot_be_read_exits_with_2(call, arguments, said):
    code, error = call(*arguments)
    assert code == 2
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "caltech101", "folder"])
def test_missing_data_exits_with_1(call, tmp_path, data):
    code, error = call("train", "resnet18", "--data", data, "--data-root", str(tmp_path / "nowhere"))
    assert code == 1
    assert_one_error(error, str(tmp_path / "nowhere"))
    assert error.count("\n") >= 2, "it says what to do"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("loaders", ["0", "1"])
def test_a_damaged_image_is_named(call, tmp_path, loaders):
    for part in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / "photos" / part / label
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (16, 16), (number, 0, 0)).save(folder / f"{number}.png")
    (tmp_path / "photos" / "train" / "dog" / "2.png").write_bytes(b"\x89PNG, or not")
    code, error = call(
        *small_arguments(tmp_path / "run", "--data=folder", f"--data-root={tmp_path / 'photos'}", "--batch-size=4"),
        f"--loader-workers={loaders}",
    )
    assert code == 1
    assert_one_error(error, "dog/2.png", "Replace the file")


def test_a_run_directory_that_cannot_be_written_exits_with_1(call, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    code, error = call(*small_arguments(tmp_path / "file" / "run"))
    assert code == 1
    assert_one_error(error, str(tmp_path / "file" / "run"), "--run-dir")


def test_an_existing_run_exits_with_2_and_stays(call, tmp_path):
    arguments = small_arguments(tmp_path / "run")
    assert call(*arguments)[0] == 0
    code, error = call(*arguments)
    assert code == 2
    assert_one_error(error, "already holds a run", "--resume", "--overwrite")
    check_run(tmp_path / "run", steps=12)
    assert call(*arguments, "--resume")[0] == 0
    assert call(*arguments, "--overwrite", "--steps=3")[0] == 0
    check_run(tmp_path / "run", steps=3)


def test_checkpoints_that_do_not_fit_exit_with_1(call, tmp_path):
    assert call(*small_arguments(tmp_path / "run"))[0] == 0
    newest = tmp_path / "run" / "checkpoints" / "step-12"
    code, error = call(*small_arguments(tmp_path / "b", f"--resume-from={newest}", model="tests.small_nets:wide"))
    assert code == 1
    assert_one_error(error, "is of another model", "body.0.weight is (8, 3, 3, 3) there and (12, 3, 3, 3) here")
    code, error = call(*small_arguments(tmp_path / "b", f"--resume-from={newest}", "--optimizer=adamw"))
    assert code == 1
    assert_one_error(error, "state of SGD, this run uses AdamW")
    code, error = call(*small_arguments(tmp_path / "b", f"--resume-from={newest / 'model.pt'}"))
    assert code == 1
    assert_one_error(error, "is not a checkpoint", "step-N")
    content = (newest / "model.pt").read_bytes()
    (newest / "model.pt").write_bytes(content[:-10])
    code, error = call(*small_arguments(tmp_path / "run", "--resume"))
    assert code == 1
    assert_one_error(error, str(newest / "model.pt"), "is damaged", "--resume-from")
    code, error = call(*small_arguments(tmp_path / "empty", "--resume"))
    assert code == 1
    assert_one_error(error, "nothing to resume")
    assert not (tmp_path / "b").exists()


def test_a_loss_that_stays_nan_exits_with_1(call, tmp_path):
    with faulty("NAN@0:2"):
        code, error = call(*small_arguments(tmp_path / "run"))
    assert code == 1
    assert_one_error(error, "steps 2 to 4", "body.0.weight", "--lr")


def test_debug_shows_the_traceback(call):
    code, error = call("train", "tests.small_nets:broken", "--debug")
    assert code == 2
    assert "Traceback" in error
    assert "broken" in error
    assert "IndexError" in error


def test_a_port_in_use_is_named(call, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        code, error = call("train", "resnet18", "--timeout", "5")
    assert code == 1
    assert_one_error(error, f"127.0.0.1:{port}", "in use", "another MASTER_PORT")


def test_a_job_that_is_not_described_is_an_error(call, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    code, error = call("train", "resnet18")
    assert code == 1
    assert_one_error(error, "MASTER_ADDR", "torchrun")


def too_small(world, options):
    with pytest.raises(UsageError) as caught:
        train_rank(world, TrainConfig().data_root / "unused", "plain", None, options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 5}, "Use --batch-size 6 or more"),
        ({"batch_size": 8, "micro_batches": 2}, "Use --batch-size 12 or more"),
        ({"synthetic_samples": 5}, "Use at most 2 workers"),
        ({"synthetic_samples": 2}, "Use at most 1 worker "),
    ],
)
def test_too_many_workers_are_told_what_works(options, said):
    answers = run_ranks(too_small, 3, options)
    assert all(said in answer for answer in answers)
