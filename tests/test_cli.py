"""Every wrong request is answered with one error: the value, the rule, what to do; and an exit code for scripts."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from dataclasses import fields

import pytest
from PIL import Image

from hybridpar.cli import main
from hybridpar.commands import COMMANDS, HELP_ALL, SHOWN
from hybridpar.commands.train import StartOptions, Train, check_names
from hybridpar.config import TrainConfig
from hybridpar.config.train import GROUPS
from hybridpar.errors import UsageError
from hybridpar.formats.checkpoint_files import list_checkpoints
from hybridpar.observe.metrics import read_metrics
from hybridpar.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.runs import ROOT, check_run, faulty, restored_modes, small_arguments, train_rank

#: A model and images that take no time.
SMALL_NET = ("tests.small_nets:plain", "--data", "synthetic", "--image-size", "8")


@pytest.fixture
def call(tmp_path, capsys, monkeypatch):
    """Run the command in this process, in an empty directory; returns exit code and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str]:
        workers = [] if "RANK" in os.environ else ["--nproc=1"]
        with restored_modes():
            try:
                code = main([*arguments, *workers, "--no-tune-process"])
            except SystemExit as leaving:
                code = int(leaving.code or 0)
        return code, capsys.readouterr().err

    return run


def assert_one_error(error: str, *said: str) -> None:
    assert error.count("error: ") == 1, error
    assert "Traceback" not in error
    for part in said:
        assert part in error


def help_of(command: list[str], capsys, option: str = "--help") -> str:
    with pytest.raises(SystemExit) if command else contextlib.nullcontext():
        main([*command, option])
    return capsys.readouterr().out


def test_every_command_is_known(capsys):
    listed = re.search(r"\{([a-z,-]+)\}", help_of([], capsys))
    assert listed is not None
    assert listed[1].split(",") == list(COMMANDS)
    assert {"doctor", "plan", "show", "train", "tune"} <= set(COMMANDS)  # CONTRIBUTING.md adds another


def test_without_a_command_the_commands_are_listed_and_the_exit_code_is_2(capsys):
    assert main([]) == 2
    assert "hybridpar COMMAND --help" in capsys.readouterr().err


def options_in(text: str) -> set[str]:
    return set(re.findall(r"^[│\s]*(--[a-z][a-z-]*)", text, flags=re.MULTILINE))


