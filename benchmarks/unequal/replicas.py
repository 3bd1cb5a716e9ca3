"""Times unequal replicas against the best layouts of equal ones, on a fast device beside two slow ones, emulated.

A model waits for as long as a device of its rank's speed would compute; what is exchanged is real. The planner searches
for a described cluster of these devices, whose slow ones cannot hold the whole model, and predicts a step of each plan.
Then its plan, the best ones with equal replicas, and a pipeline over all three whose stages are cut as if these were
equally fast take steps in turns. What is promised is of the best plan with unequal replicas.

    python -m benchmarks.unequal.replicas            # four minutes
    python -m benchmarks.unequal.replicas --quick    # few rounds, and nothing is written: does it run?
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.rig.command import measure_in_ranks, run_command
from benchmarks.rig.network import LOOPBACK, Network

RESULTS = Path(__file__).parent / "results" / "replicas.csv"
#: Of each rank, as many times as fast as the slow ones.
SPEEDS = (2.0, 1.0, 1.0)
LAYERS, WIDTH, CLASSES = 8, 512, 10
#: Of a layer on a slow device, forward; backward takes twice as long.
SAMPLE_MS = 1.0
#: How a pipeline is called whose stages are cut without regard to the speeds of their devices.
ALIKE = "cut for equal devices"
#: What was promised: error of the prediction at most, and the step over that of the best equal layout.
MOST_ERROR, MOST_RATIO = 0.08, 1 / 1.3


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure replicas with different numbers of stages."""

    batch_size: int = 96
    """Samples of a step."""
    rounds: int = 25
    """Steps of each plan; the first three are not counted."""
    quick: bool = False
    """Few rounds, nothing written."""
    output: Path = RESULTS
    """Table to add the rows to."""


def main(options: Options) -> int:
    """Start the ranks."""
    told = {
        "batch_size": options.batch_size,
        "rounds": 6 if options.quick else options.rounds,
        "output": None if options.quick else str(options.output.resolve()),
    }
    with Network(len(SPEEDS), LOOPBACK) as network:
        measure_in_ranks(network, "benchmarks.unequal.replicas", told)
    return 0


