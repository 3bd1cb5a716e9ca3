"""Trains two steps with every pair of options, or with a sample of them, and lists the pairs that end in a traceback.

    python scripts/option_pairs.py --count 40 --seed 1       40 pairs, in this machine's CPUs, with one worker
    python scripts/option_pairs.py --workers 2 --count 10    with two workers
    python scripts/option_pairs.py --workers 2 compile batch-norm    the pairs of named options

A pair may train or be refused by one error; anything else is a fault. The exit code is 1 where there is a fault.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Each option of `hybridpar train` that changes a step, with a value that is not its default.
_LINES = """
nesterov, compile, cuda-graph, deterministic, shard-optimizer, profile, no-guard, no-hierarchy, resume, amp bf16,
augment randaugment, batch-norm sync, bucket-mb 0.1, clip-norm 1, compress onebit, cutmix 0.5, double-buffer half,
drop-rate 0.1, freeze stem*, kernels auto, label-smoothing 0.1, layer-decay 0.8, loss bce, lr 0.02,
lr-per-sample 0.001, lr-schedule plateau, memory-format channels_last, micro-batches 2, mixup 0.2, model-ema 0.9,
optimizer adamw, plan auto, recipe onebit-sgd, recompute 0, offload 0, replicas 2, schedule gpipe, select-batch 1,
shares 2,1, stages 2, stop-early 1, sync outer:2, timeline t.json, sync-lanes 1, warm-start-steps 1, weights none
"""
OPTIONS = {name: value for name, *value in (part.split() for part in re.split(r",\s", _LINES))}

BASE = ("examples.user_model:small_net", "--data", "synthetic", "--synthetic-samples", "32", "--image-size", "8")
BASE += ("--batch-size", "16", "--log", "none")


def fault(pair: Sequence[str], workers: int, timeout: float = 300.0) -> str:
    """What is wrong with how a run with these options ends; empty where nothing is."""
    words = [word for option in pair for word in (f"--{option}", *OPTIONS[option])]
    words += [] if "steps" in pair or "select-batch" in pair else ["--steps", "2"]
    words += ["--epochs", "1"] if "select-batch" in pair else []
    words += [] if "plan" in pair else ["--plan", "none"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hybridpar", "train", *BASE, *words, "--workers", str(workers)]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return f"no end after {timeout:.0f} s"
    if "Traceback" in done.stderr:
        return done.stderr.strip().splitlines()[-1]
    refused = done.returncode == 2 and done.stderr.count("error: ") == 1
    return "" if done.returncode == 0 or refused else f"ended with {done.returncode}: {done.stderr.strip()[-200:]}"


def main() -> int:
    """Run the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", choices=[*OPTIONS, []], help="only pairs of these options")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--count", type=int, default=0, help="how many pairs are drawn; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    pairs = list(itertools.combinations(given.options or OPTIONS, 2))
    random.Random(given.seed).shuffle(pairs)
    faults = 0
    for pair in pairs[: given.count or None]:
        message = fault(pair, given.workers)
        faults += bool(message)
        print(f"{' + '.join(pair)}: {message or 'fine'}", flush=True)
    print(f"{faults} faults")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
