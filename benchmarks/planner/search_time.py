"""Measures how many seconds the planner's search takes."""

from __future__ import annotations

import time

import torch

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.planner.common import Setting
from hybridpar.machine.cluster_file import ClusterSpec, parse_cluster
from hybridpar.planner.codecs import planned_codecs
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.measure import measure_rates, profile_model
from hybridpar.planner.scaling import scaling_curve
from hybridpar.planner.search import find_plan

SMALL_AT_MOST, LARGE_AT_MOST = 10.0, 60.0
REPEATS = 3


def cluster_of_gpus(hosts: int, devices: int, memory: str = "24GB") -> ClusterSpec:
    """Boxes with GPUs on PCIe, and ordinary Ethernet between them."""
    return parse_cluster(
        {
            "name": f"{hosts} x {devices} devices",
            "hosts": [{"count": hosts, "devices": devices, "kind": "cuda", "memory": memory, "throughput": 100.0}],
            "inside": {"bandwidth": "12GB/s", "latency_ms": 0.01},
            "between": {"bandwidth": "10Gbit/s", "latency_ms": 0.05},
        }
    )


def measure(quick: bool, output: str | None) -> None:
    """Time searches, profiling not included.

    Args:
        quick: A smaller model.
        output: The table.
    """
    setting = Setting("resnet18" if quick else "resnet50", 224, 4)
    # Sizes and a plausible time of every unit: how long they really take does not matter to the search.
    profile = profile_model(setting.build(), [torch.zeros(4, 3, 224, 224)], name=setting.name, measure=False)
    rates = measure_rates(planned_codecs("lossy"), profile.parameters, 8, torch.device("cpu"))
    rows = []
    cases = (
        ("8 workers", cluster_of_gpus(2, 4), 512, SMALL_AT_MOST),
        # Memory that excludes nearly everything is the hardest case.
        ("8 workers with 12 GB", cluster_of_gpus(2, 4, "12GB"), 512, SMALL_AT_MOST),
        ("4,096 workers", cluster_of_gpus(512, 8), 65536, LARGE_AT_MOST),
    )
    for name, cluster, batch, at_most in cases:
        inputs = PlannerInputs(profile, cluster, batch, "lossy", rates)
        times, told = [], ""
        for _ in range(1 if quick else REPEATS):
            began = time.perf_counter()
            answer = find_plan(inputs)
            times.append(time.perf_counter() - began)
            told = f"{answer.considered} candidates, {answer.simulated} simulated"
        rows.append(_row(setting, f"seconds of a search, {name}", times, at_most, told))
        if not quick:
            began = time.perf_counter()
            points = scaling_curve(inputs)
            curve = [time.perf_counter() - began]
            rows.append(_row(setting, f"seconds of a scaling curve, {name}", curve, None, f"{len(points)} points"))
    write_checks(rows, output, "search")


def _row(setting: Setting, what: str, times: list[float], at_most: float | None, extra: str) -> Check:
    ordered = sorted(times)
    return Check(
        setting=str(setting),
        link="none",
        what=what,
        value=ordered[len(ordered) // 2],
        low=ordered[0],
        high=ordered[-1],
        at_most=at_most,
        extra=extra,
    )
