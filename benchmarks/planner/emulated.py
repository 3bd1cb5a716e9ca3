"""Compares predicted with measured steps of four workers on two cores, with emulated computation.

Every worker trains a net with the parameters of the real one, whose layers wait as long as the real ones compute, and
whose gradients are ready when theirs would be. What is exchanged, codecs included, is real. So the
prediction of communication is what is tested, with four workers on each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipeline.checks import write_checks
from benchmarks.planner.common import CLASSES, QUICK, RATE, SETTINGS, Drawn, ForeignLoad, Setting, cluster_of
from benchmarks.planner.predicted import Running, error_row, in_turns, planned
from benchmarks.rig.rank import process_group
from hybridpar.comm.world import World
from hybridpar.commands.plan.trials import Trial, random_batch
from hybridpar.config import TrainConfig
from hybridpar.machine.cluster_file import ClusterSpec, LinkLevel
from hybridpar.machine.process import available_cores
from hybridpar.planner.codecs import planned_codecs
from hybridpar.planner.evaluate import Evaluator
from hybridpar.planner.explain import describe
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.measure import measure_rates, profile_model
from hybridpar.planner.profile import ModelProfile, Parameter
from hybridpar.planner.record import plan_of
from hybridpar.planner.search import find_plan
from hybridpar.planner.space import Candidate
from hybridpar.planner.step_costs import measure_step_costs
from hybridpar.schedule.costs import Costs

_CONFIG = TrainConfig(lr=RATE, weight_decay=0.0)


class _Device:
    """Computes one thing after the other, from the start of a pass on; a late caller does not delay it."""

    def __init__(self) -> None:
        self._done = 0.0

    def start(self) -> None:
        """A pass begins."""
        self._done = time.perf_counter()

    def compute(self, seconds: float) -> None:
        """Wait until it has computed for so much longer."""
        self._done += seconds
        time.sleep(max(0.0, self._done - time.perf_counter()))


class _Pass(torch.autograd.Function):
    """The forward pass begins with what comes after this, or the backward pass with what came before it."""

    @staticmethod
    def forward(context: Any, signal: Tensor, device: _Device, back: bool) -> Tensor:
        context.device, context.back = device, back
        if not back:
            device.start()
        return signal.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if context.back:
            context.device.start()
        return gradients[0], None, None


class _Wait(torch.autograd.Function):
    """Waits in the forward and in the backward pass, and has a gradient for every parameter."""

    @staticmethod
    def forward(
        context: Any, signal: Tensor, device: _Device, ahead: float, back: float, *parameters: Tensor
    ) -> Tensor:
        device.compute(ahead)
        context.device, context.back = device, back
        context.save_for_backward(*parameters)
        return signal.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Of the size that gradients have, so that what codecs write does not shrink to nothing.
        own = [torch.full_like(one, 1e-3) for one in context.saved_tensors]
        context.device.compute(context.back)
        return gradients[0], None, None, None, *own


class _Layer(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], forward_ms: float, backward_ms: float, device: _Device) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(1e-2 * torch.randn(shape)) for shape in shapes])
        self._times = (forward_ms / 1e3, backward_ms / 1e3)
        self._device = device

    def forward(self, signal: Tensor) -> Tensor:
        waited: Tensor = _Wait.apply(signal, self._device, *self._times, *self.weights)
        return waited


class EmulatedNet(nn.Module):
    """A net that takes the time of another, and has its parameters.

    Attributes:
        names: Of each parameter of the other one, by its name there.

    Args:
        profile: Of the other.
        samples: Of a step.
    """

    def __init__(self, profile: ModelProfile, samples: int) -> None:
        super().__init__()
        graph = profile.timed(0, samples)
        owned: dict[int, list[Parameter]] = {}
        for one in profile.parameters:
            owned.setdefault(one.unit, []).append(one)
        self.names: dict[str, str] = {}
        self._device = device = _Device()
        layers: list[nn.Module] = []
        ahead = back = 0.0
        for index, unit in enumerate(graph.units):
            ahead, back = ahead + unit.forward_ms, back + unit.backward_ms
            if index in owned or index == len(graph.units) - 1:
                own = owned.get(index, [])
                self.names |= {one.name: f"layers.{len(layers)}.weights.{place}" for place, one in enumerate(own)}
                layers.append(_Layer([one.shape for one in own], ahead, back, device))
                ahead = back = 0.0
        self.layers = nn.Sequential(*layers)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        signal = _Pass.apply(self.scale * images.flatten(1)[:, :CLASSES], self._device, False)
        result: Tensor = _Pass.apply(self.layers(signal), self._device, True)
        return result


class EmulatedDevices(Evaluator):
    """Predicts steps of workers that compute on devices of their own, and do all else on their part of the cores."""

    def costs(self, candidate: Candidate, *, exchange: bool = True) -> Costs:
        """See `Evaluator`. What takes one core was measured by all workers at a time, and so takes a worker's part."""
        return replace(super().costs(candidate, exchange=exchange), cores=1.0, compute_cores=0.0)


