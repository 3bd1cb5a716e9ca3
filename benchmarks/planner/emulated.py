"""Why: a machine with two cores cannot compute as four devices, but it can wait as they do, and exchange for real.

Every worker trains a net with the parameters of the real one, whose layers wait as long as the real ones compute, and
whose gradients are there when theirs would be. What is exchanged, codecs included, is real. So the links are what is
held against the prediction, with four workers on each of them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipeline.checks import write_checks
from benchmarks.planner.common import CLASSES, QUICK, RATE, SETTINGS, ForeignLoad, Setting, cluster_of, drawn_plans
from benchmarks.planner.predicted import error_row
from benchmarks.rig.rank import process_group
from hybridpar.cluster_file import ClusterSpec
from hybridpar.config import TrainConfig
from hybridpar.pipeline.world import World
from hybridpar.plan_trials import FIRST_STEPS, Trial, random_batch, time_plans, workers_of
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.measure import measure_rates, profile_model
from hybridpar.planner.profile import ModelProfile, Parameter
from hybridpar.planner.step_costs import measure_step_costs
from hybridpar.planner.steps import planned_codecs


class _Wait(torch.autograd.Function):
    """Waits in the forward and in the backward pass, and has a gradient for every parameter."""

    @staticmethod
    def forward(context: Any, signal: Tensor, ahead: float, back: float, *parameters: Tensor) -> Tensor:
        time.sleep(ahead)
        context.back = back
        context.save_for_backward(*parameters)
        return signal.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(context.back)
        # Of the size that gradients have, so that what codecs write does not shrink to nothing.
        own = [1e-3 * torch.ones_like(one) for one in context.saved_tensors]
        return gradients[0], None, None, *own


class _Layer(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(1e-2 * torch.randn(shape)) for shape in shapes])
        self._times = (forward_ms / 1e3, backward_ms / 1e3)

    def forward(self, signal: Tensor) -> Tensor:
        waited: Tensor = _Wait.apply(signal, *self._times, *self.weights)
        return waited


class EmulatedNet(nn.Module):
    """A net that takes the time of another, and has its parameters.

    Attributes:
        names: Of each parameter of the other one, by its name there.

    Args:
        profile: Of the other.
        samples: Of a micro-batch.
    """

    def __init__(self, profile: ModelProfile, samples: int) -> None:
        super().__init__()
        graph = profile.timed(0, samples)
        owned: dict[int, list[Parameter]] = {}
        for one in profile.parameters:
            owned.setdefault(one.unit, []).append(one)
        self.names: dict[str, str] = {}
        layers, ahead, back = [], 0.0, 0.0
        for index, unit in enumerate(graph.units):
            ahead, back = ahead + unit.forward_ms, back + unit.backward_ms
            if index in owned or index == len(graph.units) - 1:
                own = owned.get(index, [])
                self.names |= {one.name: f"layers.{len(layers)}.weights.{place}" for place, one in enumerate(own)}
                layers.append(_Layer([one.shape for one in own], ahead, back))
                ahead = back = 0.0
        self.layers = nn.Sequential(*layers)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        signal = self.scale * images.flatten(1)[:, :CLASSES]
        result: Tensor = self.layers(signal)
        return result


def measure(models: list[str], plans: int, rounds: int, seconds: float, quick: bool, output: str | None) -> None:
    """Predict and measure data-parallel plans of every model with four emulated devices; rank 0 writes the rows.

    Args:
        models: Names of settings.
        plans: How many of each.
        rounds: Steps of each plan.
        seconds: Of measuring a setting, at most.
        quick: A small net.
        output: The table.
    """
    with process_group(timeout=900) as (rank, _):
        world = World.join(lanes=2, timeout=900)
        cluster = _of_devices(cluster_of(world))
        if rank == 0:
            print(cluster.to_toml(), flush=True)
        for setting in [QUICK] if quick else [SETTINGS[name] for name in models]:
            inputs, net = _emulated(setting, world, cluster)
            drawn = world.from_main(lambda inputs=inputs: drawn_plans(inputs, 4 * plans)[0])  # type: ignore[misc]
            drawn = [one for one in drawn if len(one.plan.partition.stages) == 1 and workers_of(one.plan) > 1][:plans]
            images, targets = random_batch((3, setting.side, setting.side), setting.batch, CLASSES, world.device)
            config = TrainConfig(lr=RATE, weight_decay=0.0)
            trials = {one.name: Trial(one.plan, net, images, targets, world, config) for one in drawn}
            for trial in trials.values():
                for _ in range(FIRST_STEPS):
                    trial.step()
            steps = {name: trial.step for name, trial in trials.items()}
            with ForeignLoad(world) as load:
                times = time_plans(steps, world, rounds=rounds, seconds=seconds)
            for trial in trials.values():
                trial.close()
            if rank == 0:
                emulated = Setting(f"{setting.model} on 4 emulated devices", setting.side, setting.batch)
                write_checks(
                    [error_row(emulated, one, times[one.name], load.told) for one in drawn], output, "emulated"
                )
        world.close()


def _of_devices(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with devices of their own in place of cores: what moves bytes takes nothing from what computes."""
    hosts = tuple(one.model_copy(update={"kind": "cuda", "communication_cores": 2.0}) for one in cluster.hosts)
    update: dict[str, object] = {"hosts": hosts}
    for name in ("inside", "between"):
        if (level := getattr(cluster, name)) is not None:
            update[name] = level.model_copy(update={"cores": None})
    return cluster.model_copy(update=update)


def _emulated(setting: Setting, world: World, cluster: ClusterSpec) -> tuple[PlannerInputs, EmulatedNet]:
    """What a search reads, and the net that it is about; a collective.

    What is real is measured by all workers at a time, because they share the cores for it.
    """
    each = setting.batch // world.size
    images, _ = random_batch((3, setting.side, setting.side), each, CLASSES, world.device)
    profile = world.from_main(lambda: profile_model(setting.build(), [images], name=setting.name, threads=1))
    profile = replace(profile, batch_norm=False)  # a wait normalises nothing
    net = EmulatedNet(profile, each)
    world.barrier()
    rest = measure_step_costs(net, images)
    world.barrier()
    rates = measure_rates(planned_codecs("lossy"), profile.parameters, world.size, world.device, world=world)
    parameters = tuple(replace(one, name=net.names[one.name]) for one in profile.parameters)
    profile = replace(profile, parameters=parameters)
    # Waits add nothing to gradients, and take as long as they were told.
    profile = replace(profile, update_ms=rest.update_ms, collect_ms=rest.collect_ms)
    inputs = PlannerInputs(profile, cluster, setting.batch, "lossy", rates, most_micro_batches=1)
    return world.from_main(lambda: inputs), net
