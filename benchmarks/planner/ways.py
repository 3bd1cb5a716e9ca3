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
from unittest import mock

from benchmarks.rig.checks import Check, write_checks
from benchmarks.rig.launch import measure_in_ranks
from benchmarks.rig.network import LOOPBACK, Network
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.task import Setting
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.machine.process import available_cores
from hybridpar.plan import Compute
from hybridpar.planner.decide import decide_plan, run_in_turns
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import Fidelity, Question
from hybridpar.planner.trials import random_batch
from hybridpar.train.trainer import open_trial

SETTINGS = (Setting("mobilenet_v2", 96, 32), Setting("resnet18", 96, 32), Setting("convnext_tiny", 96, 32))
STEPS = 400
ROUNDS, SECONDS = 12, 40.0
AT_MOST = 1.03


def measure_all(quick: bool, output: str | None) -> None:
    """Every model on one worker and on two, exact and close."""
    for workers in (1,) if quick else (1, 2):
        arguments = {"models": 1 if quick else len(SETTINGS), "output": output}
        with Network(workers, LOOPBACK) as network:
            measure_in_ranks(network, __name__, arguments, threads=max(1, len(available_cores()) // workers))


def measure(models: int, output: str | None) -> None:
    """Plan the first so many models, and time each plan in all ways; rank 0 writes the rows."""
    with process_group(timeout=900) as (rank, _):
        world = World.join(lanes=2, timeout=900)
        fidelities: tuple[Fidelity, ...] = ("exact", "close")
        for setting, fidelity in product(SETTINGS[:models], fidelities):
            with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, HYBRIDPAR_CACHE=cache):
                check = _chosen_over_best(setting, fidelity, world)
            if rank == 0:
                write_checks([check], output, "ways")
        world.close()


def _chosen_over_best(setting: Setting, fidelity: Fidelity, world: World) -> Check:
    model, options = setting.build(), TrainConfig(batch_size=setting.batch, fidelity=fidelity)
    shape = (3, setting.side, setting.side)
    question = Question(setting.model, shape, options, Fixed(workers=world.size), steps=STEPS)
    begun = time.perf_counter()
    plan = decide_plan(model, world, question, open_trial, lambda line: None).plan
    seconds = time.perf_counter() - begun
    assert plan.compute is not None
    types = ("none", "bf16") if fidelity == "close" else ("none",)
    ways = [plan.compute]
    # Kernels are for channels_last.
    for (memory_format, kernels), amp in product(
        (("contiguous", "off"), ("channels_last", "off"), ("channels_last", "auto")), types
    ):
        ways.append(Compute(memory_format=memory_format, kernels=kernels, amp=amp, threads=plan.compute.threads))
    ways = list(dict.fromkeys(ways))
    plans = [plan.model_copy(update={"compute": way}) for way in ways]
    example = random_batch(shape, setting.batch, world.device)
    times = run_in_turns(plans, model, options, world, example, open_trial, ROUNDS, SECONDS)
    medians = [statistics.median(row) for row in times if row]
    best = min(range(len(medians)), key=medians.__getitem__)
    ratios = [chosen / other for chosen, other in zip(times[0], times[best], strict=True)]
    words = [" ".join(f"{key}={value}" for key, value in way.options.items() if value) for way in ways]
    rows = ", ".join(f"{way}: {ms:.1f} ms" for way, ms in zip(words, medians, strict=True))
    return Check(
        setting=f"{setting.model}, {setting.side}x{setting.side}, batch {setting.batch}, {world.size} worker(s), "
        f"{fidelity}",
        link=link(),
        what="chosen over best way",
        value=medians[0] / medians[best],
        low=min(ratios),
        high=max(ratios),
        at_most=AT_MOST,
        extra=f"planned in {seconds:.1f} s; chosen is the first: {rows}",
    )
