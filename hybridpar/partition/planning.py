"""From a model to a plan and its stages, and from a plan back to the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hybridpar.errors import PlanError, UsageError
from hybridpar.models import model_fingerprint, parameter_count
from hybridpar.models.deferred import is_deferred
from hybridpar.partition.balance import balance_graph, check_stages
from hybridpar.partition.graph import UnitGraph
from hybridpar.partition.nest import as_inputs
from hybridpar.partition.profile import UnitTimes, device_roofline, estimate_units
from hybridpar.partition.profile_cache import device_name, measured_profile, memory_format_name
from hybridpar.partition.split import split_model
from hybridpar.partition.stage import Stage
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import ModelUnits, find_units
from hybridpar.plan import Measured, ModelInfo, Partition, Placement, Plan
from hybridpar.plan import Stage as StagePlan
from hybridpar.schedule.layout import Edge, Layout


@dataclass(frozen=True)
class PartitionedModel:
    """A model cut into stages.

    Attributes:
        plan: The plan, with its sections `partition`, `placement` and `measured`.
        stages: The stages in order; they share modules and parameters with the model.
        graph: The unit graph with its times.
        times: Where the times come from.
        units: The traced model, to cut it differently without tracing again.
    """

    plan: Plan
    stages: list[Stage]
    graph: UnitGraph
    times: UnitTimes
    units: ModelUnits


def partition_model(
    model: nn.Module,
    inputs: torch.Tensor | Sequence[torch.Tensor],
    stages: int,
    *,
    fewer: bool = False,
    link_speed: float | None = None,
    measure: bool = True,
    passes: int = 5,
    threads: int | None = None,
    cache: Path | None = None,
    name: str | None = None,
) -> PartitionedModel:
    """Trace a model, find its costs, cut it into balanced stages.

    Args:
        model: Any module; its state is as before afterwards, and it can still be used as a whole.
        inputs: One micro-batch, on the device and with the dtype and memory format of the training.
        stages: Number of stages, each on a device like that of the inputs.
        fewer: Make as many as the model has units, and at least two, where those are fewer.
        link_speed: Bytes per second between stages; None for a link that costs nothing.
        measure: Measure unit times; False, and a model without memory, estimates them from FLOPs and bytes.
        passes: Passes of the measurement.
        threads: Intra-op threads on CPU; None keeps the present number.
        cache: Directory of profiles measured before; None measures always.
        name: What to call the model in the plan.

    Returns:
        The plan and the stages, with what they were made from.

    Raises:
        TraceError: The model cannot be traced.
        PartitionError: The model has fewer units than stages.
        UsageError: The model refuses the inputs.
    """
    given = as_inputs(inputs)
    units = find_units(trace_model(model, given), given)
    if fewer:
        stages = max(2, min(stages, len(units.graph)))
    check_stages(units.graph, stages)
    if measure and not is_deferred(model):
        times = measured_profile(units, given, passes=passes, threads=threads, cache=cache)
    else:
        times = estimate_units(units.graph, device_roofline(given[0].device, threads))
    graph = units.graph.with_times(list(zip(times.forward_ms, times.backward_ms, strict=True)))
    stage_of = balance_graph(graph, stages, link_speed=link_speed, noise=times.noise)
    single = given[0] if len(given) == 1 else None
    sections = plan_stages(graph, stage_of, (1.0,) * stages)
    plan = Plan(
        model=ModelInfo(
            name=name or type(model).__name__,
            fingerprint=model_fingerprint(model),
            parameters=parameter_count(model),
            input=None if single is None else tuple(single.shape[1:]),
        ),
        partition=Partition(
            stages=sections,
            cut="balanced",
            micro_batch=given[0].shape[0],
            edges=edges_of(graph, stage_of),
        ),
        placement=Placement(layout=Layout.repeated((stage, 0) for stage in range(stages)), device=given[0].device.type),
        measured=Measured(
            device=device_name(given[0].device),
            threads=threads or torch.get_num_threads(),
            dtype=_dtype_name(model),
            memory_format=memory_format_name(given[0]),
            profile=times.source,
            noise=round(times.noise, 4),
            versions={"torch": str(torch.__version__)},
        ),
    )
    return PartitionedModel(plan, split_model(units, stage_of), graph, times, units)


def plan_stages(graph: UnitGraph, stage_of: Sequence[int], speeds: Sequence[float]) -> tuple[StagePlan, ...]:
    """The stages of a partition, as a plan says them."""
    crossing, saved, stages = graph.crossing(stage_of), saved_bytes(graph, stage_of), []
    for index, speed in enumerate(speeds):
        members = [unit for unit, stage in zip(graph.units, stage_of, strict=True) if stage == index]
        forward = sum(unit.forward_ms for unit in members) / speed
        backward = sum(unit.backward_ms for unit in members) / speed
        stages.append(
            StagePlan(
                units=tuple(unit.name for unit in members),
                forward_ms=round(forward, 4),
                backward_ms=round(backward, 4),
                parameter_bytes=sum(unit.parameter_bytes for unit in members),
                saved_bytes=saved[index],
                cut_bytes=sum(ahead for (home, _), (ahead, _) in crossing.items() if home == index),
            )
        )
    return tuple(stages)


def edges_of(graph: UnitGraph, stage_of: Sequence[int]) -> tuple[Edge, ...]:
    """What flows between the stages of a partition."""
    return tuple(Edge(*pair, *sizes) for pair, sizes in graph.crossing(stage_of).items())


def saved_bytes(graph: UnitGraph, stage_of: Sequence[int]) -> list[int]:
    """Bytes that each stage keeps for backward, one micro-batch; a storage counts once per stage."""
    totals = [0] * (max(stage_of) + 1)
    for item in graph.saved:
        for stage in {stage_of[unit] for unit in item.units}:
            totals[stage] += item.bytes
    return totals


def require_model(plan: Plan, model: nn.Module, name: str) -> None:
    """Refuse a plan that was made for another model."""
    if (fingerprint := model_fingerprint(model)) == plan.model.fingerprint:
        return
    made_for = f"parameters {plan.model.parameters:,}"
    if plan.measured is not None:
        made_for += f", dtype {plan.measured.dtype}"
    here = f"parameters {parameter_count(model):,}, dtype {_dtype_name(model)}"
    raise PlanError(
        f"the plan was made for another model (plan: {plan.model.name}, {made_for}, fingerprint "
        f"{plan.model.fingerprint}; here: {name}, {here}, fingerprint {fingerprint})",
        "A plan names the units of one traced model; names, shapes and dtypes of all parameters must be the same.",
        "Make a new plan for this model with `hybridpar plan`, for the data set that it is trained on.",
    )


def _dtype_name(model: nn.Module) -> str:
    """The dtype of a model's parameters; that of torch where it has none."""
    return str(next(model.parameters(), torch.zeros(())).dtype).removeprefix("torch.")


