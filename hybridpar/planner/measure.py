"""Profiles a model for the planner: its units, parameters and their times, in one way to compute it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hybridpar.models import model_fingerprint, parameter_count
from hybridpar.models.deferred import is_deferred
from hybridpar.partition.graph_facts import state_of
from hybridpar.partition.profile import Progress, device_roofline, estimate_units
from hybridpar.partition.profile_cache import device_name, measured_profile, memory_format_name
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import ModelUnits, find_units
from hybridpar.plan import ModelInfo
from hybridpar.planner.profile import ModelProfile, Parameter, SizedTimes
from hybridpar.tvm_kernels.swap import optimize, restore

#: Layers that normalise over the micro-batch.
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def profile_model(
    model: nn.Module,
    examples: Sequence[torch.Tensor],
    *,
    name: str | None = None,
    measure: bool = True,
    passes: int = 2,
    progress: Progress | None = None,
) -> ModelProfile:
    """Find out what the planner needs to know of a model.

    Args:
        model: The model, in the memory format and with the kernels that it is trained in; see `set_way`.
        examples: Inputs of micro-batches, each of a size to profile, likewise.
        name: What to call the model; default: its class.
        measure: Run units; else, and of a model without memory, their times are estimated.
        passes: Over each unit.
        progress: Called as units are measured.

    Returns:
        Units, parameters and times of the model, without its weights.
    """
    measure = measure and not is_deferred(model)
    ascending = sorted(examples, key=len)
    first = ascending[0]
    traced = trace_model(model, (first,))
    units = find_units(traced, (first,))
    sizes, noise = [], 0.0
    for example in ascending:
        of_size = units if example is first else find_units(traced, (example,))
        if measure:
            times = measured_profile(of_size, (example,), passes=passes, threads=None, cache=None, progress=progress)
        else:
            times = estimate_units(of_size.graph, device_roofline(example.device, None))
        sizes.append(SizedTimes(len(example), times.forward_ms, times.backward_ms))
        noise = max(noise, times.noise)
    return ModelProfile(
        info=ModelInfo(
            name=name or type(model).__name__,
            fingerprint=model_fingerprint(model),
            parameters=parameter_count(model),
            input=tuple(first.shape[1:]),
        ),
        graph=units.graph,
        samples=len(first),
        parameters=parameters_of(units),
        sizes=tuple(sizes),
        noise=noise,
        batch_norm=any(isinstance(module, _BATCH_NORMS) for module in model.modules()),
        counts=bool(traced.changes.unrepeatable or traced.changes.draws),
        device=device_name(first.device),
        threads=torch.get_num_threads(),
        memory_format=memory_format_name(first),
        source="measured" if measure else "analytic",
        versions={"torch": str(torch.__version__)},
    )


def set_way(model: nn.Module, example: torch.Tensor, form: str, kernel: str = "stock") -> torch.Tensor:
    """Let a model compute in one of its ways."""
    layout = torch.channels_last if form == "channels_last" else torch.contiguous_format
    restore(model).to(memory_format=layout)
    if kernel == "tuned":
        optimize(model)
    return example.contiguous(memory_format=layout if example.dim() == 4 else torch.contiguous_format)


def parameters_of(units: ModelUnits) -> tuple[Parameter, ...]:
    """The trained parameters of a model, each with the first unit that uses it."""
    home: dict[int, int] = {}
    for index, nodes in enumerate(units.nodes):
        for node in nodes:
            for state in state_of(units.traced, node):
                home.setdefault(id(state), index)
    # A parameter that no unit uses has no gradient to exchange.
    return tuple(
        Parameter(name, tuple(parameter.shape), home[id(parameter)])
        for name, parameter in units.model.named_parameters()
        if parameter.requires_grad and id(parameter) in home
    )
