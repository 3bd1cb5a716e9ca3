"""Local SGD: workers train on their own and average their parameters every H steps.

Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019), and post-local SGD (Lin, Stich,
Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020) where the first steps exchange all gradients.
Between two averages nothing is sent: loss and gradient norm of a step are this worker's own, and requests to stop or
save are agreed on at the next average. At an average the loss is that of all workers, as in any other run. For links on
which an exchange takes longer than a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.replicate import replicate
from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.config import TrainConfig
from hybridpar.lanes import Lanes
from hybridpar.optim.build import load_optimizer_state, optimizer_state
from hybridpar.pipeline.local_stage import OptimizerStep
from hybridpar.pipeline.step import StepInput, StepOutcome
from hybridpar.plan import ResolvedPlan
from hybridpar.sync.figures import SyncFigures
from hybridpar.train.engine import Engine, Loss, OptimizerFactory, sync_options
from hybridpar.train.periodic import average_model, average_tensors, copy_of


class OwnOutcome(StepOutcome):
    """What a worker knows of a step that it took alone.

    Args:
        own: The outcome of the step here; on a GPU it may still run.
        samples: Of all workers.
        full: Bytes that an all-reduce of the gradients would have sent.
    """

    exposed_sync_ms = 0.0
    bytes_sent = 0

    def __init__(self, own: StepOutcome, samples: int, full: int) -> None:
        self._own, self._samples, self._full = own, samples, full

    @property
    def sync(self) -> SyncFigures:
        """Nothing was sent of what an all-reduce would have."""
        return SyncFigures(self._full)

    def _value(self, index: int) -> float:
        if index == 1:
            return self._samples
        return 0.0 if index in (2, 3) else self._own._value(index)


class MetOutcome(StepOutcome):
    """What all workers know of a step that ended with an average.

    Args:
        values: Loss, samples, stop, save, commit (1 or 0), mean square of the workers' gradient norms.
        exposed_sync_ms: Time of the average.
        bytes_sent: Bytes of it.
        full: Bytes that an all-reduce of the gradients would have sent.
    """

    def __init__(self, values: Sequence[float], exposed_sync_ms: float, bytes_sent: int, full: int) -> None:
        self._values = tuple(values)
        self.exposed_sync_ms = exposed_sync_ms
        self.bytes_sent = bytes_sent
        self._full = full

    @property
    def sync(self) -> SyncFigures:
        """What the average sent."""
        return SyncFigures(self._full, self.bytes_sent)

    def _value(self, index: int) -> float:
        return self._values[index]


class LocalSgdEngine(Engine):
    """Trains a model that every worker holds whole, each on its own share, and averages the parameters now and then.

    Args:
        model: The model, on its device; it is not cut.
        plan: The plan of the run.
        optimizer: Called with the model.
        loss: Mean loss of outputs and targets.
        config: Options; `local_steps` says how often workers average.
        world: The workers.
        lanes: Lanes of this worker.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ResolvedPlan,
        optimizer: OptimizerFactory,
        loss: Loss,
        config: TrainConfig,
        world: World,
        lanes: Lanes,
    ) -> None:
        every = config.local_steps
        assert every is not None
        self._every, self._together = every, config.warm_start_steps or 0
        self._team = world
        self._alone = World(device=world.device, timeout=world.timeout, share_memory=world.share_memory)
        self._steps = 0
        self._flags = [False, False]
        self._own_step: OptimizerStep | None = None
        team = world if self._together else self._alone
        super().__init__(model, plan, None, optimizer, loss, config, team, lanes)
        if not self._together:
            agree = (sync_options(config, plan.sync, model), plan.pipeline.micro_batches, every)
            replicate(model, world, agree=agree)
        #: Of the steps that workers take together; there is another one of this worker alone.
        self._shared = self.pipeline if self._together else None
        self._trained = [one for one in model.parameters() if one.is_floating_point()]
        payload = sum(one.numel() * one.element_size() for one in self._trained)
        self._full_bytes = all_reduce_bytes(payload, world.size)

    @property
    def parted(self) -> bool:
        """Whether workers train on their own by now."""
        return self._steps >= self._together

    def step(self, given: StepInput) -> StepOutcome:
        """Train on this worker's share of a batch; requests to stop or save are agreed on at the next average.

        Args:
            given: The share, and what the step is to do with it.

        Returns:
            What this worker knows of the step; of one that ended with an average, what all workers agreed on.

        Raises:
            UsageError: Another worker refuses the step.
            SyncError: A worker died or did not answer in time.
        """
        if not self.parted:
            outcome = super().step(given)
            self._go_to(self._steps + 1)
            return outcome
        samples = given.samples
        own = super().step(replace(given, global_samples=samples, stop=False, save=False))
        self._flags = [self._flags[0] or given.stop, self._flags[1] or given.save]
        self._steps += 1
        if (self._steps - self._together) % self._every:
            return OwnOutcome(own, given.global_samples or samples * self._team.size, self._full_bytes)
        return self._meet(own, samples)

    def _meet(self, own: StepOutcome, samples: int) -> MetOutcome:
        """Average the parameters, and learn what all workers know of the step."""
        squares = own._value(5)
        started = time.perf_counter()
        sent = average_tensors(self._trained, self._team, self.plan.sync.bucket_bytes)
        message = torch.tensor(
            [own.loss * samples, samples, *self._flags, own.committed, squares],
            dtype=torch.float64,
            device=self._team.device,
        )
        if self._team.control_sum is not None:
            with self._team.named_errors("agreeing on the step"):
                self._team.control_sum.all_reduce(message)
            sent += all_reduce_bytes(8 * message.numel(), self._team.size)
        total, counted, stops, saves, committed, squares = message.tolist()
        self._flags = [False, False]
        workers = self._team.size
        agreed = [total / counted, counted, stops, saves, float(committed == workers), squares / workers]
        return MetOutcome(agreed, (time.perf_counter() - started) * 1e3, sent, self._full_bytes)

    def refuse(self) -> None:
        """Tell the others that this worker cannot do the step; workers on their own tell no other."""
        if not self.parted:
            super().refuse()

    @contextmanager
    def evaluating(self) -> Iterator[Callable[..., Any]]:
        """The mean of the workers' models in evaluation mode; a collective. Each goes on with its own."""
        own = copy_of(self.model.state_dict()) if self.parted else None
        if own is not None:
            self.model.load_state_dict(average_model(self.model, self._team))
        try:
            with super().evaluating() as forward:
                yield forward
        finally:
            if own is not None:
                self.model.load_state_dict(own)

    def synchronize_buffers(self) -> None:
        """Make the model whole; workers on their own keep their models, and `model_state` has the mean."""
        if not self.parted:
            super().synchronize_buffers()

    def model_state(self) -> dict[str, Tensor]:
        """The mean of the workers' models; a collective."""
        return average_model(self.model, self._team) if self.parted else super().model_state()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beyond model and optimizer; of a worker on its own, all that it has."""
        state = super().state_dict()
        if not self.parted:
            return state
        own = {"model": copy_of(self.model.state_dict()), "optimizer": optimizer_state(self.optimizers[0], self.model)}
        return {"local": {**own, "flags": list(self._flags)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; `go_on_from` is called before."""
        super().load_state_dict(state)
        self._flags = [False, False]
        if self.parted and "local" in state:
            own = state["local"]
            self.model.load_state_dict(own["model"])
            load_optimizer_state(self.optimizers[0], self.model, own["optimizer"])
            self._flags = list(own["flags"])

    def go_on_from(self, step: int) -> None:
        """Number of the last step, which says whether workers are on their own and when they meet."""
        self._go_to(step)

    def _go_to(self, step: int) -> None:
        """Set the number of the last step; workers part, or take steps together again where that one was earlier."""
        before, self._steps = self.parted, step
        if self.parted == before:
            return
        self.pipeline.detach()
        if self.parted:
            self._world = self._alone
            self.pipeline = self._open_pipeline(self._alone)
        else:
            assert self._shared is not None
            self._world, self.pipeline = self._team, self._shared
            self.pipeline.attach()

    def _step_of(self, module: nn.Module) -> OptimizerStep | None:
        # One optimizer, with the rates that it began with, for steps together and alone.
        self._own_step = self._own_step or super()._step_of(module)
        return self._own_step
