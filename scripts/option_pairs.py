"""Trains two steps with every pair of options, or with a sample of them, and lists the pairs that end in a traceback.

    python scripts/option_pairs.py --count 40 --seed 1       40 pairs, in this machine's CPUs, with one worker
    python scripts/option_pairs.py --workers 2 --count 10    with two workers
    python scripts/option_pairs.py --workers 2 compile batch-norm    the pairs of named options

A pair may train or be refused by one error; anything else is a fault. The exit code is 1 where there is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from hybridpar import cli
from hybridpar.machine import supervise

#: Processes that begin as a copy of this one, which has imported what takes most of the time of such a run.
FORKS = multiprocessing.get_context("fork")
IMPORTED = "torchvision.transforms.v2", "hybridpar.run.run", "torch._inductor.compile_fx", "matplotlib.figure"
ROOT = Path(__file__).resolve().parents[1]

#: Options of `hybridpar train` that change a step, with values that are not their defaults, and with what they need.
OPTIONS = re.split(
    r",\s+",
    """\
compile, cuda-graph on, deterministic, no-guard, profile, shard-optimizer, amp bf16, amp fp16,
augment ra:n=2,m=9, augment erase=0.5, augment color_jitter=0.4, augment repeats=2,
batch-norm frozen, batch-norm local, batch-norm sync, batch-size 5,
checkpoints 1, clip-grad 1, clip-grad 1,mode=agc, compress auto,
compress onebit, compress powersgd:rank=2, drop 0.1, freeze 0*, image-size 8,test=12, kernels auto,
loader-workers 1, loss bce, loss ce:smoothing=0.1, lr 0.02, lr 0.1/256, lr-schedule plateau,
memory-format channels_last, micro-batches 2, mix mixup=0.2, mix cutmix=0.5, model-ema 0.9, offload 0 --stages 2,
optimizer adafactor, optimizer adamw:betas=0.8/0.9,
optimizer sgd:momentum=0, optimizer sgd:nesterov, optimizer sgd:layer_decay=0.8,head_lr=2,
placement loop --stages 4, plan auto --epochs 9999 --checkpoints stop=1,
recompute 0 --stages 2, recompute all, replicas 2, schedule gpipe --stages 2,
select-batch 1 --epochs 2 --data synthetic:samples=512, shares 2,1, shares auto, stages 2, checkpoints stop=1,
sync allreduce:hierarchy=off, sync allreduce:late=delay, sync allreduce:late=half, sync allreduce:lanes=1,
sync local:2, sync onebit-sgd, sync outer:2, sync outer:2,fragments=2, sync ps, sync ps-async, test-every 2,
timeline t.json, weights none, resume --epochs 3""",
)

BASE = ("scripts.option_pairs:net", "--data", "synthetic:samples=32", "--image-size", "8")
BASE += ("--batch-size", "16", "--epochs", "1", "--plan", "none", "--log", "none")


def net(num_classes: int = 10, drop_rate: float = 0.0) -> nn.Module:
    """A small residual network with dropout."""
    from examples.user_model import small_net  # the path is set by `main`

    layers = list(small_net(num_classes).children())
    return nn.Sequential(*layers[:-1], nn.Dropout(drop_rate), layers[-1])


class Fork(FORKS.Process):
    """What takes the place of `subprocess.Popen` for workers: a fork has torch imported already."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **_: object) -> None:
        super().__init__(target=_run, args=(command[command.index("train") :], env))
        self.start()

    def poll(self) -> int | None:
        """The exit code, or None."""
        self.join(0)
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once the process has ended."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("train", timeout or 0.0)
        return self.exitcode

    returncode = property(poll)

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)


def trained(pair: Sequence[str], workers: int, timeout: float = 300.0) -> str:
    """What is wrong with how a run with these options ends; empty where nothing is."""
    fresh = [option for option in pair if not option.startswith("resume")]
    with tempfile.TemporaryDirectory() as folder:
        for options in (fresh, pair) if len(fresh) < len(pair) else (pair,):
            words = [word for option in options for word in f"--{option}".split()]
            message = _ended(["train", *BASE, *words, "--nproc", str(workers)], folder, timeout)
            if message:
                return message
    return ""


def _ended(arguments: Sequence[str], folder: str, timeout: float) -> str:
    """What is wrong with how a command ends that a fork runs in a folder."""
    run = FORKS.Process(target=_run, args=(arguments, {}, folder))
    run.start()
    run.join(timeout)
    code = run.exitcode
    run.kill()
    with contextlib.suppress(ProcessLookupError):  # what it started and left behind
        os.killpg(run.pid or 0, signal.SIGKILL)
    run.join()
    return fault(code, Path(folder, "stderr").read_text())


def fault(code: int | None, error: str) -> str:
    """What is wrong with an exit code, None where the time was over, and with what was said on standard error."""
    if "Traceback" in error:
        return error.strip().splitlines()[-1]
    refused = code == 2 and error.count("error: ") == 1
    return "" if code == 0 or refused else f"ended with {code}: {error.strip()[-200:]}"


def _run(arguments: Sequence[str], environment: Mapping[str, str], folder: str = "") -> None:
    """Run a command in this process, a fork; in a folder, whose files take what it prints, as the first of a group.

    Its workers stay in that group, so that whoever ends it ends them.
    """
    os.environ.update(environment)
    if folder:
        os.setsid()
        os.chdir(folder)
        for descriptor, name in enumerate(("stdout", "stderr"), start=1):
            with open(name, "wb") as file:
                os.dup2(file.fileno(), descriptor)
    sys.exit(cli.main(arguments))


def main() -> int:
    """Run the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", help="only pairs of these options")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--count", type=int, default=0, help="how many pairs are drawn; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # for the model
    os.environ["PYTHONPATH"] = str(ROOT)  # and in workers
    vars(supervise)["subprocess"] = types.SimpleNamespace(
        Popen=Fork, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=subprocess.DEVNULL
    )
    for module in IMPORTED:
        importlib.import_module(module)
    names = {option: option.split()[0] for option in OPTIONS}
    wanted = [option for option in OPTIONS if names[option] in given.options or not given.options]
    pairs = [pair for pair in itertools.combinations(wanted, 2) if names[pair[0]] != names[pair[1]]]
    random.Random(given.seed).shuffle(pairs)
    faults = 0
    for pair in pairs[: given.count or None]:
        message = trained(pair, given.workers)
        faults += bool(message)
        print(f"{' + '.join(pair)}: {message or 'fine'}", flush=True)
    print(f"{faults} faults")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
