"""Measures balance, distance to the optimum and predicted times of partitions, on one machine in one run.

For each model at batch 4, 224x224, one thread: profile once; cut into K = 2 to 8 stages with every strategy; for some
K also split and run every cut, in turns, and take the slowest stage. Writes results/balance.csv (one line per model, K
and strategy) and results/stages.csv (one line per stage of the balanced cuts: predicted and measured time and saved
bytes). Run from the root of the repository: python -m benchmarks.partition.main
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.partition.common import setting
from benchmarks.partition.dry_run import StageTimes, dry_run_partitions
from benchmarks.partition.exact import exact_optimum
from benchmarks.partition.models import table_model
from benchmarks.partition.strategies import STRATEGIES, cut_by
from benchmarks.rig.records import append_dicts
from hybridpar.partition.balance import Balance, balance_graph
from hybridpar.partition.cost import Problem
from hybridpar.partition.graph import UnitGraph
from hybridpar.partition.planning import saved_bytes
from hybridpar.partition.profile import UnitTimes, measure_units
from hybridpar.partition.split import split_model
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import find_units

MODELS = ("resnet18", "mobilenet_v2", "googlenet", "resnet34", "densenet121", "resnet50")
RESULTS = Path(__file__).parent / "results"


def run_model(name: str, options: argparse.Namespace, balances: Path, stage_rows: Path) -> None:
    torch.manual_seed(0)
    model, example = table_model(name), torch.randn(4, 3, 224, 224)
    units = find_units(trace_model(model, [example]), [example])
    times = measure_units(units, [example], passes=options.passes, own_time=True)
    graph = times.apply(units.graph)
    for stages in range(2, 9):
        balance = balance_graph(graph, Problem(stages, noise=times.noise))
        print(f"{name} K={stages}: {balance.balance:.3f}", flush=True)
        loads = [unit.ms for unit in graph.units]
        optimum = exact_optimum(loads, graph.edges(), stages, balance.largest)
        cuts = {"balanced": balance.stage_of} | {one: cut_by(one, graph, stages) for one in STRATEGIES}
        measured: dict[str, list[StageTimes]] = {}
        if stages in options.measured:
            partitions = [split_model(units, stage_of) for stage_of in cuts.values()]
            found = dry_run_partitions(partitions, [example], passes=options.dry_passes, own_time=True)
            measured = dict(zip(cuts, found, strict=True))
        for strategy, stage_of in cuts.items():
            sums = [0.0] * stages
            for load, stage in zip(loads, stage_of, strict=True):
                sums[stage] += load
            largest = max(sums)
            row: dict[str, object] = {
                "model": name,
                "stages": stages,
                "strategy": strategy,
                "units": len(graph),
                "max_over_mean": f"{largest * stages / sum(loads):.4f}",
                "largest_ms": f"{largest:.2f}",
                "optimum_ms": "" if optimum is None else f"{optimum.lower_bound:.2f}",
                "gap": "" if optimum is None else f"{largest / optimum.lower_bound - 1:.4f}",
                "down_sets": "" if optimum is None else optimum.down_sets,
                "cut_megabytes": f"{sum(graph.cut_bytes(stage_of)) / 1e6:.2f}",
                "measured_slowest_ms": f"{max(item.ms for item in measured[strategy]):.2f}" if measured else "",
                "noise": f"{times.noise:.3f}",
                "calibration": f"{times.calibration:.3f}",
                "clock": "thread time",
            }
            append_dicts(balances, [row | setting()])
        if measured:
            add_stages(stage_rows, name, stages, graph, balance, measured["balanced"], times)


def add_stages(
    table: Path,
    name: str,
    stages: int,
    graph: UnitGraph,
    cut: Balance,
    measured: list[StageTimes],
    times: UnitTimes,
) -> None:
    saved = saved_bytes(graph, cut.stage_of)
    for stage, item in enumerate(measured):
        row: dict[str, object] = {
            "model": name,
            "stages": stages,
            "stage": stage,
            "predicted_ms": f"{cut.loads[stage]:.2f}",
            "measured_ms": f"{item.ms:.2f}",
            "error": f"{cut.loads[stage] / item.ms - 1:.3f}",
            "predicted_saved_bytes": saved[stage],
            "measured_saved_bytes": item.saved_bytes,
            "saved_error": f"{saved[stage] / item.saved_bytes - 1:.4f}" if item.saved_bytes else "",
            "noise": f"{times.noise:.3f}",
            "clock": "thread time",
        }
        append_dicts(table, [row | setting()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--dry-passes", type=int, default=3)
    parser.add_argument("--measured", type=int, nargs="*", default=[4, 8], help="numbers of stages to run as well")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    balances, stage_rows = options.results / "balance.csv", options.results / "stages.csv"
    for table in (balances, stage_rows):
        table.unlink(missing_ok=True)
    for name in options.models:
        run_model(name, options, balances, stage_rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