def test_the_help_of_train_shows_the_usual_options_in_groups(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    short, full = help_of(["train"], capsys), help_of(["train"], capsys, HELP_ALL)
    assert len(short.splitlines()) <= 120
    assert max(map(len, short.splitlines())) <= 100
    assert max(map(len, full.splitlines())) <= 100
    for title in GROUPS:
        for text in (short, full):
            assert re.search(rf"^\W*{title} options\W*$", text, flags=re.MULTILINE)
    shown = {*SHOWN, *(field.name for field in fields(StartOptions))} - {"model"}
    assert options_in(short) == {f"--{name.replace('_', '-')}" for name in shown}
    own = {field.name for field in fields(Train)} - {"model", "given"}
    named = {one.replace("--no-", "--") for one in options_in(full)}
    assert named == {f"--{name.replace('_', '-')}" for name in own}
    assert "None" not in full, "a default that is no value says nothing"


def test_the_help_of_plan_leaves_out_what_only_training_has(capsys):
    short = options_in(help_of(["plan"], capsys))
    assert short.isdisjoint({"--run-dir", "--resume", "--checkpoints", "--log"})
    assert {"--cluster", "--stages"} <= short


def test_none_unsets_what_a_preset_sets():
    parse = COMMANDS.get("train").parse
    assert parse("train", ["m", "--weights", "none", "--drop=none", "--compress", "none"]) == Train(
        model="m", given=frozenset({"weights", "drop", "compress"})
    )


@pytest.mark.parametrize("command", [["train"], ["plan"], ["tune"], ["doctor"]])
def test_a_flag_that_turns_something_off_says_what_it_does(command, capsys):
    """The text of an attribute that is on by default would say the opposite of what its flag `--no-...` does."""
    text = help_of(command, capsys, HELP_ALL)
    said = re.sub(r"[│\s]+", " ", text)
    assert "(default: True)" not in said
    for flag in re.findall(r"^[│\s]*(--no-[a-z-]+)", text, flags=re.MULTILINE):
        assert f"{flag} `{flag}`: " in said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("report", ["Run directories.", "an earlier page is replaced"]),
        ("show", ["A run directory, a plan", "Draw it into this .html file"]),
        ("predict", ["Image files, and folders"]),
    ],
)
def test_positional_arguments_are_explained_without_an_empty_default(command, said, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = help_of([command], capsys)
    assert all(part in text for part in said)
    assert "(default: )" not in text


def test_a_stopped_run_exits_with_the_signal(call, tmp_path):
    with faulty("TERM@0:3"):
        code, _ = call(*small_arguments(tmp_path / "run"))
    assert code == 143
    check_run(tmp_path / "run", ended="interrupted")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tests.small_nets:plane"], ["no factory 'plane'", "Did you mean plain"]),
        (["tests.small_nets:broken"], ["tests.small_nets:broken failed: IndexError", 'nets.py", line', "--debug"]),
        (["resnet18", "--data", "cifar10", "--data-root", "nowhere"], ["nowhere", ":download"]),
        (["resnet18", "--data", "folder", "--data-root", "nowhere"], ["nowhere", "--data-root"]),
        (["resnet18", "--data-root", "photos"], ["digits reads no files", "photos", "--data folder"]),
        (["resnet18", "--lr=-1"], ["--lr -1", "greater than 0"]),
        (["resnet18", "--checkpoints", "often"], ["--checkpoints often", "60s"]),
        ([*SMALL_NET, "--batch-size", "1"], ["--batch-size is 1", "Use --batch-size 2 or more"]),
        (
            [*SMALL_NET, "--batch-size", "3000"],
            ["--batch-size is 3,000", "Use --batch-size 1024 or less"],
        ),
        ([*SMALL_NET, "--batch-size", "8", "--micro-batches", "6"], ["Use --batch-size 12 or more"]),
        (["mobilenet_v2", "--model-arg", "stem=cifar"], ["does not fit mobilenet_v2", "Only ResNets"]),
        ([*SMALL_NET, "--compress", "qsgd_mn:bitz=4"], ["codec 'qsgd_mn' has no option 'bitz'"]),
        ([*SMALL_NET, "--compress", "* -> onebti"], ["unknown codec 'onebti'"]),
        (["resnet18", "--optimizer", "sgd:nesterov,momentum=0"], ["sgd:nesterov,momentum=0", "needs momentum"]),
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


@pytest.fixture
def photos(tmp_path):
    """Four images of each of two classes, for training and for testing."""
    for part in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / "photos" / part / label
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (16, 16), (number, 0, 0)).save(folder / f"{number}.png")
    return tmp_path / "photos"


