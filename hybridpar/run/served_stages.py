"""A replica of a run with parameter servers: one worker, or several that run the stages of the model as a pipeline.

The workers of a replica compute a gradient together, as a pipeline without replicas does. Then each pushes those of its
own stages to the shards that hold their parameters, and takes new weights from them. To its shards a replica is one
learner, so shards know nothing of stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.models.outputs import OutputLoss
from hybridpar.pipeline.step import StepInput
from hybridpar.plan import ResolvedPlan
from hybridpar.planner.planned_run import PlannedRun
from hybridpar.run.served_outer import inner_trainer
from hybridpar.server.learner import GradientPusher
from hybridpar.server.link import Links
from hybridpar.server.place import Place
from hybridpar.server.present import exchange
from hybridpar.server.stripes import trained_parameters
from hybridpar.train.engine import NoOptimizer
from hybridpar.train.trainer import Trainer

#: Where worker 0 tells how the model is cut.
_CUT = "cut"


class Replica:
    """This worker's place in its replica, and what each worker of a replica trains.

    Args:
        place: What this process is.
        world: The workers of the replica.
        model: The whole model.

    Attributes:
        parts: By position, the modules with all parameters that a worker there trains.
    """

    def __init__(self, place: Place, world: World, model: nn.Module) -> None:
        self.place, self.world = place, world
        self.parts = [model]

    @property
    def own(self) -> nn.Module:
        """What this worker trains."""
        return self.parts[self.place.position]

    def names(self, position: int) -> list[str]:
        """The model's names of the parameters and buffers of a part, in its order.

        Args:
            position: Of the workers that train it.
        """
        part = self.parts[position]
        modules = part.children() if self.place.positions > 1 else [part]
        return [name for module in modules for name in module.state_dict()]

    def buffers_in(self, model: nn.Module, position: int) -> nn.Module:
        """The buffers of a part in a copy of the model, as a module.

        Args:
            model: The copy.
            position: Of the workers that train the part.
        """
        if self.place.positions == 1:
            return model
        found, held = dict(model.named_buffers()), nn.Module()
        for index, name in enumerate(name for name in self.names(position) if name in found):
            held.register_buffer(str(index), found[name])
        return held

    def meet(self, links: Links, tag: str, item: object) -> tuple[list[int], list[Any]]:
        """Tell all workers something, and hear what they say under the same tag.

        Args:
            links: The ways to this worker's shards; shard 0 is among those of the first worker of a replica.
            tag: `occasion/number`.
            item: Plain values and tensors.

        Returns:
            Who took part, and what each said, in the same order.

        Raises:
            SyncError: The shard is gone, or a worker of this replica.
        """
        mine = self.world.gather(item)
        learners, said = self.world.from_main(lambda: exchange(links.links[0], tag, mine))
        everybody: Any = zip(*said, strict=True)  # by position, then by replica
        workers = [
            position * self.place.learners + learner for position in range(self.place.positions) for learner in learners
        ]
        return workers, [one for row in everybody for one in row]

    def stage_trainer(
        self, model: nn.Module, config: TrainConfig, loss: OutputLoss, classes: int, example: Tensor
    ) -> Trainer:
        """What computes gradients of a model that is cut, as one replica; fills `parts`.

        All replicas cut the model as worker 0 does.

        Args:
            model: The whole model.
            config: Options of the run.
            loss: As of `Trainer`.
            classes: As of `Trainer`.
            example: Inputs of one micro-batch.
        """
        place, plan = self.place, None
        if place.learner:
            plan = PlannedRun(ResolvedPlan.model_validate_json(place.wait_for(_CUT, 24 * 3600.0)))
        more = {"replicas": None, "clip_norm": None, "clip_mode": "norm", "weights": None}
        given: dict[str, Any] = {"optimizer": NoOptimizer, "plan": plan, "example": example}
        trainer = inner_trainer(model, config, loss, self.world, classes, more, **given)
        if place.rank == 0:
            place.store.set(_CUT, trainer.plan.to_json())
        pipeline = trainer.engine.pipeline
        pipeline.number_micro_batches(place.learner * pipeline.micro_batches)
        if place.positions > 1:  # else this worker trains the whole model, whose stages are lanes here
            self.parts = [nn.ModuleList(modules) for modules in pipeline.modules_by_position()]
        return trainer


class StageLearner(GradientPusher):
    """Computes a replica's gradient together with its other workers, and exchanges this worker's part for weights.

    Args:
        trainer: Computes it.
        replica: The worker's place among them.
        links: The ways to the shards of this worker's stages.
        barrier: Whether an update takes a part of one batch from every replica.
        took: Called when weights have come, to put them where the model's parameters are.
    """

    def __init__(
        self, trainer: Trainer, replica: Replica, links: Links, *, barrier: bool, took: Callable[[], object]
    ) -> None:
        held = {*replica.names(replica.place.position)}
        names = [name for name in trained_parameters(trainer.model) if name in held]
        super().__init__(trainer.model, links, replica.own, names, barrier=barrier, took=took)
        self._engine, self._world = trainer.engine, replica.world
        self._waiting: Counter[str] = Counter()  # micro-batches whose part of a gradient is not there
        self._call_after_gradients(self._after_gradient)

    def _after_gradient(self, name: str) -> None:
        """A micro-batch has given its part, of which there is one at most."""
        self._waiting[name] -= 1
        if not self._waiting[name]:
            self._hand_over(name)

    def _compute(
        self, micro_batches: Sequence[tuple[Tensor, Tensor]], samples: int, whole: int, rate: float, end: dict[str, Any]
    ) -> set[str]:
        self._waiting = Counter(dict.fromkeys(self._own, len(micro_batches)))
        outcome = self._engine.step(StepInput(micro_batches, samples, whole, rate, end["stop"], end["save"]))
        self._engine.wait()
        loss = outcome.loss * whole / samples
        sound = outcome.committed and (math.isfinite(loss) or not self._engine.pipeline.options.sync.guard)
        end |= {"loss": loss, "sound": sound, "stop": outcome.stop, "save": outcome.save}
        return self._hand_over_rest()

    def _follow(self, first: dict[str, Any], counts: bool) -> None:
        if not self._barrier:  # shards have clocks of their own, and the first worker's tell how far the run is
            facts = ("step", "applied", "staleness", "done", "stop", "save", "fastest", "lowered")
            first |= self._world.from_main(lambda: {key: first[key] for key in facts})
