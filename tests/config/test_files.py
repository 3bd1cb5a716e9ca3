"""Tests of configuration files: what they stand for on a command line, what a run writes, and wrong files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hybridpar.cli import main
from hybridpar.commands import COMMANDS
from hybridpar.commands.train import Train
from hybridpar.config import TrainConfig
from hybridpar.config.files import config_text, preset_names, read_settings
from hybridpar.errors import UsageError
from hybridpar.optim.schedule import rate_factor


def parsed(*words: str) -> Train:
    return COMMANDS.get("train").parse("train", words)


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "a.toml"
    file.write_text(text)
    return str(file)


def test_typed_options_win_over_the_file_over_the_preset(tmp_path: Path) -> None:
    file = write(tmp_path, 'model = "resnet34"\n[optimisation]\nlr = 0.3\nweight-decay = 0.5\nepochs = 3\n')
    for words in (("--preset", "digits", "--config", file), (f"--config={file}", "--preset=digits")):
        train = parsed(*words, "--lr", "0.5")
        assert (train.model, train.lr, train.weight_decay, train.epochs) == ("resnet34", 0.5, 0.5, 3)
        assert parsed("vgg11", *words).model == parsed(*words, "vgg11").model == "vgg11"
        assert train.batch_size == 64
        assert {"lr", "weight_decay", "epochs", "batch_size"} <= train.given


def test_every_kind_of_value(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'model = "resnet18"\nguard = false\ncompile = true\nimage-size = 64\ndrop = 0.25\nrecompute = [1, 2]\n'
        'sync = "outer:4,delay=2"\nmodel-ema = 0.99\n'
        'data-root = "/x y"\nclip-grad = 1\nplan = "none"\nweight-decay = -0.0\n',
    )
    train = parsed("--config", file)
    assert (train.guard, train.compile, train.recompute) == (False, True, (1, 2))
    assert (train.image_size, train.drop) == (64, 0.25)
    assert (train.sync, train.model_ema) == ("outer:4,delay=2", 0.99)
    assert (train.data_root, train.clip_grad, train.plan) == (Path("/x y"), 1.0, "none")


def test_the_table_that_an_option_stands_in_does_not_matter(tmp_path: Path) -> None:
    train = parsed("--config", write(tmp_path, '[mine]\nmodel = "resnet18"\nlr = 0.3\n[planning]\nepochs = 3\n'))
    assert (train.model, train.lr, train.epochs) == ("resnet18", 0.3, 3)


def test_a_flag_of_the_file_is_taken_back_by_hand(tmp_path: Path) -> None:
    file = write(tmp_path, 'model = "resnet18"\nguard = true\ncompile = true\n')
    assert parsed("--config", file, "--no-guard").guard is False
    assert parsed("--config", file, "--no-compile").compile is False
    file = write(tmp_path, 'model = "resnet18"\nguard = false\nmix = "none"\nplan = "plan.json"\n')
    assert parsed("--config", file, "--guard").guard is True
    assert (parsed("--config", file).mix, parsed("--config", file).plan) == (None, tmp_path / "plan.json")


def test_what_a_run_writes_is_what_it_was_given(tmp_path: Path) -> None:
    config = TrainConfig(
        lr=0.3,
        optimizer="sgd:momentum=0.2",
        data_root=Path('odd "name"\\x'),
        guard=False,
        clip_grad=2.0,
        sync="ps:servers=2",
    )
    file = write(tmp_path, config_text(config, "package.module:factory", named=["stages"]))
    assert read_settings(Path(file)).keys() == {
        *("model", "lr", "optimizer", "data_root", "guard", "clip_grad", "stages", "sync")
    }
    train = parsed("--config", file)
    assert train.model == "package.module:factory"
    assert all(getattr(train, name) == value for name, value in vars(config).items() if name != "given")


def test_a_run_that_is_repeated_follows_its_plan_and_writes_elsewhere(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=Path("there"))
    file = write(tmp_path, config_text(config, "resnet18", plan="plan.json"))
    train = parsed("--config", file)
    assert (train.plan, train.run_dir) == (tmp_path / "plan.json", None)


def test_paths_of_a_run_s_file_are_where_they_were(tmp_path: Path) -> None:
    config = TrainConfig(timeline=Path("t.json"), resume_from=Path("runs/a/checkpoints/step-3"), plan=Path("p.json"))
    train = parsed("--config", write(tmp_path, config_text(config, "resnet18")))
    here = Path.cwd()
    assert (train.timeline, train.plan) == (here / "t.json", here / "p.json")
    assert train.resume_from == here / "runs/a/checkpoints/step-3"


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid_with_and_without_servers(name: str) -> None:
    options = parsed("--preset", name)
    for sync in ("allreduce", "ps", "ps-async", "softsync:1"):
        replace(options, sync=sync).check()
    assert preset_names()[name].endswith((".", ")."))


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--preset", "list"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out.splitlines()
    assert dict(line.split(maxsplit=1) for line in listed) == preset_names()


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("a1", {0: 1e-4, 4: 4.02e-3, 5: 1e-6 + 4.999e-3 * (1 + math.cos(math.pi / 120)) / 2, 300: 2.5005e-3}),
        ("a3", {0: 1e-4, 50: 4.0005e-3}),
        ("cifar", {0: 0.1, 59: 0.1, 60: 0.02, 120: 0.004, 199: 8e-4}),
    ],
)
def test_rates_of_presets_are_those_of_their_sources(name: str, rates: dict[int, float]) -> None:
    """Learning rates of some epochs, by timm's cosine without a prefix and by torch's MultiStepLR."""
    options = parsed("--preset", name)
    found = {at: options.peak_lr * rate_factor(10 * at, 10 * options.epochs, 10, options) for at in rates}
    assert found == pytest.approx(rates, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n[optimisation]\nbatchsize = 3\n", ("a.toml", "'batchsize'", "batch-size")),
        ("[optimisation]\n\nepochs = 'x'\n", ('a.toml: epochs cannot be "x"', "a valid integer")),
        ("lr = 1\n[optimisation]\nlr = 2\n", ("a.toml sets lr twice",)),
        ("lr = 1.1.1\n", ("a.toml", "line 1")),
        ("[optimisation]\nlr = {a = 1}\n", ("lr cannot be {",)),
        ("amp = 'bf15'\n", ("amp cannot be", "'bf16'")),
        ("recompute = [0, true]\n", ("recompute cannot be", "a valid integer")),
        ("freeze = 'conv1'\n", ("freeze cannot be", "a list")),
    ],
)
def test_a_wrong_file_is_named_with_its_option(tmp_path: Path, text: str, said: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        parsed("resnet18", "--config", write(tmp_path, text))
    assert all(part in str(caught.value) for part in said), str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "digts"], "digits"),
        (["--config", "nowhere.toml"], "No such file"),
        (["--config"], "without a value"),
    ],
)
def test_wrong_words(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parsed("resnet18", *words)
