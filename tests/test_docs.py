"""Runs the commands and the code in the documents, and checks their links.

Every fenced block is code of a known kind. `python` and `bash` blocks are run, in order, in a directory that has the
examples in it, as a checkout has. `pip` and `make` install and start what runs this test, so their lines are only
checked. A comment above a block changes that:

    <!-- not run: reason -->                 too long, or needs what a test does not have; commands must still parse
    <!-- run with: --steps 2 -->             options that `train`, `plan` and `tune` get besides, to be short
    <!-- run with: tests.small_nets:plain --steps 2 -->     and a model that takes the place of theirs
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn

from hybridpar import cli
from hybridpar.comm.world import World
from hybridpar.commands import COMMANDS
from hybridpar.compress import CODECS
from hybridpar.config.data import OTHER_SETS, TORCHVISION_SETS
from hybridpar.config.files import read_settings
from hybridpar.observe.loggers import LOGGERS
from hybridpar.observe.records import SUMMARY_FIGURES
from hybridpar.run.run import run_training
from hybridpar.schedule.schedules import SCHEDULES
from tests.integrations.test_accelerate import StandIn
from tests.integrations.test_lightning import STRATEGY, StandInStrategy
from tests.ranks import run_ranks
from tests.runs import restored_modes
from tests.server.jobs import placed, store

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

#: Programs that install this suite, or start it.
SETUP = ("pip", "make", ".ci/run")
#: They share photographs and runs, so they are run one after the other in one directory, and equal commands once.
SHARED = ("tutorial.md", "README.md", "train.md", "data.md", "planner.md")

_BLOCK = re.compile(
    r"(?:<!-- (?P<note>[^>]*?) -->\n)?^```(?P<kind>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    place: str
    kind: str
    code: str
    note: str

    @property
    def runs(self) -> bool:
        return not self.note.startswith("not run: ")

    def commands(self) -> list[list[str]]:
        """The lines of a bash block as words, without comments."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("kind")) + 1
        found.append(Block(f"{document.name}:{line}", match["kind"], match["code"], match["note"] or ""))
    assert text.count("```") == 2 * len(found), f"{document.name} has a block that this test does not see"
    return found


ALL_BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]


def words_of(command: list[str], program: str) -> list[str] | None:
    """What follows a program in a command, or None where the command is another one."""
    return command[command.index(program) + 1 :] if program in command else None


