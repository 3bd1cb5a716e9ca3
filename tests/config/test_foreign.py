"""Names and values of other trainers are answered with ours, and the page of the documentation lists them."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import timm.optim

from hybridpar.commands import COMMANDS
from hybridpar.commands.train import Train, check_names
from hybridpar.config.foreign import page, tables
from hybridpar.errors import UsageError

ROWS = [(name, text) for rows in tables()["names"].values() for names, text in rows.items() for name in names.split()]
VALUES = [
    (option, value.replace("*", "224" if option == "--image-size" else "cifar10"))
    for option, rows in tables()["values"].items()
    for values in rows
    for value in values.split()
]

#: What stands behind a name, where that is not 1.
BEHIND = {
    "--opt": "lamb",
    "--optim": "adamw_torch",
    "--interpolation": "bicubic",
    "--train-interpolation": "random",
    "--mean": "0.5 0.5 0.5",
    "--std": "0.5 0.5 0.5",
    "--scale": "0.2 1",
    "--ratio": "0.75 1.33",
    "--opt-betas": "0.9 0.95",
    "--decay-milestones": "30 60",
    "--input-size": "3 224 224",
    "--img-size": "224",
    "--train-crop-size": "224",
    "--val-crop-size": "224",
    "--model-kwargs": "width=2",
    "--opt-kwargs": "momentum=0.5",
    "--amp-dtype": "bfloat16",
    "--precision": "bf16-mixed",
    "--mixed-precision": "fp16",
    "--accelerator": "gpu",
    "--clip-mode": "agc",
    "--gradient-clip-algorithm": "value",
    "--sched": "step",
    "--lr-scheduler": "exponentiallr",
    "--lr-scheduler-type": "linear",
    "--aa": "rand-m9-mstd0.5-inc1",
    "--auto-augment": "ta_wide",
    "--remode": "pixel",
    "--eval-metric": "top1",
    "--metric-for-best-model": "eval_loss",
    "--dataset": "torch/cifar10",
    "--data-set": "hfds/food101",
    "-d": "torch/image_folder",
    "--resume-from-checkpoint": "runs/a/checkpoints/step-20",
}
BELOW_1 = (
    *("--momentum", "--layer-decay", "--smoothing", "--label-smoothing", "--label-smoothing-factor"),
    "--drop-path",
)
BELOW_1 = (*BELOW_1, "--drop-connect", "--model-ema-decay", "--bce-target-thresh")


def answer(*words: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        COMMANDS.get("train").parse("train", ["resnet18", *words])
    return caught.value


def read(line: str) -> Train:
    """The options of a line that an answer says to write, which must be good."""
    options: Train = COMMANDS.get("train").parse("train", ["resnet18", *shlex.split(line)])
    options.check()
    check_names(replace(options, weights=None))  # there is no such file
    return options


def written(error: UsageError) -> str:
    """What an answer says to write instead."""
    return error.fix.partition("\n")[0].removeprefix("Write ")


def test_the_page_is_made_from_the_table() -> None:
    assert (Path(__file__).parents[2] / "docs/names.md").read_text() == page()


@pytest.mark.parametrize(("name", "text"), ROWS)
def test_a_foreign_name_is_answered_with_what_our_parser_reads(name: str, text: str) -> None:
    behind = BEHIND.get(name, "0.5" if name in BELOW_1 else "1").split() if "VALUE" in text else ()
    error = answer(name, *behind)
    assert name in error.what
    assert error.fix.startswith(f"{name}: leave it out: " if text.startswith("(") else "Write --")
    for line in re.findall("`(--[^`]*)`", error.fix):
        read(line.replace("FILE", __file__).replace("--weights`", "--weights default`"))
    if error.fix.startswith("Write"):
        assert "VALUE" not in error.fix
        read(written(error))


@pytest.mark.parametrize(("option", "value"), VALUES)
def test_a_foreign_value_is_answered_with_what_our_parser_reads(option: str, value: str) -> None:
    error = answer(option, value)
    assert error.what == f"there is no {option} {value}"
    read(written(error))


def test_optimizers_of_timm_are_in_timm() -> None:
    names = [value for option, value in VALUES if "timm/" in written(answer(option, value)) and option == "--optimizer"]
    assert names
    assert {*names} <= {*timm.optim.list_optimizers()}


def test_all_foreign_names_of_a_line_are_answered_at_once() -> None:
    error = answer("-b", "64", "-j", "8", "--opt", "sgd", "--wd=1e-4", "--print-freq", "10")
    assert error.what == "there is no --print-freq, no -b, no -j, no --opt, no --wd"
    assert error.fix.splitlines() == [
        "Write --batch-size 64 --loader-workers 8 --optimizer sgd --weight-decay 1e-4",
        "--print-freq: leave it out: the terminal shows every step, and metrics.jsonl has all of them.",
        "-j: these are loader processes; training processes are --nproc.",
    ]


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("--opt adamw --opt-eps 1e-7 --layer-decay 0.7", "--optimizer adamw:eps=1e-7,layer_decay=0.7"),
        ("--optimizer adamw --opt-eps 1e-7", "--optimizer adamw:eps=1e-7"),
        ("--sched step --warmup-epochs 5 --decay-rate 0.2", "--lr-schedule step:warmup=5,rate=0.2"),
        ("--aa rand-m9 --hflip 0", "--augment timm:rand-m9,hflip=0"),
        ("--mixup 0.2 --cutmix 1", "--mix mixup=0.2,cutmix=1"),
        ("--model-ema-steps 32 --model-ema --model-ema-decay 0.99", "--model-ema 0.99,every=32"),
        ("--amp-dtype float16 --amp", "--amp fp16"),
        ("--clip-grad 0.02 --clip-mode agc", "--clip-grad 0.02,mode=agc"),
        ("--dataset torch/cifar10 --dataset-download", "--data cifar10:download=on"),
        ("--gp avg --model-kwargs a=1", "--model-arg global_pool=avg --model-arg a=1"),
        ("--lr_scheduler_type linear", "--lr-schedule poly"),
    ],
)
def test_names_for_the_same_option_are_answered_with_one(typed: str, instead: str) -> None:
    error = answer(*typed.split())
    assert {*shlex.split(written(error))} == {*instead.split()}
    read(written(error))


@pytest.mark.parametrize(
    ("typed", "what", "instead"),
    [
        ("--amp", "there is no --amp without a value", "--amp bf16"),
        ("--model-ema --lr 0.1", "there is no --model-ema without a value", "--model-ema 0.9998"),
        ("--resume ck.pth", "there is no --resume ck.pth", "--weights ck.pth"),
        ("--resume=runs/a/step-7", "there is no --resume runs/a/step-7", "--resume-from runs/a/step-7"),
        ("--device cuda:1", "there is no --device cuda:1", "--device cuda"),
    ],
)
def test_our_names_used_as_others_use_them(typed: str, what: str, instead: str) -> None:
    error = answer(*typed.split())
    assert (error.what, written(error)) == (what, instead)


@pytest.mark.parametrize(
    "line", ["--resume", "--amp bf16 --device cpu", "--model-ema 0.99 --optimizer sgd --data digits"]
)
def test_our_names_and_values_are_read(line: str) -> None:
    read(line)
    assert COMMANDS.get("train").parse("train", [*line.split(), "resnet18"]).model == "resnet18"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--compress", "layer4.* -> powersgd; *.weight -> onebit"),
        ("--compress", "none "),
        ("--model-arg", "size=(1, 2)"),
        ("--run-dir", "runs/VALUE (2)"),
        ("--weights", ""),
    ],
)
def test_values_of_any_text_are_read(option: str, value: str) -> None:
    for words in ([option, value], [f"{option}={value}"]):
        options = COMMANDS.get("train").parse("train", ["resnet18", *words])
        assert str(vars(options)[option[2:].replace("-", "_")]) in (value, str((value,)))


def test_no_name_has_two_answers() -> None:
    names = [name for name, _ in ROWS]
    assert len(names) == len(set(names))