def test_a_killed_loader_process_of_the_only_worker_exits_with_1_and_resumes(call, tmp_path, photos, monkeypatch):
    arguments = small_arguments(tmp_path / "run", "--data=folder", f"--data-root={photos}", "--batch-size=2")
    arguments += ["--loader-workers=1", "--checkpoints=1"]
    step, others = Trainer.step, multiprocessing.active_children()

    def killing(trainer, *given, **options):
        if trainer.steps_done == 4:  # the second epoch begins
            for process in set(multiprocessing.active_children()) - set(others):
                process.kill()
                process.join()
        return step(trainer, *given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", killing)
        code, error = call(*arguments)
    assert code == 1
    assert_one_error(error, "a loader process died", "--loader-workers", "--resume")
    saved = [int(path.name.removeprefix("step-")) for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert max(saved) == read_metrics(tmp_path / "run").steps["step"][-1] >= 5
    assert call(*arguments, "--resume")[0] == 0
    check_run(tmp_path / "run", steps=8)


def test_damaged_images_are_named_and_end_nothing(call, tmp_path, photos, caplog):
    for part in ("train", "test"):
        (photos / part / "dog" / "2.png").write_bytes(b"\x89PNG, or not")
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code, _ = call(
            *small_arguments(tmp_path / "run", "--data=folder", f"--data-root={photos}"),
            *("--batch-size=4", "--loader-workers=1"),
        )
    assert code == 0
    assert "8 training and 8 test images, 2 classes, 8x8\n" in told.getvalue()
    assert "the accuracy is over 7 of 8 test images" in told.getvalue()
    for part in ("train", "test"):
        assert f"{part}/dog/2.png" in caplog.text


def test_an_existing_run_exits_with_2_and_stays(call, tmp_path):
    arguments = small_arguments(tmp_path / "run")
    assert call(*arguments)[0] == 0
    code, error = call(*arguments)
    assert code == 2
    assert_one_error(error, "already holds a run", "--resume", "--run-dir")
    check_run(tmp_path / "run", steps=12)
    assert call(*arguments, "--resume")[0] == 0


def test_checkpoints_that_do_not_fit_exit_with_2(call, tmp_path):
    assert call(*small_arguments(tmp_path / "run"))[0] == 0
    newest = tmp_path / "run" / "checkpoints" / "step-12"
    code, error = call(*small_arguments(tmp_path / "b", f"--resume-from={newest}", "--optimizer=adamw"))
    assert code == 2
    assert_one_error(error, "state of SGD, this run uses AdamW")
    code, error = call(*small_arguments(tmp_path / "b", f"--resume-from={newest / 'model.safetensors'}"))
    assert code == 2
    assert_one_error(error, "is not a checkpoint", "step-N")
    content = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(content[:-10])
    code, error = call(*small_arguments(tmp_path / "run", "--resume"))
    assert code == 2
    assert_one_error(error, str(newest / "model.safetensors"), "is damaged", "--resume-from")
    code, error = call(*small_arguments(tmp_path / "empty", "--resume"))
    assert code == 2
    assert_one_error(error, "nothing to resume")
    assert not (tmp_path / "b").exists()


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
    assert code == 2
    assert_one_error(error, f"127.0.0.1:{port}", "in use", "another MASTER_PORT", "port= in the line of the first host")


@pytest.mark.parametrize(
    ("arguments", "ends", "said"),
    [
        (["--nproc", "2"], "7 set()", "training resnet18 on digits, in runs/resnet18-digits\n"),
        (["--nproc", "1"], "7 set()", "training resnet18 on digits, in runs/resnet18-digits\n"),
        (["--nproc", "2", "--data", "digit"], "2 set()", "unknown data set 'digit'"),
        (["--nproc", "2", "--compress", "onebti"], "2 set()", "unknown codec 'onebti'"),
    ],
)
def test_before_torch_is_loaded_names_are_checked_and_it_is_said_what_is_trained(tmp_path, arguments, ends, said):
    """Exits with 7 where the launching process starts the workers, or becomes the only one."""
    program = (
        "import sys\nfrom hybridpar import cli\nfrom hybridpar.commands import train\n"
        "from hybridpar.machine import supervise\n"
        "def started(*more, **options):\n    raise KeyError\n"
        "supervise.launch_workers = train.prepare_worker = started\ncli._fail = lambda error, debug: "
        "7 if isinstance(error, KeyError) else print(error) or error.exit_code\n"
        f"code = cli.main({['train', 'resnet18', *arguments]})\n"
        "heavy = {'torch', 'torchvision', 'tvm', 'matplotlib', 'sklearn', 'networkx'}\n"
        "print(code, heavy & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == ends, done.stderr
    assert said in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--resume"], "nothing to resume"),
        (["--resume-from", "/etc/passwd"], "/etc/passwd is not a checkpoint"),
    ],
)
def test_a_wrong_directory_is_refused_before_anything_is_started(call, monkeypatch, options, said):
    for name in ("machine.supervise.launch_workers", "commands.train.prepare_worker"):
        monkeypatch.setattr(f"hybridpar.{name}", lambda *more, **given: pytest.fail("something was started"))
    code, error = call("train", "resnet18", *options)
    assert code == 2
    assert_one_error(error, said)


def test_a_resumed_run_needs_no_weights(tmp_path):
    """It has read them: the file may be gone."""
    words = ["resnet18", "--preset", "finetune", "--weights", f"{tmp_path}/gone.pth"]
    with pytest.raises(UsageError, match="there is no such file"):
        check_names(COMMANDS.get("train").parse("train", words))
    check_names(COMMANDS.get("train").parse("train", [*words, "--resume"]))


def test_a_job_that_is_not_described_is_an_error(call, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, error = call("train", "resnet18", "--nproc", "2")
    assert code == 2
    assert_one_error(error, "--nproc 2 in a job of 1", "unset")
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
        ({"batch_size": 8, "micro_batches": 2}, "Use --batch-size 12 or more"),
        ({"data": "synthetic:samples=5"}, "Use at most 2 workers"),
    ],
)
def test_too_many_workers_are_told_what_works(options, said):
    answers = run_ranks(too_small, 3, options)
    assert all(said in answer for answer in answers)
