"""Settings, planner inputs and drawn plans that the tables of the planner share."""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import nn

from benchmarks.rig.task import CLASSES, TINY, Setting
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.partition.profile import Clock, whole_step_ms
from hybridpar.plan import Compute, Plan
from hybridpar.planner.codecs import FIDELITIES
from hybridpar.planner.evaluate import Outcome
from hybridpar.planner.explain import describe
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import Fidelity, PlannerInputs, Question
from hybridpar.planner.probes import measure_inputs
from hybridpar.planner.record import plan_of
from hybridpar.planner.search import find_plan
from hybridpar.planner.trials import random_batch
from hybridpar.planner.ways import Way
from hybridpar.train.trainer import open_trial
from hybridpar.train.trial import Trial


class _CifarVgg(nn.Module):
    """VGG-11 (configuration A) for 32x32 images: its features, and one linear layer in place of three."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        import torchvision

        self.features = torchvision.models.vgg11(num_classes=classes).features
        self.classifier = nn.Linear(512, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return scores


def vgg11_cifar(num_classes: int = CLASSES) -> nn.Module:
    """See `_CifarVgg`."""
    return _CifarVgg(num_classes)


#: What is trained, by name; batches are those of all workers.
SETTINGS = {
    "resnet18": Setting("resnet18", 64, 32),
    "mobilenet_v2": Setting("mobilenet_v2", 64, 32),
    "vgg11_cifar": Setting("benchmarks.planner.common:vgg11_cifar", 32, 64),
}
#: As benchmarks/outer trains them.
ON_DIGITS = {f"{model}-digits": Setting(model, 32, 64) for model in ("resnet18", "resnet34", "timm/resnet10t")}
QUICK = Setting(TINY, 16, 16)
#: Length of the run that is planned, which outer loops depend on.
RUN_STEPS = 230


def measured_inputs(setting: Setting, world: World, fidelity: Fidelity) -> tuple[PlannerInputs, Way | None]:
    """What a search reads, and the way to compute a step, measured by the workers that will run it; a collective."""
    config = TrainConfig(batch_size=setting.batch, fidelity=fidelity)
    shape, decided = (3, setting.side, setting.side), frozenset({"amp"})  # one way for plans of all fidelities
    name = setting.model.rpartition(":")[2]
    question = Question(name, shape, config, Fixed(workers=world.size), decided, RUN_STEPS)
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, HYBRIDPAR_CACHE=cache):
        return measure_inputs(setting.build(), question, world, open_trial=open_trial)


class Reference:
    """How fast the machine is: plain training steps of a model, by all workers at a time.

    Machines that others share change their speed by a tenth within minutes, which is no error of what was predicted
    before; so rows say it.
    """

    def __init__(self, setting: Setting, world: World) -> None:
        self._model, self._world = setting.build(), world
        self._images = random_batch((3, setting.side, setting.side), setting.batch // world.size, world.device)
        self._first = self._step_ms()

    def _step_ms(self) -> float:
        clock = Clock(self._world.device)
        self._world.barrier()
        times = [whole_step_ms(self._model, (self._images,), clock) for _ in range(4)]
        medians: list[float] = self._world.gather(statistics.median(times[1:]))  # type: ignore[assignment]
        return statistics.mean(medians)

    def slower(self) -> float:
        """How much slower it is than when this was made; a collective."""
        return self._step_ms() / self._first


def make_trial(setting: Setting, plan: Plan, world: World) -> Trial:
    """A plan of a setting, ready to take steps; a collective."""
    images = random_batch((3, setting.side, setting.side), setting.batch, world.device)
    assert plan.compute is not None
    options = TrainConfig(batch_size=setting.batch, **plan.compute.options)
    return open_trial(setting.build(), options, world, images, plan)


@dataclass(frozen=True)
class Drawn:
    """A plan that is to be measured.

    Attributes:
        name: What it is, in words.
        plan: The plan.
        predicted_ms: A step of it.
        position: In the ranking by prediction, from 1 on.
        steps: Steps to the same loss over those of float32.
        fidelities: Those that allow it.
    """

    name: str
    plan: Plan
    predicted_ms: float
    position: int
    steps: float
    fidelities: tuple[str, ...]


def drawn_plans(
    inputs: PlannerInputs, count: int, compute: Compute | None = None
) -> tuple[list[Drawn], dict[str, str]]:
    """Plans over the whole predicted range: those chosen, the first five, all baselines, and others evenly between.

    Baselines are one device, data parallelism with gradients as they are and with each codec for all layers, and the
    pipeline that is predicted to be fastest.

    Args:
        inputs: Of the search, with fidelity `lossy`.
        count: How many plans, at least.
        compute: How their steps are computed.

    Returns:
        The plans, and for each fidelity the name of the one that the planner chooses.
    """
    answers = {fidelity: find_plan(replace(inputs, fidelity=fidelity)) for fidelity in ("exact", "close", "lossy")}
    answer = find_plan(inputs)
    ranked = [outcome for outcome in answer.ranked if _can_run(outcome, inputs.workers)]

    def name_of(outcome: Outcome) -> str:
        return describe(outcome.candidate, answer)

    outcomes = {name_of(outcome): outcome for outcome in reversed(ranked)}  # of equal names the fastest
    chosen = {fidelity: describe(search.chosen.candidate, search) for fidelity, search in answers.items()}
    data_parallel = [outcome for outcome in ranked if outcome.candidate.layout.replicas == inputs.workers]
    by_codec = [
        [outcome for outcome in data_parallel if outcome.candidate.codec == choice][:1]
        for choice in answer.evaluator.space.codec_choices
        if choice.alike
    ]
    pipelines = [outcome for outcome in ranked if outcome.candidate.layout.stages > 1][:1]
    baselines = [outcome for outcome in answer.baselines.values() if outcome is not None]
    wanted = [*ranked[:5], *baselines, *(outcome for first in by_codec for outcome in first), *pipelines]
    names = list(dict.fromkeys([*chosen.values(), *map(name_of, wanted)]))
    rest = [name for name in reversed(outcomes) if name not in names]
    lacking = min(max(0, count - len(names)), len(rest))
    names += [rest[int((number + 1) * len(rest) / lacking) - 1] for number in range(lacking)]
    positions = {outcome.candidate: number for number, outcome in enumerate(answer.ranked, start=1)}
    drawn = []
    for name in names:
        outcome = outcomes[name]
        codec = outcome.candidate.codec
        allowed = tuple(fidelity for fidelity in answers if set(codec.codecs.values()) <= set(FIDELITIES[fidelity]))
        plan = plan_of(answer, outcome, compute)
        drawn.append(Drawn(name, plan, outcome.step_ms, positions[outcome.candidate], codec.steps, allowed))
    return drawn, chosen


def _can_run(outcome: Outcome, workers: int) -> bool:
    """Whether a plan can be tried in a job of so many workers: a pipeline on a part of them cannot."""
    layout = outcome.candidate.layout
    return layout.stages == 1 or layout.workers in (1, workers)
