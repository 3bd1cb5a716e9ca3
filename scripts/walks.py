"""Counts what a reader of one step has to open: files of the package that run, and calls of its functions.

    python scripts/walks.py        a line for each walk
    python scripts/walks.py -v     and the calls of each file

A walk is the fifth training step of ResNet-18 (with one worker; with two workers that send gradients by a codec; with
two stages on one worker), or all that `hybridpar train` does until its first step is over. A profiler counts calls in
all threads of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT / 'hybridpar'}{os.sep}"

#: Options of the steps by walk; the last walk is a command.
STEPS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "two workers, onebit": {"compress": "onebit"},
    "two stages, four micro-batches": {"stages": 2, "micro_batches": 4, "schedule": "1f1b"},
}
COMMAND = "hybridpar train, to the end of its first step"
WALKS = (*STEPS, COMMAND)


class Profile:
    """Calls of functions of the package by file, in this thread and those that start later, while `on`."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.on = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_name != "<module>" and code.co_filename.startswith(PACKAGE):
            self.calls[code.co_filename.removeprefix(PACKAGE)] += 1


def step(walk: str) -> Counter[str]:
    """The calls of one step, in this process, which may be one of two workers."""
    profile = Profile()
    import torch
    import torchvision

    from hybridpar import TrainConfig, Trainer

    torch.manual_seed(0)
    batch = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    config = TrainConfig(plan="none", lr=0.1, **STEPS[walk])
    with Trainer(torchvision.models.resnet18(num_classes=10), config=config, example=batch[0][:4]) as trainer:
        for profile.on in (False, False, False, False, True):
            trainer.step(batch)
            trainer.wait()
        profile.on = False
    return profile.calls


def command() -> Counter[str]:
    """The calls of `hybridpar train` with one step and nothing planned, in this process."""
    profile = Profile()
    profile.on = True
    options = ["--data=synthetic", "--nproc=1", "--plan=none", "--steps=1", "--batch-size=8", "--image-size=32"]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["hybridpar", "train", "resnet18", *options, f"--run-dir={folder}/run"]
        try:
            runpy.run_module("hybridpar", run_name="__main__")
        except SystemExit as ending:
            if ending.code:
                raise
    profile.on = False
    return profile.calls


def count(walk: str) -> Counter[str]:
    """The calls of a walk by file, made in processes of its own.

    Raises:
        RuntimeError: One of them failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = 2 if walk == "two workers, onebit" else 1
    common = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    ranks: list[dict[str, str]] = [{}]
    if workers > 1:
        common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--count", walk, "--output", os.path.join(folder, str(rank))],
                env=common | variables,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, variables in enumerate(ranks)
        ]
        errors = [worker.communicate()[1] for worker in started]
        if any(worker.returncode for worker in started):
            raise RuntimeError(f"the walk of {walk} failed:\n" + "\n".join(errors))
        return Counter(json.loads(Path(folder, "0").read_text()))


def main() -> None:
    """Print the walks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-v", "--verbose", action="store_true", help="list the files")
    parser.add_argument("--count", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        calls = command() if options.count == COMMAND else step(options.count)
        Path(options.output).write_text(json.dumps(calls))
        return
    for walk in WALKS:
        calls = count(walk)
        print(f"{walk}: {len(calls)} files, {calls.total():,} calls")
        for name, times in calls.most_common() if options.verbose else ():
            print(f"{times:8} {name}")


if __name__ == "__main__":
    main()
