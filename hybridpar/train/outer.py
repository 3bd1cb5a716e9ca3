"""Training in an outer loop: workers train on their own for many steps, and exchange what they learned.

`hybridpar.sync.outer` has the exchange and the outer step, `hybridpar.sync.rounds` says when. With
`warm_start_steps` the first steps exchange all gradients (post-local SGD, Lin et al., ICLR 2020); then workers part.

Between two exchanges nothing is agreed on: loss and gradient norm of a step are this worker's own, a step whose
gradients are not finite is skipped by it alone, and requests to stop or save wait for the next exchange. At an exchange
the loss is that of all workers, as in any other run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hybridpar.comm.replicate import replicate
from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.config import TrainConfig
from hybridpar.lanes import Lanes
from hybridpar.optim.build import load_optimizer_state, optimizer_state
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.pipeline.local_stage import AfterStep, OptimizerStep
from hybridpar.pipeline.step import StepInput, StepOutcome
from hybridpar.plan import ResolvedPlan
from hybridpar.sync.compression import Compression
from hybridpar.sync.compression_table import WireFormat, layer_bytes
from hybridpar.sync.figures import SyncFigures, add_up
from hybridpar.sync.options import SyncOptions
from hybridpar.sync.outer import (
    COUNTED,
    COUNTS,
    LOSS,
    SAMPLES,
    SAVE,
    SQUARES,
    STOP,
    Arrival,
    OuterLoop,
    OuterStep,
    Report,
)
from hybridpar.sync.policy import agree_on_policy
from hybridpar.sync.rounds import Round, Timetable
from hybridpar.sync.statistics import average_model, copy_of
from hybridpar.train.engine import Engine, Loss, OptimizerFactory

_log = logging.getLogger(__name__)


class OwnOutcome(StepOutcome):
    """What a worker knows of a step that it took alone.

    Args:
        own: The outcome of the step here; on a GPU it may still run.
        samples: Of all workers.
        full: Bytes that an all-reduce of the gradients would have sent.
    """

    is_agreed = False
    exposed_sync_ms = 0.0

    def __init__(self, own: StepOutcome, samples: int, full: int) -> None:
        self._own, self._samples, self._full = own, samples, full

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes that this worker sent to those that it trains with in every step."""
        return self._own.bytes_sent

    @property
    def sync(self) -> SyncFigures:
        """What was sent of what an all-reduce would have."""
        return replace(self._own.sync, bytes_before=self._full)

    def _value(self, index: int) -> float:
        if index == 1:
            return self._samples
        return 0.0 if index in (2, 3) else self._own._value(index)


class MetOutcome(StepOutcome):
    """What all workers know of a step that ended with an exchange.

    Args:
        own: The outcome of the step here.
        arrival: Of the exchange.
        exposed_sync_ms: Time for which training waited for it.
        full: Bytes that an all-reduce of the gradients would have sent.
    """

    def __init__(self, own: StepOutcome, arrival: Arrival, exposed_sync_ms: float, full: int) -> None:
        head = arrival.head
        counted = head[COUNTED]
        squares = head[SQUARES] / head[COUNTS] if head[COUNTS] else -1.0
        loss = head[LOSS] / counted if counted else float("nan")
        self._values = (loss, head[SAMPLES], head[STOP], head[SAVE], float(arrival.good), squares)
        self.exposed_sync_ms = exposed_sync_ms
        self.bytes_sent = own.bytes_sent + arrival.sent
        self._sync = replace(add_up([arrival.costs]), bytes_before=full, bytes_after=self.bytes_sent)

    @property
    def sync(self) -> SyncFigures:
        """What the exchange sent."""
        return self._sync

    def _value(self, index: int) -> float:
        return self._values[index]