def measure(batch_size: int, rounds: int, output: str | None) -> None:
    """Predict and measure in this rank; rank 0 writes the rows."""
    import torch
    from torch import nn

    from benchmarks.pipeline.checks import Check, write_checks
    from benchmarks.planner.common import ForeignLoad
    from benchmarks.rig.rank import process_group
    from hybridpar.comm.world import World
    from hybridpar.commands.plan.trials import Trial, random_batch, time_plans
    from hybridpar.config import TrainConfig
    from hybridpar.machine.cluster_file import parse_cluster
    from hybridpar.plan import parse_plan
    from hybridpar.planner.cuts import cuts_of
    from hybridpar.planner.evaluate import Evaluator
    from hybridpar.planner.explain import contributions, describe
    from hybridpar.planner.inputs import PlannerInputs
    from hybridpar.planner.links import measure_cluster
    from hybridpar.planner.measure import profile_model
    from hybridpar.planner.record import plan_of
    from hybridpar.planner.search import find_plan
    from hybridpar.planner.space import Space
    from hybridpar.planner.step_costs import measure_step_costs

    class Pause(torch.autograd.Function):
        """Waits forward and backward."""

        @staticmethod
        def forward(context: Any, x: torch.Tensor, ahead_ms: float, back_ms: float) -> torch.Tensor:
            context.back_ms = back_ms
            time.sleep(ahead_ms / 1e3)
            return x.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            time.sleep(context.back_ms / 1e3)
            return gradients[0], None, None

    class Layer(nn.Module):
        """A layer that takes as long as on a device of some speed."""

        def __init__(self, speed: float) -> None:
            super().__init__()
            self.linear, self.sample_ms = nn.Linear(WIDTH, WIDTH), SAMPLE_MS / speed

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            waited: torch.Tensor = Pause.apply(self.linear(x), self.sample_ms * len(x), 2 * self.sample_ms * len(x))
            return waited

    def build(speed: float) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Layer(speed) for _ in range(LAYERS)), nn.Linear(WIDTH, CLASSES))

    with process_group(timeout=900) as (rank, _):
        world = World.join(lanes=2, timeout=900)
        link = measure_cluster(world, fresh=True).outer
        images, targets = random_batch((WIDTH,), batch_size, CLASSES, world.device)
        rest = measure_step_costs(build(1e6), images[: batch_size // 8])  # of all workers at a time, as in a step

        def search() -> tuple[list[tuple[str, str, float]], list[str]]:
            """The plan that is chosen and the best ones of equal replicas, as JSON, with their predictions."""
            profile = profile_model(build(1.0), [images[: batch_size // part] for part in (1, 4, 16)], name="waiting")
            profile = replace(profile, update_ms=rest.update_ms, collect_ms=rest.collect_ms, accumulate_ms=0.0)

            def inputs_of(memory: int | None) -> PlannerInputs:
                hosts = [
                    {"kind": "cuda", "throughput": speed, "name": name, "count": count}
                    | ({"memory": memory} if memory is not None and name == "small" else {})
                    for speed, name, count in ((SPEEDS[0], "large", 1), (SPEEDS[1], "small", 2))
                ]
                level = {} if link is None else link.model_dump(exclude={"cores"}, exclude_none=True)
                cluster = parse_cluster({"hosts": hosts, "between": level or {"bandwidth": 1e9}})
                return PlannerInputs(profile, cluster, batch_size, most_stages=3, most_micro_batches=8)

            # Between what a half of the model needs, as a stage, and what the whole one needs.
            free = Evaluator(Space(inputs_of(None)))
            beside = [one for one in free.space.candidates() if one.shape.homes is not None]
            last = [free.least_needs(one, make_order=True, replica=one.shape.replicas - 1) for one in beside]
            halves = [max(need for need, _ in needs) for needs in last]
            inputs = inputs_of(round(1.05 * min(halves)))
            answer = find_plan(inputs, prune=False)
            apart = next(one for one in answer.ranked if one.candidate.shape.homes is not None)
            equal = [one for one in answer.ranked if one.candidate.shape.homes is None]
            pipeline = [one for one in equal if one.candidate.shape.workers == len(SPEEDS)]
            drawn = {one.candidate: one for one in (apart, answer.chosen, equal[0], *pipeline[:1])}
            for one in pipeline[:1]:  # what it was before stages were cut by speed
                for cut in cuts_of(profile, one.candidate.shape.stages)[:1]:
                    alike = answer.evaluator.outcome(replace(one.candidate, cut=replace(cut, name=ALIKE)))
                    drawn[alike.candidate] = alike
            plans = [
                (describe(one.candidate, answer), plan_of(answer, one).to_json(), one.step_ms) for one in drawn.values()
            ]
            return plans, contributions(inputs, answer)

        plans, told = world.from_main(search)
        if rank == 0:
            print(*told, sep="\n", flush=True)
        trials = {
            name: Trial(parse_plan(json.loads(plan)), build(SPEEDS[rank]), images, targets, world, TrainConfig(lr=1e-3))
            for name, plan, _ in plans
        }
        steps: dict[str, Callable[[], object]] = {name: trial.step for name, trial in trials.items()}
        with ForeignLoad(world) as load:
            times = time_plans(steps, world, rounds=rounds)
        for trial in trials.values():
            trial.close()
        if rank == 0:
            setting = f"{LAYERS} layers of {SAMPLE_MS:g} + {2 * SAMPLE_MS:g} ms a sample, devices of speed 2, 1 and 1"
            medians = {name: statistics.median(own[3:]) for name, own in times.items()}
            checks = []
            for place, (name, _, predicted) in enumerate(plans):
                errors = [one / predicted - 1 for one in times[name][3:]]
                facts = f"predicted {predicted:.1f} ms, measured {medians[name]:.1f} ms, {load.told}"
                most = MOST_ERROR if place == 0 else None
                value = abs(medians[name] / predicted - 1)
                what = f"error of the prediction: {name}"
                checks.append(
                    Check(
                        setting=setting,
                        link=LOOPBACK,
                        what=what,
                        value=value,
                        low=min(errors),
                        high=max(errors),
                        at_most=most,
                        extra=facts,
                    )
                )
            chosen, *others = [name for name, _, _ in plans]
            best = min(others, key=medians.__getitem__)
            alike = next(name for name in others if ALIKE in name)
            fastest = min((name for name in others if name != alike), key=medians.__getitem__)
            for one, other, most in ((chosen, best, MOST_RATIO), (fastest, alike, None), (chosen, alike, None)):
                ratios = [mine / theirs for mine, theirs in zip(times[one][3:], times[other][3:], strict=True)]
                checks.append(
                    Check(
                        setting=setting,
                        link=LOOPBACK,
                        what=f"step of {one} over that of {other}",
                        value=statistics.median(ratios),
                        low=min(ratios),
                        high=max(ratios),
                        at_most=most,
                        extra=load.told,
                    )
                )
            write_checks(checks, output, "replicas of different numbers of workers")
        world.close()


if __name__ == "__main__":
    run_command(main, Options)