def test_every_block_is_of_a_known_kind() -> None:
    assert {block.kind for block in ALL_BLOCKS} <= {"python", "bash", "toml", "diff"}
    assert all(block.runs for block in blocks(ROOT / "README.md"))
    for block in ALL_BLOCKS:
        assert re.fullmatch(r"|not run: .+|run with: .+", block.note), f"{block.place}: {block.note!r}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "documents",
    [
        sorted((path for path in DOCUMENTS if path.name in SHARED), key=lambda path: SHARED.index(path.name)),
        *([path] for path in DOCUMENTS if path.name not in SHARED and blocks(path)),
    ],
    ids=lambda documents: documents[0].name,
)
def test_blocks_run(documents: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "examples.user_model", raising=False)
    for registry in (CODECS, LOGGERS, SCHEDULES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))  # a block may register one
    (tmp_path / "new-photos").symlink_to("photos/temple")
    done: set[str] = set()
    with stand_ins():
        for block in (block for document in documents for block in blocks(document) if block.runs):
            if block.kind == "python":
                exec(compile(block.code, block.place, "exec", dont_inherit=True), {"__name__": "__main__"})
            elif block.kind == "bash":
                for command in block.commands():
                    if command[0] not in SETUP and shlex.join(command) not in done:
                        done.add(shlex.join(command))
                        run(command, block)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Classes for those of trainers that the suite does not install; at the end no process group is left."""
    entries = {
        "lightning": {},
        "lightning.pytorch": {"Trainer": SimpleNamespace},
        "lightning.pytorch.strategies": {"DDPStrategy": StandInStrategy},
        "accelerate": {"Accelerator": StandIn},
        "transformers": {"Trainer": StandInOfTransformers, "TrainerCallback": object},
        STRATEGY: {},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, values in entries.items():
            patch.setitem(sys.modules, name, ModuleType(name))
            vars(sys.modules[name]).update(values)
        del sys.modules[STRATEGY]  # is imported anew over the stand-in, and forgotten at the end
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


class StandInOfTransformers:
    """What `compress_trainer` needs of a Trainer of transformers."""

    optimizer = None

    def __init__(self, model: nn.Module) -> None:
        self.model, self.accelerator = model, StandIn()
        self.accelerator.prepare_model = self.accelerator.prepare  # type: ignore[attr-defined]

    def add_callback(self, callback: object) -> None:
        """As theirs."""


def run(command: list[str], block: Block) -> None:
    """Run a command in this process, or `train` in several with torch; tests of `machine` start new ones."""
    assert command[0] == "hybridpar", f"{block.place}: {shlex.join(command)}"
    name, *words = command[1:]
    if name in ("train", "plan", "tune") and not words[0].startswith("-"):
        extra = block.note.removeprefix("run with: ").split()
        if extra and not extra[0].startswith("-"):
            words[0] = extra.pop(0)
        words = [*words, *extra, "--no-tune-process"]
    if name == "evaluate":
        words += ["--nproc", "1"]
    options = COMMANDS.get(name).parse(name, words)
    workers = getattr(options, "nproc", None) or 2
    if name == "train" and workers > 1:
        servers = 0 if options.parameter_servers is None else options.parameter_servers.servers
        with store() as port:
            rank = (run_on_rank, workers + servers, port if options.parameter_servers else None, os.getcwd(), words)
            assert run_ranks(*rank, timeout=180) == [0] * (workers + servers), f"{block.place}: {words}"
    else:
        with restored_modes():
            assert cli.main([name, *words]) == 0, f"{block.place}: {words}"


def run_on_rank(world: World, port: int | None, directory: str, words: list[str]) -> int:
    """One process of a run; servers find the workers by the environment, as torchrun sets it."""
    os.chdir(directory)
    options = COMMANDS.get("train").parse("train", words)
    with restored_modes(), nullcontext() if port is None else placed(world.rank, world.size, port):
        return run_training(options, options.model)


def test_configuration_files_are_read(tmp_path: Path) -> None:
    files = [block for block in ALL_BLOCKS if block.kind == "toml"]
    for block in files:
        (tmp_path / "a.toml").write_text(block.code)
        assert read_settings(tmp_path / "a.toml"), block.place
    assert files


BASH_BLOCKS = [block for block in ALL_BLOCKS if block.kind == "bash"]


@pytest.mark.parametrize("block", BASH_BLOCKS, ids=lambda block: block.place)
def test_commands_parse(block: Block) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in block.commands():
        if (arguments := words_of(command, "hybridpar")) is not None:
            if arguments[:1] not in ([], ["--version"], ["--help"]):
                name, *options = arguments
                if "--config" in options:  # a file that is not here; it names the model
                    at = options.index("--config")
                    options = ["resnet18", *options[:at], *options[at + 2 :]]
                COMMANDS.get(name).parse(name, options)  # exits where it does not parse
        elif command[0] == "make":
            assert command[1] in targets
        elif (arguments := words_of(command, "pip")) is not None:
            assert set(re.findall(r"[a-z]+", arguments[-1])) - {"hybridpar"} <= set(extras)
        else:
            assert (ROOT / command[0]).exists(), f"{block.place}: nobody knows {shlex.join(command)}"


@pytest.mark.parametrize(
    "document",
    [*DOCUMENTS, *sorted((ROOT / "benchmarks").glob("**/*.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target.partition("#")[0]).exists(), f"{document.name} links to {target}"


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {re.match(r"[a-z-]+", line)[0] for line in listed} - {"hybridpar"}
    reasons = re.findall(r'^ +"([a-z-]+)[^"]*", # \w', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert sorted(reasons) == sorted(names), "say behind each dependency, once, why it and not another"


def test_every_key_of_the_summary_is_described() -> None:
    described = set(re.findall(r"`(\w+)`", first_cells("docs/figures.md")))
    assert {row.name for row in SUMMARY_FIGURES} <= described


def first_cells(document: str) -> str:
    """The first cells of all rows of the tables of a document."""
    return " ".join(re.findall(r"^\| (`[^|]+) \|", (ROOT / document).read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("names", "document"),
    [(set(CODECS), "docs/slow-links.md"), (set(SCHEDULES), "docs/parallel.md")],
    ids=["codecs", "schedules"],
)
def test_every_codec_and_schedule_is_described(names: set[str], document: str) -> None:
    lacking = names - set(re.findall(r"`(\w+)[`:]", first_cells(document)))
    assert names
    assert not lacking, f"add a row for each of {lacking} to a table in {document}"


def test_every_command_is_described() -> None:
    text = " ".join(document.read_text() for document in DOCUMENTS)
    lacking = set(COMMANDS) - set(re.findall(r"hybridpar ([a-z-]+)", text))
    assert not lacking, f"no document says what `hybridpar {' or '.join(lacking)}` is for; docs/train.md could"


def test_every_data_set_is_described() -> None:
    assert set(re.findall(r"`([\w/.:]+)`", first_cells("docs/data.md"))) == {*TORCHVISION_SETS, *OTHER_SETS}
