"""Cuts a model into the stages of its plan, equal on all workers.

Rank 0 measures the model and cuts it; the others follow its plan, so that noise cannot make two workers disagree.
"""

from __future__ import annotations

import copy
import json
import logging
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hybridpar import partition  # a run without stages loads nothing of it
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.formats.cache import measurements_directory
from hybridpar.models import autocast
from hybridpar.models.deferred import MEASURED_BYTES, DeferredModel, named_tensors
from hybridpar.models.state import same_modes
from hybridpar.pipeline.step import PipelineOptions
from hybridpar.plan import ResolvedPlan, parse_plan
from hybridpar.planner.resolve import cut_for_recompute, lane_threads, resolve

if TYPE_CHECKING:
    from hybridpar.partition.stage import Stage

_log = logging.getLogger(__name__)


def cut_model(
    model: nn.Module,
    example: torch.Tensor,
    plan: ResolvedPlan,
    config: TrainConfig,
    world: World,
    deferred: DeferredModel | None = None,
) -> tuple[ResolvedPlan, list[Stage]]:
    """Cut a model into the stages of a plan; a collective."""
    if not any(stage.units for stage in plan.partition.stages):
        layout, device = plan.layout, example.device
        fewer = "all" in config.recompute and not config.is_staged  # nobody asked for so many stages

        def make() -> str:
            """Measure and cut on rank 0; an error there is raised on all workers."""
            threads = lane_threads(layout, device)
            measured = model
            if deferred is not None and deferred.nbytes <= MEASURED_BYTES:
                measured = deferred.build().to(device)
                for twin, module in zip(measured.modules(), model.modules(), strict=True):
                    twin.training = module.training
                if partition.memory_format_name(example) == "channels_last":
                    measured.to(memory_format=torch.channels_last)
            with autocast(config.amp, device):
                made = partition.partition_model(
                    measured, example, layout.stages, fewer=fewer, threads=threads, cache=measurements_directory()
                )
            return made.plan.to_json()

        made = parse_plan(json.loads(world.from_main(make, long=True)))
        if (count := len(made.partition.stages)) < layout.stages:
            layout = resolve(cut_for_recompute(config, world.size, count), world.size).layout
            placement = plan.placement.model_copy(update={"layout": layout})
            pipeline = plan.pipeline.model_copy(update={"recompute": tuple(range(count))})
            plan = plan.model_copy(update={"placement": placement, "pipeline": pipeline})
        facts = {"memory_format", "dtype", "seed"}
        measured = (made.measured or plan.measured).model_copy(update=plan.measured.model_dump(include=facts))
        plan = plan.model_copy(update={"partition": made.partition, "measured": measured})
    plan = plan.with_rows()
    if deferred is None:
        return plan, partition.stages_from_plan(model, plan, (example,))
    ranks = plan.layout.rows[plan.layout.replica_of(world.rank)]

    def fill(stages: list[Stage]) -> None:
        mine = [stage for stage in stages if ranks[stage.index][0] == world.rank]
        held = {name for name, _, _ in named_tensors(model)}
        deferred.fill((name for stage in mine for name, _, _ in named_tensors(stage) if name in held), example.device)

    return plan, partition.stages_from_plan(model, plan, (example,), fill=fill)


def modes_of_graphs(model: nn.Module, stages: Sequence[Stage]) -> list[tuple[str, nn.Module, bool]]:
    """The modes that the stages are cut for, of modules that are in their graphs no more; none if it is all the same.

    Modules that a graph calls look at their own modes in every pass.
    """
    if not any(stage.by_mode for stage in stages):
        return []
    called = {module for stage in stages for module in stage.modules()}
    with same_modes(model):
        if not model.training:
            model.train()
        return [(name, module, module.training) for name, module in model.named_modules() if module not in called]


def check_modes(modes: Iterable[tuple[str, nn.Module, bool]]) -> None:
    """Refuse a step in other modes than those that the stages are cut for."""
    for name, module, training in modes:
        if module.training != training:
            now, then = ("training", "evaluation") if module.training else ("evaluation", "training")
            raise UsageError(
                f"{name or type(module).__name__} is in {now} mode, and the stages are cut for {then} mode",
                "What the model computes depends on it, and its graph was made before.",
                "Put it back, or into that mode before the Trainer is made, or keep the model whole (--stages 1).",
            )


class TakenValues:
    """What the graphs of stages have of a model as it was when they were made; a step with something else is refused.

    Modules that a graph calls are looked at in every pass.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage]) -> None:
        taken = set[str]().union(*(stage.taken for stage in stages))
        called = {module for stage in stages for module in stage.modules()}
        #: Parameters, buffers and modules inside of modules that the stages do not have.
        self._held: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        #: Attributes, and tensors that something was computed from.
        self._values: list[tuple[str, dict[str, Any], Any]] = []
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            held: dict[str, Any]
            for held in (module._parameters, module._buffers, module._modules):
                if module not in called and held:
                    self._held.append((prefix, held, dict(held)))
                self._values += [(prefix + name, held, _copied(held[name])) for name in held if prefix + name in taken]
            held = vars(module)
            for name in held:
                if prefix + name in taken:  # graphs have tensors themselves, and see when they are written into
                    value = held[name]
                    self._values.append(
                        (prefix + name, held, value if isinstance(value, torch.Tensor) else _copied(value))
                    )

    def check(self) -> None:
        """Refuse a step for which something has changed."""
        for prefix, held, before in self._held:
            if held.keys() != before.keys() or not all(map(operator.is_, held.values(), before.values())):
                names = {*held.items()} ^ {*before.items()}
                _refuse_changed(prefix + min(name for name, _ in names))
        for name, held, value in self._values:
            present = held.get(name.rpartition(".")[2])
            if present is not value and not _equals(present, value):
                _refuse_changed(name)


def _copied(value: Any) -> Any:
    """What a value is compared with later; something that cannot be compared is itself."""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.detach().clone()
    return copy.deepcopy(value) if _is_plain(value) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.Size))


def _equals(present: Any, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(present, torch.Tensor) and torch.equal(present, value)
    return type(present) is type(value) and _is_plain(present) and present == value


def _refuse_changed(name: str) -> None:
    raise UsageError(
        f"{name!r} of the model has changed since it was cut into stages",
        "Stages are made from a graph of the model, which has the value that was read when it was traced.",
        "Keep what changes in a buffer that forward uses as it is and that is written into, set fx_leaf = True on the "
        "class whose forward reads it, which is then kept whole, or keep the model in one piece (--stages 1).",
    )


def pipeline_options(
    plan: ResolvedPlan, example: torch.Tensor, world: World, device: torch.device, micro_batches: int, **options: Any
) -> PipelineOptions:
    """The options of the pipeline that follows a plan."""
    layout, pipeline, orders = plan.layout, plan.pipeline, plan.orders(micro_batches)
    if world.size < layout.workers:  # an outer loop trains each replica by itself
        replica = layout.replica_of(world.members[0])
        layout, orders = layout.replica(replica), (orders[0 if layout.is_equal else replica],)
    scale = example.shape[0] / (plan.partition.micro_batch or example.shape[0])
    if pipeline.offload and device.type == "cpu" and world.is_main:
        _log.warning("--offload saves no memory here: a CPU computes in the host's memory")
    return PipelineOptions(
        layout,
        orders,
        recompute=pipeline.recompute,
        offload=pipeline.offload,
        threads=lane_threads(layout, device),
        costs=plan.pass_costs(scale),
        sync_lanes=plan.sync.lanes,
        **options,
    )
