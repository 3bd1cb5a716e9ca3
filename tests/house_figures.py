"""Measures how simple the layout of the package is, and prints the table of docs/architecture.md.

    python -m tests.house_figures            print the table
    python -m tests.house_figures --write    put it into docs/architecture.md

The structure is read from the imports. For the walks a profiler notes which files of the package execute a
function while a training step, or a command, runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tests.structure import PACKAGE, ROOT, code_lines, floors, layers, modules, python_files

DOCUMENT = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- figures: python -m tests.house_figures --write -->", "<!-- end of figures -->"

#: (figure, value before the layout of 0.1.0 was redone, target)
BEFORE_AND_TARGET = {
    "Python files": ("370", "-"),
    "lines of code (without blanks, comments, docstrings)": ("41,038", "38,000"),
    "modules directly under `hybridpar/`": ("65", "8"),
    "folders and top-level modules (layers)": ("70", "30"),
    "floors of imports": ("18", "13"),
    "imports from layer to layer": ("378", "160"),
    "circles of modules, imports inside functions counted": ("2", "0"),
    "files that run between a gradient's hook and the optimizer (`onebit`, two workers)": ("24", "12"),
    "files that run in a step of two stages on one worker": ("27", "12"),
    "files that run from `hybridpar train` to the end of its first step": ("75", "20"),
}

_FUNCTION = 0x1  # CO_OPTIMIZED: the code of a function, not of a module or of a class


class Recorder:
    """Notes the files of the package that execute a function, in all threads that start after it.

    Args:
        until: Qualified name of a function; nothing is noted once it has returned.
    """

    def __init__(self, until: str = "") -> None:
        self.files: set[str] = set()
        self.on = False
        self._until = until
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "return" and code.co_qualname == self._until:
            self.on = False
        if self.on and event == "call" and code.co_flags & _FUNCTION and code.co_filename.startswith(str(PACKAGE)):
            self.files.add(os.path.relpath(code.co_filename, PACKAGE))

    def stop(self) -> list[str]:
        """The files; nothing is noted from now on."""
        self.on = False
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)
        return sorted(self.files)


def gradient_walk(world: Any) -> list[str]:
    """Files between the hook of the first gradient and the optimizer, in the fourth step of one of two workers."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from hybridpar import TrainConfig, Trainer
    from tests.small_nets import plain

    recorder = Recorder()
    net = plain()
    last = list(net.parameters())[-1]
    with Trainer(net, config=TrainConfig(compress="onebit", lr=0.01), world=world) as trainer:
        batch = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
        for _ in range(3):
            trainer.step(batch)

        def begin(_: torch.Tensor) -> None:
            recorder.on = True

        def end(*_: Any) -> None:
            recorder.on = False

        last.register_hook(begin)
        register_optimizer_step_post_hook(end)
        trainer.step(batch)
        return recorder.stop()


def stage_walk(world: Any) -> list[str]:
    """Files that run in the fourth step of a model in two stages on one worker."""
    import torch

    from hybridpar import TrainConfig, Trainer
    from tests.small_nets import plain

    recorder = Recorder()
    batch = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
    config = TrainConfig(stages=2, micro_batches=4, lr=0.01)
    with Trainer(plain(), config=config, world=world, example=batch[0][:2]) as trainer:
        for _ in range(3):
            trainer.step(batch)
        recorder.on = True
        trainer.step(batch)
        return recorder.stop()


_SITE = """
import atexit, json, os
from pathlib import Path
from tests.house_figures import Recorder
recorder = Recorder(until="Trainer.step")
recorder.on = True
atexit.register(lambda: Path(os.environ["WALK"], str(os.getpid())).write_text(json.dumps(recorder.stop())))
"""


def command_walk() -> list[str]:
    """Files that run in the launching process and in the only worker until the first step has been made."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "found").mkdir()
        (place / "sitecustomize.py").write_text(_SITE)
        environment = {**os.environ, "PYTHONPATH": f"{place}:{ROOT}", "WALK": str(place / "found")}
        arguments = ["train", "tests.small_nets:plain", "--data", "synthetic", "--image-size", "8", "--steps", "1"]
        more = ["--synthetic-samples", "64", "--batch-size", "16", "--workers", "1", "--plan", "none"]
        subprocess.run(
            [sys.executable, "-m", "hybridpar", *arguments, *more, "--run-dir", str(place / "run")],
            env=environment,
            cwd=ROOT,
            check=True,
            capture_output=True,
            timeout=300,
        )
        found: set[str] = set()
        for file in (place / "found").iterdir():
            found.update(json.loads(file.read_text()))
        return sorted(found)


def circles() -> int:
    """Groups of modules that import each other in a circle."""
    import networkx as nx

    graph = nx.DiGraph([(module, imported) for module, others in modules().items() for imported in others])
    return sum(1 for group in nx.strongly_connected_components(graph) if len(group) > 1)


def figures() -> dict[str, int]:
    """Every figure of the table."""
    from tests.ranks import run_ranks

    files, graph = python_files("hybridpar"), layers()
    values = (
        len(files),
        sum(map(code_lines, files)),
        len(list(PACKAGE.glob("*.py"))),
        len(graph),
        max(floors(graph).values()),
        sum(map(len, graph.values())),
        circles(),
        len(run_ranks(gradient_walk, 2, shared_memory=False)[0]),
        len(run_ranks(stage_walk, 1)[0]),
        len(command_walk()),
    )
    return dict(zip(BEFORE_AND_TARGET, values, strict=True))


def table() -> str:
    """The figures as a Markdown table."""
    lines = ["| | before | now | target |", "|---|---|---|---|"]
    for name, value in figures().items():
        before, target = BEFORE_AND_TARGET[name]
        lines.append(f"| {name} | {before} | {value:,} | {'at most ' if target.strip('-') else ''}{target} |")
    return "\n".join(lines)


def main(write: bool) -> None:
    """Print the table, or put it into docs/architecture.md."""
    text = table()
    print(text)
    if write:
        document = DOCUMENT.read_text(encoding="utf-8")
        head, rest = document.split(BEGIN)
        DOCUMENT.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
