"""The plan of a run: what it does, with what was predicted for it, so that another run can do the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hybridpar.comm.clocks import clock_identity
from hybridpar.compress import format_codec
from hybridpar.config import TrainConfig
from hybridpar.machine.process import available_cores
from hybridpar.observe.running import WARM_UP_STEPS
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.plan import (
    Plan,
    Predicted,
    ResolvedPlan,
    SyncRule,
)
from hybridpar.schedule.costs import Link
from hybridpar.sync.compression_table import WireFormat
from hybridpar.train.engine import Engine
from hybridpar.train.trainer import Trainer

if TYPE_CHECKING:
    from hybridpar.pipeline.predict import StepOfAll
    from hybridpar.schedule.simulate import Simulation


@dataclass(frozen=True)
class Forecast:
    """What a step was predicted to take.

    Attributes:
        simulation: The simulated step.
        link: The link between workers, as the first steps showed it; None where nothing travelled.
        source: Where the figures come from, in words.
        is_all: Nothing is exchanged but in the step.
    """

    simulation: Simulation
    link: Link | None
    source: str
    is_all: bool = True

    def section(self) -> Predicted:
        """The section of a plan."""
        simulation = self.simulation
        sent = round(sum(simulation.bytes_sent) / len(simulation.bytes_sent)) if self.is_all else None
        return Predicted(
            step_ms=round(simulation.step_ms, 3),
            bubble=round(min(1.0, max(0.0, simulation.bubble)), 4),
            exposed_sync_ms=round(max(0.0, *simulation.exposed_sync_ms), 3),
            bytes_sent_per_step=sent,
            peak_saved_bytes=max(simulation.peak_saved_bytes),
        )


def plan_of_run(trainer: Trainer, device: str, wire_format: WireFormat) -> ResolvedPlan:
    """The plan of a run as it is written down, before a pipeline is predicted."""
    plan, rules = trainer.plan, wire_format.applied.rules
    update: dict[str, object] = {}
    if plan.inputs is None:  # a search has said of every parameter what it is sent as
        policy = tuple(SyncRule(pattern=rule.pattern, codec=format_codec(rule.codec)) for rule in rules)
        update["sync"] = plan.sync.model_copy(update={"policy": policy})
    if plan.measured.profile is None:  # else it says what the times of stages are from, which may be another machine
        here = {"device": device, "threads": torch.get_num_threads(), "versions": {"torch": torch.__version__}}
        update["measured"] = plan.measured.model_copy(update=here)
    return plan.model_copy(update=update)


def sync_of(config: TrainConfig, plan: ResolvedPlan) -> str:
    """How replicas are kept in step, as `--sync` takes it."""
    outer = plan.sync.outer is not None and config.outer is None
    return f"outer:{plan.sync.outer}" if outer else config.sync.strip()


def as_asked(config: TrainConfig, plan: ResolvedPlan) -> TrainConfig:
    """The options of a run as a resumed run is to recall them, which does not recall a plan's file.

    Workers join by what the file says of the exchange, before they can read the run's own plan.
    """
    if config.plan_file is None:
        return config
    sync = plan.sync
    own = {"sync_lanes": sync.lanes, "batch_norm": sync.batch_norm, "compress": sync.codec}
    return replace(config, sync=sync_of(config, plan), **own)  # type: ignore[arg-type]


def with_forecast(plan: Plan, forecast: Forecast) -> Plan:
    """A plan with what was predicted for it, and the link that the prediction rests on."""
    update: dict[str, object] = {"predicted": forecast.section()}
    if forecast.link is not None and plan.measured is not None:
        link = {"link_bytes_per_second": forecast.link.bytes_per_second, "link_latency_ms": forecast.link.latency_ms}
        update["measured"] = plan.measured.model_copy(update=link)
    return plan.model_copy(update=update)


def forecast_step(engine: Engine, config: TrainConfig, plan: Plan, steps: Sequence[StepOfAll]) -> Forecast | None:
    """Predict a step of a pipeline from its profile and its first steps. A collective."""
    if config.double_buffer != "off" or config.select_batch or not engine.plan.layout.is_equal:
        return None
    from hybridpar.pipeline.predict import gather_facts, predicted_costs, whole_program
    from hybridpar.schedule.simulate import simulate

    pipeline = engine.pipeline
    facts = gather_facts(pipeline)
    assert pipeline.executor.program is not None
    program = whole_program(pipeline.executor.program, facts)
    profile = _profile(plan, pipeline)
    cores = _cores_per_lane(pipeline)
    if profile is None and not steps:
        return None
    forward, backward = profile or (None, None)
    costs = predicted_costs(
        program,
        facts,
        forward_ms=forward,
        backward_ms=backward,
        steps=steps,
        layout=engine.plan.layout,
        sync_lanes=engine.plan.sync.lanes,
        commit=config.guard or config.clip_norm is not None,
        cores=cores if profile is not None else None,
    )
    travels = any(program.layout.crosses(edge) for edge in program.layout.edges)
    seen = f"the first {WARM_UP_STEPS} steps" if len(steps) > 1 else "the first step"
    source = f"stages as profiled, all else as in {seen}" if profile else f"times of {seen}"
    if profile is not None and cores is not None and cores < 1:
        source += f"; {cores:.2g} of a lane's cores are there"
    link = costs.link if travels and steps else None
    return Forecast(simulate(program, costs), link, source, is_all=engine.plan.sync.outer is None)


def _profile(plan: Plan, pipeline: PipelineEngine) -> tuple[list[float], list[float]] | None:
    """Forward and backward times of all stages as measured, for the micro-batches of this run."""
    forward, backward = pipeline.options.forward_ms, pipeline.options.backward_ms
    if plan.measured is None or plan.measured.profile != "measured" or forward is None or backward is None:
        return None
    return list(forward), list(backward)


def _cores_per_lane(pipeline: PipelineEngine) -> float | None:
    """What the workers' cores are to one lane of each, where workers of a host share cores; the least of all.

    A collective. None on a GPU: its lanes share no cores.
    """
    if pipeline.world.device.type == "cuda":
        return None
    mine = (clock_identity(), available_cores())
    answers: list[tuple[str, list[int]]] = pipeline.world.gather(mine)  # type: ignore[assignment]
    users = Counter((host, core) for host, cores in answers for core in cores)
    return min(sum(1 / users[host, core] for core in cores) for host, cores in answers) / pipeline.options.threads
