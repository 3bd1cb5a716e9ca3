"""Measures how long it takes to partition a model.

A search over plans partitions the same model many times, so this must be short.

For each model, and for random graphs of 500 units, K = 2 to 8: milliseconds to balance, the least of three. Times of
units are the roofline's: how long the algorithm takes hardly depends on them. Writes results/speed.csv.

Run from the root of the repository: python -m benchmarks.partition.speed
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch

from benchmarks.partition.common import setting
from benchmarks.partition.models import sweep_model
from benchmarks.rig.records import write_dicts
from hybridpar.partition.balance import balance_graph
from hybridpar.partition.graph import Unit, UnitGraph, Value
from hybridpar.partition.profile import device_roofline, estimate_units
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import find_units

MODELS = ("resnet50", "mobilenet_v2", "densenet121", "googlenet", "inception_v3", "efficientnet_v2_s", "maxvit_t")
OUTPUT = Path(__file__).parent / "results" / "speed.csv"


def model_graph(name: str) -> UnitGraph:
    model, example = sweep_model(name)
    graph = find_units(trace_model(model, [example]), [example]).graph
    return estimate_units(graph, device_roofline(example.device, 1)).apply(graph)


def random_graph(count: int, reach: int, seed: int) -> UnitGraph:
    """Units with random times, each taking what one or two of the `reach` units before it made."""
    generator = random.Random(seed)
    users: list[set[int]] = [set() for _ in range(count)]
    for unit in range(1, count):
        for _ in range(generator.choice((1, 1, 2))):
            users[generator.randrange(max(0, unit - reach), unit)].add(unit)
    units = tuple(Unit(f"u{index}", forward_ms=generator.uniform(0.1, 10)) for index in range(count))
    values = tuple(
        Value(f"u{index}", index, tuple(sorted(found)), generator.randrange(10**6), 0, not found)
        for index, found in enumerate(users)
    )
    return UnitGraph(units, values)


def least_ms(graph: UnitGraph, stages: int) -> float:
    """The least of three times."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        balance_graph(graph, stages)
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times)


def main() -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    graphs = {name: model_graph(name) for name in MODELS}
    graphs.update({f"random, reach {reach}": random_graph(500, reach, reach) for reach in (2, 3, 4)})
    rows = []
    for name, graph in graphs.items():
        for stages in range(2, 9):
            took = f"{least_ms(graph, stages):.0f}"
            rows.append({"graph": name, "units": len(graph), "stages": stages, "balance_ms": took, **setting()})
            print(f"{name} K={stages}: {took} ms", flush=True)
    write_dicts(OUTPUT, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
