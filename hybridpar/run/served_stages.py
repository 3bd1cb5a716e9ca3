"""A replica of a run with parameter servers: one worker, or several that run the stages of the model as a pipeline.

The workers of a replica compute a gradient together, as a pipeline without replicas does. Then each pushes those of its
own stages to the shards that hold their parameters, and takes new weights from them. To its shards a replica is one
learner, so shards know nothing of stages.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.models.outputs import OutputLoss
from hybridpar.pipeline.step import StepInput
from hybridpar.plan import ResolvedPlan
from hybridpar.planner.planned_run import PlannedRun
from hybridpar.run.served_outer import inner_trainer
from hybridpar.server.learner import Exchanged, Pusher, counters
from hybridpar.server.link import Links
from hybridpar.server.place import Place
from hybridpar.server.present import exchange
from hybridpar.server.running import flat_buffers, put_buffers
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
        given: dict[str, Any] = {"optimizer": _Gradients, "plan": plan, "example": example}
        trainer = inner_trainer(model, config, loss, self.world, classes, more, **given)
        if place.rank == 0:
            place.store.set(_CUT, trainer.plan.to_json())
        pipeline = trainer.engine.pipeline
        pipeline.number_micro_batches(place.learner * pipeline.micro_batches)
        if place.positions > 1:  # else this worker trains the whole model, whose stages are lanes here
            self.parts = [nn.ModuleList(modules) for modules in pipeline.modules_by_position()]
        return trainer


class _Gradients(torch.optim.Optimizer):
    """Leaves gradients and parameters as they are: the shards step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), {"lr": 1.0})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Do nothing."""


class StageLearner(Pusher):
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
        super().__init__(trainer.model, links, took)
        self._engine, self._replica, self._barrier = trainer.engine, replica, barrier
        names = {*replica.names(replica.place.position)}
        self._own = {name: one for name, one in self._parameters.items() if name in names}
        self._waiting: Counter[str] = Counter()  # micro-batches whose part of a gradient is not there
        # Halves of a backward pass accumulate in their own way; then all leaves at the end.
        early = not self._engine.pipeline.options.split_backward
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, name=name: self._after_gradient(name)
            )
            for name, parameter in self._own.items()
            if early
        ]

    def _after_gradient(self, name: str) -> None:
        """A micro-batch has given its part, of which there is one at most."""
        self._waiting[name] -= 1
        if not self._waiting[name]:
            self._hand_over(name)

    @torch.no_grad()
    def step(
        self,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        samples: int,
        global_samples: int,
        *,
        rate: float = 1.0,
        stop: bool = False,
        save: bool = False,
        lowered: float | None = None,
    ) -> Exchanged:
        """Compute a gradient, push this worker's part of it, and take the weights that come for it.

        Args:
            micro_batches: Inputs and targets, the same on all workers of the replica.
            samples: Samples of the replica.
            global_samples: Samples of all replicas in this step.
            rate: Learning rate as a fraction of its peak.
            stop: Ask all workers to stop.
            save: Ask all workers for a checkpoint.
            lowered: Tell the others, if not None, what their learning rates are multiplied with.

        Returns:
            What the servers answered, and what the exchange took; all workers of a replica hear the same.

        Raises:
            SyncError: A shard is gone, or an update waits for a worker that is, or one of this replica is.
        """
        started = time.perf_counter()
        own, whole = self._replica.own, global_samples if self._barrier else samples
        before, seen = flat_buffers(own), [buffer.clone() for buffer in counters(own)]
        self._handed = set()
        self._waiting = Counter(dict.fromkeys(self._own, len(micro_batches)))
        self.links.begin_push(rate)
        with torch.enable_grad():
            outcome = self._engine.step(StepInput(micro_batches, samples, whole, rate, stop, save))
            self._engine.wait()
        loss = outcome.loss * whole / samples
        missing = {name for name, parameter in self._own.items() if parameter.grad is None}
        for name in self._own:
            if name not in self._handed:
                self._hand_over(name)
        sound = outcome.committed and (math.isfinite(loss) or not self._engine.pipeline.options.sync.guard)
        computed = time.perf_counter()
        end: dict[str, Any] = {"weight": 1.0 if self._barrier else None, "factor": 1.0, "samples": samples}
        end |= {"loss": loss, "sound": sound, "stop": outcome.stop, "save": outcome.save}
        if lowered is not None:
            end["lowered"] = lowered
        first = self._finish(end, missing, flat_buffers(own).cpu())[0]
        if not (first["applied"] if self._barrier else sound):
            for buffer, batches in zip(counters(own), seen, strict=True):
                buffer.copy_(batches)
        put_buffers(own, before)  # where the shard holds no statistics, or sent none
        self._took()
        if not self._barrier:  # shards have clocks of their own, and the first worker's tell how far the run is
            facts = ("step", "applied", "staleness", "done", "stop", "save", "fastest", "lowered")
            first |= self._replica.world.from_main(lambda: {key: first[key] for key in facts})
        return self._exchanged(first, loss, computed - started, time.perf_counter() - computed)

    def close(self) -> None:
        """Remove all hooks. The model stays as it is."""
        for hook in self._hooks:
            hook.remove()