class OuterEngine(Engine):
    """Trains a model that every worker holds whole, each on its own share, and exchanges the progress now and then.

    Args:
        model: The model, on its device; it is not cut.
        plan: The plan of the run.
        optimizer: Called with the model.
        loss: Mean loss of outputs and targets.
        config: Options; `outer_steps` says how often workers exchange, and the `outer_` options how.
        world: The workers.
        lanes: Lanes of this worker.
        total_steps: Steps of the run, of which the last ends with an exchange; None where that is not known.
        warmup_steps: First steps, in which the learning rate rises.

    Attributes:
        outer: Exchanges parameters.

    Raises:
        UsageError: A codec has no meaning for outer gradients, or the model has fewer parameters than fragments.
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
        *,
        total_steps: int | None = None,
        warmup_steps: int = 0,
    ) -> None:
        every = config.outer_steps
        assert every is not None
        self._together = config.warm_start_steps or 0
        self._team = world
        self._alone = World(device=world.device, timeout=world.timeout, share_memory=world.share_memory)
        self._steps = 0
        self._flags = [False, False]
        self._trained = 0  # samples since workers parted, in steps that counted
        self._marks = [0] * config.outer_fragments  # those at the last exchange of each fragment
        self._unread: list[tuple[StepOutcome, int]] = []  # steps whose decision is not known yet
        self._made: dict[int, tuple[OptimizerStep | None, AfterStep | None]] = {}
        self._timetable = Timetable(every, self._together, total_steps, config.outer_qsr, warmup_steps)
        self._round: Round | None = None
        team = world if self._together else self._alone
        super().__init__(model, plan, None, optimizer, loss, config, team, lanes)
        names = dict(model.named_parameters())
        policy = self._policy = agree_on_policy(plan.sync.codec, names, world)
        rates = config.outer_rates(None if total_steps is None else max(0, total_steps - self._together) // every)
        step = OuterStep(config.outer_optimizer, *rates, mix=config.outer_share)
        self.outer = OuterLoop(
            *(names, dict(model.named_buffers()), world, lanes, step, config.outer_fragments),
            policy=policy,
            seed=config.seed,
            bucket_bytes=plan.sync.bucket_bytes,
        )
        agree = self._sync_options(), plan.pipeline.micro_batches, self._timetable, step, config.outer_delay
        replicate(model, world, agree=(*agree, self.outer.fingerprint))
        if not self._together:
            self.outer.begin()
        #: Of the steps that workers take together; there is another one of this worker alone.
        self._shared = self.pipeline if self._together else None
        payload = sum(one.numel() * one.element_size() for one in names.values() if one.requires_grad)
        self._full_bytes = all_reduce_bytes(payload, world.size)
        if world.size == 1 and step.is_mean:
            _log.warning("--sync %s changes nothing: there is one worker, and no other to exchange with", config.sync)

    @property
    def parted(self) -> bool:
        """Whether workers train on their own by now."""
        return self._steps >= self._together

    # ------------------------------------------------------------------ a step

    def step(self, given: StepInput) -> StepOutcome:
        """Train on this worker's share of a batch; requests to stop or save are agreed on at the next exchange.

        Args:
            given: The share, and what the step is to do with it.

        Returns:
            What this worker knows of the step; of one that ended with an exchange, what all workers agreed on.

        Raises:
            UsageError: Another worker refuses the step.
            SyncError: A worker died or did not answer in time.
        """
        if not self.parted:
            outcome = super().step(given)
            self._go_to(self._steps + 1)
            return outcome
        if self._round is None or self._steps >= self._round.stop:
            self._round = self._timetable.next_round(self._steps, given.rate_factor)
        samples = given.samples
        own = super().step(replace(given, global_samples=samples, stop=False, save=False))
        self._flags = [self._flags[0] or given.stop, self._flags[1] or given.save]
        self._steps += 1
        self._count_samples(own, samples)
        arrival, waited = self._exchange(own, given)
        if arrival is None:
            return OwnOutcome(own, given.global_samples or samples * self._team.size, self._full_bytes)
        return MetOutcome(own, arrival, waited, self._full_bytes)

    def _exchange(self, own: StepOutcome, given: StepInput) -> tuple[Arrival | None, float]:
        """Send and take what is due after a step.

        Returns:
            The last exchange that ended, and the milliseconds for which training waited.
        """
        assert self._round is not None
        arrival, waited = None, 0.0
        for one in self._round.transfers(len(self._marks), self._config.outer_delay):
            if self._steps not in (one.sent, one.arrives):
                continue
            self.pipeline.wait()  # parameters are looked at
            started = time.perf_counter()
            if one.sent == self._steps:
                self._send(one.fragment, own, given, plain=self._round.is_last and one.arrives == self._round.stop)
            if one.arrives == self._steps and self.outer.flight is not None:
                arrived = self.outer.arrive()
                # Several fragments arrive in the last step.
                arrival = arrived if arrival is None else arrived._replace(sent=arrival.sent + arrived.sent)
            waited += (time.perf_counter() - started) * 1e3
        return arrival, waited

    def _send(self, fragment: int, own: StepOutcome, given: StepInput, *, plain: bool) -> None:
        self._read_samples(0)
        trained, self._marks[fragment] = self._trained - self._marks[fragment], self._trained
        report = Report(own.loss, given.samples, own._value(5), own.committed, trained, *self._flags)
        self._flags = [False, False]
        self.outer.send(fragment, report, given.rate_factor, plain=plain)

    def _count_samples(self, own: StepOutcome, samples: int) -> None:
        """Count the samples of a step, which may still run; those of the step before it are known by now."""
        self._unread.append((own, samples))
        self._read_samples(1)

    def _read_samples(self, left: int) -> None:
        while len(self._unread) > left:
            outcome, samples = self._unread.pop(0)
            self._trained += samples if outcome.committed else 0

    def refuse(self) -> None:
        """Tell the others that this worker cannot do the step; workers on their own tell no other."""
        if not self.parted:
            super().refuse()

    # ----------------------------------------------------------- between steps

    @property
    def _differs(self) -> bool:
        """Whether workers have, or may have, different weights."""
        return self.parted and self._team.size > 1

    @contextmanager
    def evaluating(self) -> Iterator[Callable[..., Any]]:
        """The mean of the workers' models in evaluation mode; a collective. Each goes on with its own."""
        own = copy_of(self.model.state_dict()) if self._differs else None
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

    @property
    def codecs(self) -> list[Compression]:
        """What compresses outer gradients, of each fragment."""
        return self.outer.compressions

    def wire_format(self) -> WireFormat:
        """What outer gradients are sent as; a collective."""
        known = {name: row for one in self.codecs for name, row in one.bytes_by_parameter().items()}
        assert not isinstance(self._policy, str)
        return WireFormat(self._policy, layer_bytes(self.model, known), None)

    # ------------------------------------------------------------------- state

    def model_state(self) -> dict[str, Tensor]:
        """The mean of the workers' models; a collective."""
        return average_model(self.model, self._team) if self._differs else super().model_state()

    def average_state(self) -> dict[str, Tensor] | None:
        """The mean of the workers' moving averages; a collective. Each keeps its own."""
        if not self._config.model_ema or not self._differs:
            return super().average_state()
        with self.averaged():
            return {name: tensor.cpu() for name, tensor in average_model(self.model, self._team).items()}

    def common_state(self) -> dict[str, Any] | None:
        """Round, weights of the last exchange and outer momentum; None before workers part."""
        if not self.parted:
            return None
        rounds = None if self._round is None else [self._round.start, self._round.stop, self._round.is_last]
        return {"round": rounds, **self.outer.common_state()}

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `common_state` returned."""
        if self.parted and "round" in state:
            self._round = None if state["round"] is None else Round(*state["round"])
            self.outer.load_common_state(state)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beyond model and optimizer; of a worker on its own, all that it has."""
        if not self.parted:
            return super().state_dict()
        self.pipeline.wait()
        self._read_samples(0)
        own: dict[str, Any] = {
            "model": copy_of(self.model.state_dict()),
            "optimizer": optimizer_state(self.optimizers[0], self.model),
            "flags": list(self._flags),
            "samples": [self._trained, *self._marks],
            "average": [copy_of(one.state_dict()) for one in self.averages],
            "loss_scale": self.loss_scale_state(),
            "outer": self.outer.state_dict(),
        }
        return {"local": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; `go_on_from` and `load_common_state` are called before.

        On another number of workers, each begins with the mean of the models as the weights of the last exchange;
        outer momentum stays.
        """
        super().load_state_dict(state)
        self._unread = []
        self._flags, self._trained, self._marks = [False, False], 0, [0] * len(self._marks)
        own = state.get("local", {}) if self.parted else {}
        self.outer.load_state_dict(own.get("outer", {}))
        if not own:
            self.outer.reset_anchors()
            return
        self.model.load_state_dict(own["model"])
        load_optimizer_state(self.optimizers[0], self.model, own["optimizer"])
        self._flags = list(own["flags"])
        if len(samples := own.get("samples", ())) == 1 + len(self._marks):
            self._trained, *self._marks = samples
        for average, saved in zip(self.averages, own.get("average", ()), strict=False):
            average.load_state_dict(saved)
        if own.get("loss_scale") is not None and self.loss_scales:
            self.load_loss_scale_state(own["loss_scale"])

    def go_on_from(self, step: int) -> None:
        """Number of the last step, which says whether workers are on their own and when they exchange."""
        self._go_to(step)
        self.outer.begin()
        self._round = self._timetable.round_at(step) if self.parted else None
        self.pipeline.set_steps(step)

    def close(self) -> None:
        """Remove all hooks. The model stays as trained."""
        try:
            super().close()
        finally:
            if self._shared is not None:
                self._shared.close()

    # ----------------------------------------------------------------- parting

    def _go_to(self, step: int) -> None:
        """Set the number of the last step; workers part, or take steps together again where that one was earlier."""
        before, self._steps = self.parted, step
        if self.parted == before:
            return
        self.pipeline.detach()
        if self.parted:
            self._world = self._alone
            self.pipeline = self._open_pipeline(self._alone)
            self.pipeline.set_steps(step)
            self.outer.begin()
        else:
            assert self._shared is not None
            self._world, self.pipeline = self._team, self._shared
            self.pipeline.attach()

    def _sync_options(self) -> SyncOptions:
        # The codec is for outer gradients.
        return replace(super()._sync_options(), codec="none")

    def _open_pipeline(self, world: World) -> PipelineEngine:
        pipeline = super()._open_pipeline(world)
        for stage, scale in zip(pipeline.stages.values(), self.loss_scales, strict=False):
            stage.run.loss_scale = scale.value
        return pipeline

    # One optimizer, moving average and loss scale, for steps together and alone.

    def _step_of(self, module: nn.Module) -> OptimizerStep | None:
        if (step := self._made.get(id(module), (None, None))[0]) is None:
            step = super()._step_of(module)
            self._made[id(module)] = step, self._made.get(id(module), (None, None))[1]
        return step

    def _after_step_of(self, module: nn.Module) -> AfterStep:
        if (after := self._made.get(id(module), (None, None))[1]) is None:
            after = super()._after_step_of(module)
            self._made[id(module)] = self._made.get(id(module), (None, None))[0], after
        return after
