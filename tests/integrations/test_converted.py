"""The scripts of examples/converted on two workers: as they are, converted, and converted without a codec."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hybridpar.comm.world import World
from hybridpar.compress.ddp import CodecState
from hybridpar.sync.meetings import EncodedMeeting
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/converted"

SMALL = ["--epochs", "2", "--samples", "32"]
OPTIONS = {
    "imagenet": ["--dummy", "32", "-a", "shufflenet_v2_x0_5", "-b", "16", "--epochs", "2", "--image-size", "32"],
    "ddp_tutorial": [],
    "snapshot_trainer": ["2", "1", "--batch_size", "64"],
    "torchvision_classification": ["--model", "shufflenet_v2_x0_5", "-b", "8", "--image-size", "32", *SMALL],
    "timm_loop": ["--model", "test_resnet", "-b", "4", "--image-size", "64", *SMALL],
    "dino": ["--arch", "shufflenet_v2_x0_5", "--batch_size_per_gpu", "8", "--image_size", "32", *SMALL],
    "moco": ["-a", "shufflenet_v2_x0_5", "-b", "8", "--image-size", "32", "--moco-k", "64", *SMALL],
    "torchvision_detection": ["-b", "1", "--image-size", "64", "--epochs", "1", "--samples", "4"],
    "accelerate_cv_example": ["--model", "shufflenet_v2_x0_5", "--batch_size", "4", "--image_size", "32", *SMALL],
    "lightning_classifier": ["--model", "shufflenet_v2_x0_5", "--accelerator", "cpu", "--image_size", "32", *SMALL],
}

#: What a script needs besides torch and torchvision.
NEEDS = {"timm_loop": "timm", "accelerate_cv_example": "accelerate", "lightning_classifier": "lightning"}


def run_scripts(world: World, folder: str, jobs: list[tuple[str, list[str]]]) -> dict[str, dict[str, Any]]:
    """Run scripts as torchrun would, in the process group that is there; by name what they print, and exchanges."""
    exchange, carry, calls, found = CodecState.exchange, EncodedMeeting.meet, list[int](), {}

    def count(state: CodecState, bucket: Any) -> Any:
        calls.append(1)
        return exchange(state, bucket)

    def count_of_engine(*given: Any) -> Any:  # Lightning's strategy has an engine, and no hook on DDP
        calls.append(1)
        return carry(*given)

    count.__annotations__ = {}  # DDP compares them with its own types
    rank = str(world.rank)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "ACCELERATE_USE_CPU": "true"}
    with (
        mock.patch.dict(os.environ, place),
        mock.patch.object(CodecState, "exchange", count),
        mock.patch.object(EncodedMeeting, "meet", count_of_engine),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for script, options in jobs:
            name = Path(script).stem
            (place_of_it := Path(folder, f"run-{name}")).mkdir(exist_ok=True)
            output = io.StringIO()
            calls.clear()
            with (
                contextlib.chdir(place_of_it),
                contextlib.redirect_stdout(output),
                mock.patch.object(sys, "argv", [script, *options]),
            ):
                runpy.run_path(script, run_name="__main__")
            found[name] = {"lines": output.getvalue().splitlines(), "exchanges": len(calls)}
            if "accelerate" in sys.modules:
                sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
            world.barrier()  # the next one may read files of this one
    return found


def convert(name: str) -> str:
    """The script with its diff applied, which must fit."""
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    removed, hunk = 0, re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
    texts = (FOLDER / f"{name}.diff").read_text().splitlines()
    for number, text in enumerate(texts):
        if (match := hunk.match(text)) is None:
            continue
        olds, news = (1 if match[place] is None else int(match[place]) for place in (2, 4))
        place = int(match[3]) - 1 + (0 if news else 1)
        body = texts[number + 1 : number + 1 + olds + news]
        assert lines[place : place + olds] == [line[1:] for line in body[:olds]], f"{name}.diff does not fit"
        lines[place : place + olds] = [line[1:] for line in body[olds:]]
        removed += olds
    assert removed
    return "\n".join(lines) + "\n"


def test_there_is_a_diff_of_three_lines_for_each() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(OPTIONS) == {path.stem for path in FOLDER.glob("*.diff")}
    readme = (FOLDER / "README.md").read_text()
    for name in OPTIONS:
        lines = (FOLDER / f"{name}.diff").read_text().splitlines()[2:]
        for sign in "+-":
            assert 1 <= sum(line.startswith(sign) for line in lines if line[0] != "@") <= 3 or sign == "-", name
        assert f"[{name}.py]({name}.py)" in readme
        assert f"[{name}.diff]({name}.diff)" in readme


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_converted_script_on_two_workers(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    converted = convert(name)
    texts = {
        "original": (FOLDER / f"{name}.py").read_text(),
        "converted": converted,
        "none": re.sub(r'compress="[^"]+"', 'compress="none"', converted),
    }
    for variant, text in texts.items():
        (tmp_path / f"{variant}.py").write_text(text)
    found = run_ranks(run_scripts, 2, str(tmp_path), [(str(tmp_path / f"{one}.py"), OPTIONS[name]) for one in texts])[0]
    original, compressed, none = (found[variant] for variant in texts)
    assert len(original["lines"]) >= 2
    assert none == original  # losses to the last digit that is printed
    assert original["exchanges"] == 0
    assert compressed["exchanges"] > 0
    assert len(compressed["lines"]) == len(original["lines"])
    assert compressed["lines"] != original["lines"]
    assert "nan" not in " ".join(compressed["lines"])


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_scripts_compile(name: str) -> None:
    for text in ((FOLDER / f"{name}.py").read_text(), convert(name)):
        compile(text, name, "exec")
