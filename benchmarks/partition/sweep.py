"""Checks on many models and random convex cuts that the split model trains the same as the unsplit one.

Writes one line per model to results/sweep.csv: how many random convex cuts (K = 2 to 8, ten seeds each) gave the same
forward pass, buffers, evaluation and state dict bit for bit, how many the same gradients bit for bit, and the largest
relative difference of a gradient where the sum over a fan-out was taken in another order.

Run from the root of the repository: python -m benchmarks.partition.sweep
"""

from __future__ import annotations

import platform
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.partition.check import compare_split, random_convex_stages, reference_step
from benchmarks.partition.models import SWEEP, sweep_model
from benchmarks.rig.launch import run_command
from benchmarks.rig.records import read_dicts, write_dicts
from benchmarks.rig.rows import commit, now, processor
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import find_units


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare random cuts of many models with the unsplit model."""

    models: tuple[str, ...] = SWEEP
    """Lines of other models stay as they are."""
    seeds: int = 10
    """Cuts of each number of stages."""
    resume: bool = False
    """Leave out the models that have a line."""
    output: Path = Path(__file__).parent / "results" / "sweep.csv"
    """Table to write."""


def check_model(name: str, seeds: int) -> dict[str, object]:
    """The line of a model."""
    torch.manual_seed(0)
    model, example = sweep_model(name)
    units = find_units(trace_model(model, [example]), [example])
    reference = reference_step(model, example)
    begin = time.perf_counter()
    differences = []
    for stages in range(2, 9):
        for seed in range(seeds):
            cut = random_convex_stages(units.graph, stages, random.Random(1000 * stages + seed))
            differences.append(compare_split(units, cut, example, reference, load=seed == 0))
    return {
        "model": name,
        "trace": "fx with leaves" if units.traced.leaves else "fx",
        "eval_graph": "own" if units.evaluate is not None else "same",
        "dtype": str(example.dtype).removeprefix("torch."),
        "nodes": len(units.train.compute),
        "units": len(units.graph),
        "cuts": len(differences),
        "equal": sum(item.is_equal for item in differences),
        "forward_bit_equal": sum(item.forward for item in differences),
        "gradients_bit_equal": sum(item.gradient == 0 for item in differences),
        "largest_gradient_difference": f"{max(item.gradient for item in differences):.2g}",
        "buffers_bit_equal": sum(item.buffers for item in differences),
        "evaluation_bit_equal": sum(item.evaluation for item in differences),
        "state_dict_equal": sum(item.state for item in differences),
        "seconds": f"{time.perf_counter() - begin:.1f}",
        "date": now(),
        "device": processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def main(options: Options) -> int:
    """Check every model, and write the table after each, because all take an hour; 1 where a cut is not equal."""
    torch.set_num_threads(1)
    rows: dict[str, dict[str, object]] = {row["model"]: dict(row) for row in read_dicts(options.output)}
    failed = False
    for name in options.models:
        if options.resume and name in rows:
            continue
        row = rows[name] = check_model(name, options.seeds)
        write_dicts(options.output, [rows[model] for model in SWEEP if model in rows])
        failed |= row["equal"] != row["cuts"]
        print(f"{name}: {row['equal']} of {row['cuts']} equal, {row['seconds']} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    run_command(main, Options)