def stages_from_plan(
    model: nn.Module,
    plan: Plan,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    relay: bool = False,
    fill: Callable[[list[Stage]], None] | None = None,
) -> list[Stage]:
    """The stages that a plan describes.

    Args:
        model: The model that the plan was made for.
        plan: The plan.
        inputs: Example inputs; needed only where the model takes more than one.
        relay: As for `split_model`.
        fill: For a model without memory: called with its stages, gives tensors of the model their values.

    Raises:
        PlanError: The plan is for another model, or names other units than the model has.
        UsageError: The plan recomputes a stage whose forward pass changes Python attributes.
    """
    require_model(plan, model, type(model).__name__)
    given = as_inputs(inputs) if inputs is not None else (_example(model, plan),)
    traced = trace_model(model, given)
    units = find_units(traced, given)
    present = [unit.name for unit in units.graph.units]
    wanted = {unit: index for index, stage in enumerate(plan.partition.stages) for unit in stage.units}
    if len(plan.partition.stages) == 1 and not wanted:  # a plan need not name the units of a model in one piece
        wanted = dict.fromkeys(present, 0)
    if different := sorted(wanted.keys() ^ set(present), key=lambda unit: (unit in present, unit)):
        has = "places {!r}, which the model does not have" if different[0] in wanted else "leaves out {!r}"
        raise PlanError(
            f"the plan does not fit the model: it {has.format(different[0])}",
            f"{len(different)} units are in one of the two only.",
            "Make a new plan for this model with `hybridpar plan`.",
        )
    stage_of = [wanted[unit] for unit in present]
    stages = split_model(units, stage_of, relay=relay)
    if fill is not None:
        fill(stages)
        stages = split_model(units, stage_of, relay=relay)  # over the tensors that there are now
    again = plan.pipeline.recompute if plan.pipeline is not None else ()
    _require_repeatable(model, traced.changes.unrepeatable, [stages[index] for index in again])
    if again and traced.changes.draws:
        raise UsageError(
            f"--recompute {again[0]} with a model that draws random numbers of Python or NumPy",
            "A forward pass that runs again would draw others; torch's are the same in both.",
            "Draw them by torch, in the data, or do not recompute.",
        )
    return stages


def _require_repeatable(model: nn.Module, changing: Mapping[str, str], stages: Iterable[Stage]) -> None:
    """Refuse to run a forward pass twice that changes attributes which are not put back."""
    modules = {module: (path, name) for path, name in changing.items() for module in [model.get_submodule(path)]}
    for stage in stages:
        for module in stage.modules():
            if module in modules:
                path, name = modules[module]
                raise UsageError(
                    f"--recompute {stage.index} with {path} ({type(module).__name__}), whose forward changes its "
                    f"attribute {name!r}",
                    "The stage's forward pass runs twice, and would change it twice.",
                    "Keep it in a buffer, a number or a list of them, which are put back, or do not recompute it.",
                )


def _example(model: nn.Module, plan: Plan) -> torch.Tensor:
    if plan.model.input is None:
        raise UsageError(
            "the plan does not say the shape of the model's inputs",
            "Only a single input is described in a plan.",
            "Give example inputs: stages_from_plan(model, plan, inputs).",
        )
    parameter = next(model.parameters(), torch.zeros(()))
    return torch.zeros(
        plan.partition.micro_batch or 2, *plan.model.input, dtype=parameter.dtype, device=parameter.device
    )