def measure(models: list[str], plans: int, rounds: int, seconds: float, quick: bool, output: str | None) -> None:
    """Predict and measure data-parallel plans of every model with four emulated devices; rank 0 writes the rows.

    Args:
        models: Names of settings.
        plans: How many of each.
        rounds: Steps of each visit of a plan.
        seconds: After which no new round of visits begins.
        quick: A small net.
        output: The table.
    """
    with process_group(timeout=900) as (rank, _):
        world = World.join(lanes=2, timeout=900)
        cluster = _in_parts_of_cores(cluster_of(world))
        if rank == 0:
            print(cluster.to_toml(), flush=True)
        for one in [QUICK] if quick else [SETTINGS[name] for name in models]:
            # Each device has what two have in the other tables: it must compute for longer than a core needs for its
            # gradients.
            setting = replace(one, batch=world.size * one.batch)
            inputs, net = _emulated(setting, world, cluster)

            def draw(inputs: PlannerInputs = inputs) -> list[tuple[Any, ...]]:
                return [astuple(one) for one in _drawn(inputs, plans)]

            drawn = [Drawn(*one) for one in world.from_main(draw)]
            batch = random_batch((3, setting.side, setting.side), setting.batch, CLASSES, world.device)
            made: dict[str, Callable[[], Running]] = {
                each.name: lambda plan=each.plan, net=net, batch=batch: planned(  # type: ignore[misc]
                    Trial(plan, net, batch[0], batch[1], world, _CONFIG)
                )
                for each in drawn
            }
            with ForeignLoad(world) as load:
                times = in_turns(made, world, rounds, seconds)
            if rank == 0:
                emulated = Setting(f"{setting.name} on 4 emulated devices", setting.side, setting.batch)
                rows = [error_row(emulated, each, times[each.name], load.told) for each in drawn]
                write_checks(rows, output, "emulated")
        world.close()


def _drawn(inputs: PlannerInputs, count: int) -> list[Drawn]:
    """Data-parallel plans on all devices over the whole predicted range; float32 is among them."""
    answer = find_plan(replace(inputs, fixed=Fixed(stages=1, replicas=inputs.workers)), prune=False)
    evaluator = EmulatedDevices(answer.evaluator.space)
    shapes = [one.candidate for one in answer.ranked if one.candidate.shape.replicas == inputs.workers]
    ranked = sorted((evaluator.outcome(one) for one in shapes), key=lambda one: one.step_ms)
    plain = next(place for place, one in enumerate(ranked) if one.candidate.codec == 0)
    step = max(1.0, (len(ranked) - 1) / max(1, count - 2))
    places = sorted({plain, *(min(len(ranked) - 1, round(number * step)) for number in range(count - 1))})
    return [
        Drawn(
            describe(ranked[place].candidate, answer),
            plan_of(answer, ranked[place]),
            ranked[place].step_ms,
            place + 1,
            1.0,
            (),
        )
        for place in places
    ]


def _in_parts_of_cores(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with the cores that links keep busy counted in parts that a worker has."""
    parts = cluster.workers / len(available_cores())

    def scaled(level: LinkLevel | None) -> LinkLevel | None:
        if level is None or level.cores is None:
            return level
        uses = level.cores.model_dump(exclude_none=True)
        return level.model_copy(
            update={"cores": type(level.cores)(**{name: parts * use for name, use in uses.items()})}
        )

    return cluster.model_copy(update={"inside": scaled(cluster.inside), "between": scaled(cluster.between)})


def _emulated(setting: Setting, world: World, cluster: ClusterSpec) -> tuple[PlannerInputs, EmulatedNet]:
    """What a search reads, and the net that it is about; a collective.

    What is real is measured by all workers at a time, because they share the cores for it.
    """
    each = setting.batch // world.size
    images, _ = random_batch((3, setting.side, setting.side), each, CLASSES, world.device)

    def with_one_thread() -> ModelProfile:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return profile_model(setting.build(), [images], name=setting.name)
        finally:
            torch.set_num_threads(before)

    profile = world.from_main(with_one_thread)
    profile = replace(profile, batch_norm=False)  # a wait normalises nothing
    net = EmulatedNet(profile, each)
    world.barrier()
    rest = measure_step_costs(net, images)
    world.barrier()
    rates = measure_rates(planned_codecs("lossy"), profile.parameters, world.size, world.device, world=world)
    parameters = tuple(replace(one, name=net.names[one.name]) for one in profile.parameters)
    profile = replace(profile, parameters=parameters)
    # Waits add nothing to gradients, and gradients are copied while the device computes the next ones.
    profile = replace(profile, update_ms=rest.update_ms, collect_ms=0.0, accumulate_ms=0.0)
    inputs = PlannerInputs(profile, cluster, setting.batch, "lossy", rates, most_micro_batches=1)
    return world.from_main(lambda: inputs), net
