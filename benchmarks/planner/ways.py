"""Compares the way to compute a step that was chosen with all other ways, each as whole steps of a trainer, in turns.

The workers plan as `hybridpar train` does, with an empty cache. Then the plan's steps are taken in every memory format,
with tuned kernels and without, and with `--fidelity close` in float32 and bfloat16.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from itertools import product
from typing import cast
from unittest import mock

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.planner.common import CLASSES
from benchmarks.rig.command import measure_in_ranks
from benchmarks.rig.network import LOOPBACK, Network
from benchmarks.rig.rank import link, process_group
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.machine.process import available_cores
from hybridpar.models import build_model, seed_everything
from hybridpar.plan import Compute
from hybridpar.planner.decide import decide_plan, run_in_turns
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import Fidelity
from hybridpar.planner.probes import Question
from hybridpar.planner.trials import random_batch
from hybridpar.train.trainer import open_trial

MODELS = ("mobilenet_v2", "resnet18", "convnext_tiny")
SIDE, BATCH, STEPS = 96, 32, 400
ROUNDS, SECONDS = 12, 40.0
AT_MOST = 1.03


def measure_all(quick: bool, output: str | None) -> None:
    """Every model on one worker and on two, exact and close."""
    for workers in (1,) if quick else (1, 2):
        told = {"models": list(MODELS[:1] if quick else MODELS), "output": output}
        with Network(workers, LOOPBACK) as network:
            measure_in_ranks(network, __name__, told, threads=max(1, len(available_cores()) // workers))


def measure(models: list[str], output: str | None) -> None:
    """Plan each model, and time its plan in all ways; rank 0 writes the rows."""
    with process_group(timeout=900) as (rank, _):
        world = World.join(lanes=2, timeout=900)
        for name, fidelity in product(models, ("exact", "close")):
            with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, HYBRIDPAR_CACHE=cache):
                check = _chosen_over_best(name, cast(Fidelity, fidelity), world)
            if rank == 0:
                write_checks([check], output, "ways")
        world.close()


def _chosen_over_best(name: str, fidelity: Fidelity, world: World) -> Check:
    seed_everything(0)
    model, options = build_model(name, CLASSES), TrainConfig(batch_size=BATCH, fidelity=fidelity)
    question = Question(name, (3, SIDE, SIDE), options, Fixed(workers=world.size), steps=STEPS)
    begun = time.perf_counter()
    plan = decide_plan(model, world, question, open_trial, lambda line: None).plan
    seconds = time.perf_counter() - begun
    assert plan.compute is not None
    ways = [plan.compute]
    for memory_format, kernels, amp in product(
        ("contiguous", "channels_last"), ("off", "auto"), ("none", "bf16") if fidelity == "close" else ("none",)
    ):
        if (memory_format, kernels) != ("contiguous", "auto"):  # kernels are for channels_last
            ways.append(Compute(memory_format=memory_format, kernels=kernels, amp=amp, threads=plan.compute.threads))
    plans = [plan.model_copy(update={"compute": way}) for way in dict.fromkeys(ways)]
    example = random_batch((3, SIDE, SIDE), BATCH, world.device)
    times = run_in_turns(plans, model, options, world, example, open_trial, ROUNDS, SECONDS)
    medians = [statistics.median(row) for row in times if row]
    best = min(range(len(medians)), key=medians.__getitem__)
    ratios = [chosen / other for chosen, other in zip(times[0], times[best], strict=True)]
    said = [" ".join(f"{key}={value}" for key, value in way.options.items() if value) for way in dict.fromkeys(ways)]
    rows = ", ".join(f"{way}: {ms:.1f} ms" for way, ms in zip(said, medians, strict=True))
    return Check(
        setting=f"{name}, {SIDE}x{SIDE}, batch {BATCH}, {world.size} worker(s), {fidelity}",
        link=link(),
        what="chosen over best way",
        value=medians[0] / medians[best],
        low=min(ratios),
        high=max(ratios),
        at_most=AT_MOST,
        extra=f"planned in {seconds:.1f} s; chosen is the first: {rows}",
    )
