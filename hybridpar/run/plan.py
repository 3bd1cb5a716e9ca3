"""The plan of a run: what it does, with what was predicted for it, so that another run can do the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybridpar.comm.clocks import clock_identity
from hybridpar.compress import format_codec
from hybridpar.config import TrainConfig
from hybridpar.machine.process import available_cores
from hybridpar.observe.running import WARM_UP_STEPS
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.plan import (
    Measured,
    ModelInfo,
    Pipeline,
    Placement,
    Plan,
    Predicted,
    Sync,
    SyncRule,
    trivial_plan,
)
from hybridpar.planner.stage_plan import micro_batch_samples
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
    """

    simulation: Simulation
    link: Link | None
    source: str

    def section(self) -> Predicted:
        """The section of a plan."""
        simulation = self.simulation
        return Predicted(
            step_ms=round(simulation.step_ms, 3),
            bubble=round(min(1.0, max(0.0, simulation.bubble)), 4),
            exposed_sync_ms=round(max(0.0, *simulation.exposed_sync_ms), 3),
            bytes_sent_per_step=round(sum(simulation.bytes_sent) / len(simulation.bytes_sent)),
            peak_saved_bytes=max(simulation.peak_saved_bytes),
        )


def plan_of_run(trainer: Trainer, config: TrainConfig, model: ModelInfo, device: str, wire_format: WireFormat) -> Plan:
    """The plan that a run follows, before anything is predicted.

    Args:
        trainer: What trains.
        config: Its options.
        model: What it trains.
        device: Name of the device.
        wire_format: Codecs of the gradients.
    """
    world, engine = trainer.world, trainer.engine
    rules = tuple(SyncRule(pattern=rule.pattern, codec=format_codec(rule.codec)) for rule in wire_format.applied.rules)
    sync = Sync(lanes=config.sync_lanes, bucket_bytes=config.bucket_bytes, policy=rules, batch_norm=config.batch_norm)
    measured = Measured(
        device=device,
        threads=torch.get_num_threads(),
        dtype="bfloat16" if config.amp == "bf16" else "float32",
        memory_format="channels_last" if config.uses_channels_last else "contiguous",
        seed=config.seed,
        versions={"torch": torch.__version__},
    )
    if engine.plan is None:
        took = wire_format.choice.backward_ms if wire_format.choice is not None else None
        return trivial_plan(
            model,
            backward_ms=took,
            micro_batch=micro_batch_samples(config, world.size) if took is not None else None,
            replicas=world.size,
            device=world.device.type,
            pipeline=Pipeline(micro_batches=config.micro_batches),
            sync=sync,
            measured=measured,
        )
    made, shape = engine.plan.plan, engine.plan.shape
    if made.measured is not None:  # says what the stage times are from, which may be another machine
        measured = made.measured.model_copy(update={"seed": config.seed})
    return Plan(
        model=model,
        partition=made.partition,
        placement=Placement.of_lanes(
            engine.plan.lane_of, engine.plan.worker_of, shape.placement, shape.replicas, world.device.type
        ),
        pipeline=Pipeline(
            schedule=engine.pipeline.options.schedule, micro_batches=config.micro_batches, recompute=config.recompute
        ),
        sync=sync,
        kernels=made.kernels,
        measured=measured,
    )


def as_searched(plan: Plan, searched: Plan) -> Plan:
    """The plan of a run that follows one which was searched for: that one, as this run trains by it.

    Args:
        plan: What the run does.
        searched: What it follows, with its prediction.
    """
    facts = plan.measured
    measured = searched.measured
    if measured is not None and facts is not None:
        measured = measured.model_copy(update={"seed": facts.seed, "dtype": facts.dtype})
    return searched.model_copy(update={"model": plan.model, "measured": measured, "ran": None})


def with_forecast(plan: Plan, forecast: Forecast) -> Plan:
    """A plan with what was predicted for it, and the link that the prediction rests on.

    Args:
        plan: The plan.
        forecast: What was predicted.
    """
    update: dict[str, object] = {"predicted": forecast.section()}
    if forecast.link is not None and plan.measured is not None:
        link = {"link_bytes_per_second": forecast.link.bytes_per_second, "link_latency_ms": forecast.link.latency_ms}
        update["measured"] = plan.measured.model_copy(update=link)
    return plan.model_copy(update=update)


def forecast_step(engine: Engine, config: TrainConfig, plan: Plan, steps: Sequence[StepOfAll]) -> Forecast | None:
    """Predict a step of a pipeline from its profile and its first steps. A collective.

    Args:
        engine: What trains; it has done a step.
        config: Its options.
        plan: Its plan.
        steps: The first steps, as all workers ran them; empty where nothing was recorded.

    Returns:
        The forecast, the same on all workers; None where nothing says how long a stage takes.
    """
    from hybridpar.pipeline.predict import gather_facts, predicted_costs, whole_program
    from hybridpar.schedule.simulate import simulate

    pipeline = engine.pipeline
    facts = gather_facts(pipeline)
    assert pipeline.program is not None
    program = whole_program(pipeline.program, facts)
    profile = _profile(plan, config, pipeline)
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
        replicas=pipeline.replicas,
        sync_lanes=config.sync_lanes,
        commit=config.guard or config.clip_norm is not None,
        cores=cores if profile is not None else None,
    )
    travels = any(program.layout.crosses(edge) for edge in program.layout.edges)
    seen = f"the first {WARM_UP_STEPS} steps" if len(steps) > 1 else "the first step"
    source = f"stages as profiled, all else as in {seen}" if profile else f"times of {seen}"
    if profile is not None and cores is not None and cores < 1:
        source += f"; {cores:.2g} of a lane's cores are there"
    return Forecast(simulate(program, costs), costs.link if travels and steps else None, source)


def _profile(plan: Plan, config: TrainConfig, pipeline: PipelineEngine) -> tuple[list[float], list[float]] | None:
    """Forward and backward times of all stages as measured, for the micro-batches of this run."""
    forward, backward = pipeline.options.forward_ms, pipeline.options.backward_ms
    if plan.measured is None or plan.measured.profile != "measured" or forward is None or backward is None:
        return None
    again = [ahead if index in config.recompute else 0.0 for index, ahead in enumerate(forward)]
    return list(forward), [back + more for back, more in zip(backward, again, strict=True)]


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
