"""Compares the simulator's predicted step times with measured ones, over many configurations.

Every configuration is predicted from a dry run and a probe, neither of which runs the pipeline, and then measured, in
turns: dry run, steps, dry run, so that changes of the machine's speed affect both. The error is that of each turn. The
configurations of a model on a link take their turns together, because the best of them is to be found.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.pipeline.dry_run import Channel, DryRun, probe_channel
from benchmarks.pipeline.methods import Ours
from benchmarks.pipeline.setups import TINY, Setting, cut_on_main
from benchmarks.rig.rank import link, process_group
from hybridpar.comm.world import World
from hybridpar.schedule.actions import Kind
from hybridpar.schedule.costs import Costs
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.program import Program
from hybridpar.schedule.simulate import simulate

LINKS = ("loopback", "1gbit", "100mbit")
SETTINGS = (Setting("resnet18", 112, 32, 8), Setting("mobilenet_v2", 112, 32, 8))
QUICK = (Setting(TINY, 16, 16, 4),)
#: Schedule, number of stages, placement.
CONFIGURATIONS = (("1f1b", 2, "linear"), ("gpipe", 2, "linear"), ("interleaved", 4, "loop"))
TURNS, STEPS, QUICK_TURNS = 6, 3, 2

MEDIAN_AT_MOST, WORST_AT_MOST, CHOICE_AT_MOST = 0.05, 0.12, 1.05


@dataclass(frozen=True)
class Outcome:
    """One configuration: predicted and measured milliseconds of every turn."""

    setting: str
    schedule: str
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def errors(self) -> list[float]:
        """Predicted over measured, less one."""
        return [told / real - 1 for told, real in zip(self.predicted, self.measured, strict=True)]

    @property
    def error(self) -> float:
        """The median error."""
        return statistics.median(self.errors)


def measure(quick: bool, rounds: int, keep_busy: bool, output: str | None, notes: str) -> None:
    """Predict and measure all configurations on this link; rank 0 adds what it found to the file `notes`."""
    del rounds, keep_busy  # turns pair prediction and measurement themselves
    with process_group() as (rank, _):
        world = World.join(lanes=1)
        outcomes = [
            outcome
            for setting in (QUICK if quick else SETTINGS)
            for outcome in predict_and_measure(setting, world, QUICK_TURNS if quick else TURNS)
        ]
        world.close()
        if rank == 0:
            write_checks([_row(outcome) for outcome in outcomes], output)
            with Path(notes).open("a") as file:
                for one in outcomes:
                    told, real = statistics.median(one.predicted), statistics.median(one.measured)
                    file.write(f"{one.setting}|{link()}\t{one.schedule}\t{one.error}\t{told}\t{real}\n")


def summarise(notes: Path, output: str | None) -> None:
    """The promises over all configurations: median and worst error, and the time of what the simulator would choose."""
    rows = [line.split("\t") for line in notes.read_text().splitlines()]
    errors = sorted(abs(float(row[2])) for row in rows)
    choices: dict[str, float] = {}
    for group in dict.fromkeys(row[0] for row in rows):
        mine = [(float(row[3]), float(row[4])) for row in rows if row[0] == group]
        choices[group] = min(mine)[1] / min(real for _, real in mine)
    worst = max(choices.values())
    setting = f"{len(rows)} configurations"
    write_checks(
        [
            Check(
                setting=setting,
                link="all",
                what="median absolute error of the predicted step",
                value=statistics.median(errors),
                low=errors[0],
                high=errors[-1],
                at_most=MEDIAN_AT_MOST,
            ),
            Check(
                setting=setting,
                link="all",
                what="worst",
                value=errors[-1],
                low=errors[0],
                high=errors[-1],
                at_most=WORST_AT_MOST,
            ),
            Check(
                setting=setting,
                link="all",
                what="measured time of the predicted best over that of the measured best",
                value=worst,
                low=min(choices.values()),
                high=worst,
                at_most=CHOICE_AT_MOST,
            ),
        ],
        output,
    )


class Candidate:
    """One configuration, ready to be predicted and to be run.

    Args:
        setting: What is trained.
        configuration: Schedule, number of stages, placement.
        world: The workers.
    """

    def __init__(self, setting: Setting, configuration: tuple[str, int, str], world: World) -> None:
        schedule, stages, kind = configuration
        self.name = f"{schedule}, {stages} stages, {kind}"
        self.predicted: list[float] = []
        self.measured: list[float] = []
        self._world = world
        plan = cut_on_main(setting, Layout.dealt(stages, 2, kind), world, passes=3)
        self._ours = Ours(setting, plan, world, schedule)
        for _ in range(2):
            self._ours.step()
        program = self._ours.engine.executor.program
        assert program is not None
        self._program = program
        self._dry = DryRun(setting, plan, program, self._ours.engine.position)
        self._dry.run()
        edges = program.layout.edges
        self._sizes = sorted({size for edge in edges for size in (edge.bytes, edge.gradient_bytes) if size})

    def take_turn(self) -> None:
        """Predict, and measure; a collective."""
        grid = self._ours.engine.grid
        assert grid is not None
        channel = probe_channel(grid, self._world, self._sizes)
        before = _dry(self._dry)
        real = [_timed(self._ours) for _ in range(STEPS)]
        after = _dry(self._dry)
        mean = {key: (before[key] + after[key]) / 2 for key in before}
        costs = make_costs(self._program, _everyone(mean, self._world), channel)
        self.predicted.append(simulate(self._program, costs).step_ms)
        self.measured.append(statistics.median(real))

    def close(self) -> None:
        """End what it holds."""
        self._dry.close()
        self._ours.close()


def predict_and_measure(setting: Setting, world: World, turns: int) -> list[Outcome]:
    """Predict and measure all configurations of a setting, in turns; a collective."""
    candidates = [Candidate(setting, configuration, world) for configuration in CONFIGURATIONS]
    for _ in range(turns):
        for candidate in candidates:
            candidate.take_turn()
    for candidate in candidates:
        candidate.close()
    return [Outcome(str(setting), one.name, tuple(one.predicted), tuple(one.measured)) for one in candidates]


def make_costs(program: Program, times: dict[tuple[int, str], float], channel: Channel) -> Costs:
    """Costs for the simulator from what was measured."""

    def of(kind: Kind) -> tuple[float, ...]:
        return tuple(times[stage, kind.value] + channel.submit_ms for stage in range(program.layout.stages))

    return Costs(
        forward_ms=of(Kind.FORWARD),
        backward_ms=of(Kind.BACKWARD),
        step_ms=of(Kind.STEP),
        link=channel.link,
        control_ms=channel.control_ms,
    )


def _dry(dry: DryRun) -> dict[tuple[int, str], float]:
    dist.barrier()
    return dry.run()


def _timed(ours: Ours) -> float:
    """Milliseconds of one step, of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    ours.step()
    took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took) * 1e3


def _everyone(mine: dict[tuple[int, str], float], world: World) -> dict[tuple[int, str], float]:
    merged: dict[tuple[int, str], float] = {}
    for answer in world.gather(mine):
        assert isinstance(answer, dict)
        merged |= answer
    return merged


def _row(one: Outcome) -> Check:
    told, real = statistics.median(one.predicted), statistics.median(one.measured)
    return Check(
        setting=one.setting,
        link=link(),
        what=f"error of the predicted step, {one.schedule}",
        value=one.error,
        low=min(one.errors),
        high=max(one.errors),
        extra=f"predicted {told:.1f} ms, measured {real:.1f} ms",
    )
