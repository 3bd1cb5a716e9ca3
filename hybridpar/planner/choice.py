"""Chooses codecs by the exchange alone, for loops of which nothing else is known."""

from __future__ import annotations

import torch
from torch import nn

from hybridpar.comm.world import World
from hybridpar.formats.cache import measurements_directory
from hybridpar.planner.codecs import FIDELITIES, MARGIN, bucket_cost, policies_of, proof_lines, stage_buckets
from hybridpar.planner.inputs import check_fidelity
from hybridpar.planner.links import measure_cluster
from hybridpar.planner.network import Network
from hybridpar.planner.profile import Parameter
from hybridpar.planner.rates import measure_rates
from hybridpar.schedule.layout import Layout


def choose_codecs(
    model: nn.Module, world: World, fidelity: str, bucket_bytes: int, replicas: int
) -> tuple[str, tuple[str, ...]]:
    """What gradients travel fastest as, in the syntax of `--compress`, and what to say of it; a collective.

    Nothing is known of the computation, so all of the exchange counts, as if nothing could hide it.
    """
    if why := nothing_to_choose(model, world, fidelity, replicas):
        return "none", (f"auto     none: {why}",)
    texts = FIDELITIES[fidelity]
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    parameters = tuple(Parameter(name, tuple(parameter.shape), 0) for name, parameter in trained)
    rates = measure_rates(texts, parameters, replicas, world, measurements_directory())
    cluster = measure_cluster(world)
    level = cluster.outer
    assert level is not None

    def decide() -> tuple[str, tuple[str, ...]]:
        network = Network(cluster, Layout.dealt(world.size // replicas, world.size // replicas, replicas=replicas))
        choices = policies_of(fidelity, parameters, tuple(rates.items()), replicas, bucket_bytes)
        times = []
        for choice in choices:
            buckets = stage_buckets(parameters, bucket_bytes)
            times.append(sum(bucket_cost(bucket, choice, network, rates).total_ms for bucket in buckets))
        best = min(range(len(choices)), key=lambda index: times[index] * choices[index].steps)
        if times[best] * choices[best].steps > MARGIN * times[0]:
            best = 0
        return str(choices[best].policy), (
            f"auto     {choices[best].name} (of none, {', '.join(texts)})",
            f"auto     an exchange takes about {times[best]:,.1f} ms, with none {times[0]:,.1f} ms",
            f"auto     by {world.transport}, {level.bandwidth / 1e6:,.3g} MB/s, {level.latency_ms:.2f} ms a message",
            *(f"auto     {line}" for line in proof_lines(choices[best].codecs.values())),
        )

    return world.from_main(decide)


def nothing_to_choose(model: nn.Module, world: World, fidelity: str, replicas: int) -> str:
    """Why gradients are sent as they are, whatever a measurement would say; empty where one is needed."""
    check_fidelity(fidelity)
    if replicas == 1:
        return "there is a single replica, and its gradients go nowhere"
    if not FIDELITIES[fidelity]:
        return f"fidelity {fidelity} allows nothing else"
    if world.transport == "shared memory":
        return "in shared memory gradients are added where they lie"
    return other_types(model)


def other_types(model: nn.Module) -> str:
    """Why no codec can be used for a model whose parameters are not all float32; empty where they are."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            return f"the parameter {name!r} is {parameter.dtype}, and codecs take float32"
    return ""
