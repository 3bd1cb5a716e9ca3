"""Settings, planner inputs and drawn plans that all tables of the planner share."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import nn

from benchmarks.rig import load
from benchmarks.rig.paired import FOREIGN_LOAD
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.models import build_model, seed_everything
from hybridpar.partition.profile import Clock, whole_step_ms
from hybridpar.plan import Compute, Plan
from hybridpar.planner.codecs import FIDELITIES
from hybridpar.planner.evaluate import Outcome
from hybridpar.planner.explain import describe
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import Fidelity, PlannerInputs
from hybridpar.planner.probes import Question, measure_inputs
from hybridpar.planner.record import plan_of
from hybridpar.planner.search import find_plan
from hybridpar.planner.trials import random_batch
from hybridpar.planner.ways import Way
from hybridpar.train.trainer import open_trial
from hybridpar.train.trial import Trial

CLASSES = 10
RATE = 1e-3


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        model: Name of a torchvision model, or `module:factory`.
        side: Height and width of the images.
        batch: Samples of a step, over all workers.
    """

    model: str
    side: int
    batch: int

    def __str__(self) -> str:
        return f"{self.name}, {self.side}x{self.side} images, batch {self.batch}"

    @property
    def name(self) -> str:
        """Of the model, without the place of its factory."""
        return self.model.rpartition(":")[2]

    def build(self) -> nn.Module:
        """The model, always with the same weights."""
        seed_everything(0)
        return build_model(self.model, CLASSES)


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


def tiny_net(num_classes: int = CLASSES) -> nn.Module:
    """For `--quick`: shows whether a table runs, on a net of milliseconds."""
    from benchmarks.pipeline.setups import tiny_net as net

    return net(num_classes)


SETTINGS = {
    one.name: one
    for one in (
        Setting("resnet18", 64, 32),
        Setting("mobilenet_v2", 64, 32),
        Setting("benchmarks.planner.common:vgg11_cifar", 32, 64),
    )
} | {f"{model}-digits": Setting(model, 32, 64) for model in ("resnet18", "resnet34", "timm/resnet10t")}
#: Length of the run that is planned, which outer loops depend on.
RUN_STEPS = 230
QUICK = Setting("benchmarks.planner.common:tiny_net", 16, 16)


def measured_inputs(setting: Setting, world: World, fidelity: Fidelity) -> tuple[PlannerInputs, Way | None]:
    """What a search reads, and the way to compute a step, measured by the workers that will run it; a collective.

    Args:
        setting: What is trained.
        world: All workers of the job.
        fidelity: What the search may change.
    """
    config = TrainConfig(batch_size=setting.batch, fidelity=fidelity)
    shape, decided = (3, setting.side, setting.side), frozenset({"amp"})  # one way for plans of all fidelities
    asked = Question(setting.name, shape, config, Fixed(workers=world.size), decided, RUN_STEPS)
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, HYBRIDPAR_CACHE=cache):
        return measure_inputs(setting.build(), asked, world, open_trial=open_trial)


class Reference:
    """How fast the machine is: plain training steps of a model, by all workers at a time.

    Machines that others share change their speed by a tenth within minutes, which is no error of what was predicted
    before; so it is told beside every row.

    Args:
        setting: What is trained.
        world: All workers of the job.
    """

    def __init__(self, setting: Setting, world: World) -> None:
        self._model, self._world = setting.build(), world
        each = setting.batch // world.size
        self._images = random_batch((3, setting.side, setting.side), each, world.device)
        self._first = self._step_ms()

    def _step_ms(self) -> float:
        clock = Clock(self._world.device)
        self._world.barrier()
        took = [whole_step_ms(self._model, (self._images,), clock) for _ in range(4)]
        told: list[float] = self._world.gather(statistics.median(took[1:]))  # type: ignore[assignment]
        return statistics.mean(told)

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
        place: In the ranking by prediction, from 1 on.
        steps: Steps to the same loss over those of float32.
        fidelities: Those that allow it.
    """

    name: str
    plan: Plan
    predicted_ms: float
    place: int
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
    answers = {one: find_plan(replace(inputs, fidelity=one)) for one in ("exact", "close", "lossy")}
    answer = find_plan(inputs)
    ranked = [one for one in answer.ranked if _can_run(one, inputs.workers)]
    outcomes = {describe(one.candidate, answer): one for one in reversed(ranked)}  # of equal names the fastest
    chosen = {fidelity: describe(one.chosen.candidate, one) for fidelity, one in answers.items()}
    names = [*chosen.values(), *(name for name, one in outcomes.items() if one in ranked[:5])]
    names += [describe(one.candidate, answer) for one in answer.baselines.values() if one is not None]
    whole = [one for one in ranked if one.candidate.layout.replicas == inputs.workers]
    for choice in answer.evaluator.space.codec_choices:
        if choice.alike:
            names += [describe(one.candidate, answer) for one in whole if one.candidate.codec == choice][:1]
    names += [describe(one.candidate, answer) for one in ranked if one.candidate.layout.stages > 1][:1]
    names = list(dict.fromkeys(names))
    rest = [name for name in reversed(outcomes) if name not in names]
    missing = max(0, count - len(names))
    if missing:
        step = len(rest) / missing
        names += [rest[int((place + 1) * step) - 1] for place in range(missing) if rest]
    places = {one.candidate: place + 1 for place, one in enumerate(answer.ranked)}
    drawn = []
    for name in dict.fromkeys(names):
        one = outcomes[name]
        codec = one.candidate.codec
        allowed = tuple(fidelity for fidelity in answers if set(codec.codecs.values()) <= set(FIDELITIES[fidelity]))
        plan = plan_of(answer, one, compute)
        drawn.append(Drawn(name, plan, one.step_ms, places[one.candidate], codec.steps, allowed))
    return drawn, chosen


def _can_run(outcome: Outcome, workers: int) -> bool:
    """Whether a plan can be tried in a job of so many workers: a pipeline on a part of them cannot."""
    layout = outcome.candidate.layout
    return layout.stages == 1 or layout.workers in (1, workers)


class ForeignLoad:
    """Watches what others do on the machine between entering and leaving; both are collectives.

    Args:
        world: All workers of the job, on this machine.

    Attributes:
        cores: Cores' worth of work that no worker did.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.cores = 0.0

    @property
    def told(self) -> str:
        """In words; above the rig's limit the row proves nothing."""
        busy = ", loaded" if self.cores > FOREIGN_LOAD else ""
        return f"foreign load {self.cores:.2f} cores{busy}"

    def __enter__(self) -> ForeignLoad:
        self._world.barrier()
        self._before = self._accounts()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            return
        self._world.barrier()
        seconds, busy, processes, own = (now - then for now, then in zip(self._accounts(), self._before, strict=True))
        told: list[float] = self._world.gather(own)  # type: ignore[assignment]
        self.cores = max(0.0, (max(busy, processes) - sum(told)) / max(seconds, 1e-9))

    def _accounts(self) -> tuple[float, float, float, float]:
        return time.perf_counter(), load.busy_seconds(), load.process_seconds(), load.own_seconds()
