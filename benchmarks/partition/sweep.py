"""Checks on many models and random convex cuts that the split model trains the same as the unsplit one.

Writes one line per model to results/sweep.csv: how many random convex cuts (K = 2 to 8, ten seeds each) gave the same
forward pass, buffers, evaluation and state dict bit for bit, how many the same gradients bit for bit, and the largest
relative difference of a gradient where the sum over a fan-out was taken in another order.

Run from the root of the repository: python -m benchmarks.partition.sweep
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch

from benchmarks.partition.check import compare_split, random_convex_stages, reference_step
from benchmarks.partition.common import setting
from benchmarks.partition.models import SWEEP, sweep_model
from benchmarks.rig.records import read_dicts, write_dicts
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import find_units


def check_model(name: str, seeds: int) -> dict[str, object]:
    torch.manual_seed(0)
    model, example = sweep_model(name)
    units = find_units(trace_model(model, [example]), [example])
    reference = reference_step(model, example)
    found = []
    begin = time.perf_counter()
    for stages in range(2, 9):
        for seed in range(seeds):
            cut = random_convex_stages(units.graph, stages, random.Random(1000 * stages + seed))
            found.append(compare_split(units, cut, example, reference, load=seed == 0))
    return {
        "model": name,
        "trace": "fx with leaves" if units.traced.leaves else "fx",
        "eval_graph": "own" if units.evaluate is not None else "same",
        "dtype": str(example.dtype).removeprefix("torch."),
        "nodes": len(units.train.compute),
        "units": len(units.graph),
        "cuts": len(found),
        "equal": sum(item.is_equal for item in found),
        "forward_bit_equal": sum(item.forward for item in found),
        "gradients_bit_equal": sum(item.gradient == 0 for item in found),
        "largest_gradient_difference": f"{max(item.gradient for item in found):.2g}",
        "buffers_bit_equal": sum(item.buffers for item in found),
        "evaluation_bit_equal": sum(item.evaluation for item in found),
        "state_dict_equal": sum(item.state for item in found),
        "seconds": f"{time.perf_counter() - begin:.1f}",
        **setting(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SWEEP), help="lines of other models stay as they are")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sweep.csv")
    parser.add_argument("--resume", action="store_true", help="leave out the models that have a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, object]] = {row["model"]: dict(row) for row in read_dicts(options.output)}
    failed = 0
    for name in options.models:
        if options.resume and name in rows:
            continue
        row = rows[name] = check_model(name, options.seeds)
        # After every model, because the whole sweep takes an hour.
        write_dicts(options.output, [rows[one] for one in SWEEP if one in rows])
        failed += row["equal"] != row["cuts"]
        print(f"{name}: {row['equal']} of {row['cuts']} equal, {row['seconds']} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
