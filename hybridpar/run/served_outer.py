"""What a worker of an outer loop over parameter servers does between two exchanges, and what a checkpoint has of it.

A worker trains alone, as a run of one worker does; `hybridpar.server.outer` exchanges what it learned.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.config.server import ALL_REDUCE
from hybridpar.data import Batch
from hybridpar.models.outputs import OutputLoss
from hybridpar.optim.schedule import warmup_length
from hybridpar.pipeline.step import StepInput, StepOutcome
from hybridpar.run.timings import StepTimes, Timings
from hybridpar.server.learner import Exchanged
from hybridpar.server.outer import OuterLearner
from hybridpar.sync.outer import OuterStep
from hybridpar.sync.rounds import Round, Timetable
from hybridpar.train.trainer import Trainer

#: What a checkpoint of an outer loop calls the tensors that shards keep of a parameter.
_KEPT = ("momentum", "waiting")


def inner_trainer(
    model: nn.Module,
    config: TrainConfig,
    loss: OutputLoss,
    world: World,
    classes: int,
    more: Mapping[str, object] | None = None,
    **given: Any,
) -> Trainer:
    """What trains a replica's model between two exchanges: a trainer that has no replicas.

    Args:
        model: The model.
        config: Options of the run.
        loss: As of `Trainer`.
        world: The workers of the replica.
        classes: As of `Trainer`.
        more: Options that are other than those of the run, beside those of the exchange.
        given: What else `Trainer` is given.
    """
    alone: dict[str, Any] = {"sync": ALL_REDUCE, "servers": None, "staleness": None, "max_staleness": None}
    alone |= {"pull": "fp32", "outer_optimizer": "mean", "outer_lr": None, "outer_momentum": None, "outer_qsr": None}
    alone |= {"outer_pace": "equal", "compress": "none", "shares": "equal", "model_ema": False, "plan": "none"}
    alone |= {"workers": None, **(more or {})}
    return Trainer(model, loss=loss, config=replace(config, **alone), world=world, classes=classes, **given)


class OuterWorker:
    """Trains, and exchanges when it is time to.

    Args:
        trainer: Trains the model.
        learner: Exchanges what it learned.
        config: Options of the run.
        worker: Number of this worker.
        total: Steps of the run.
        per_epoch: Steps of an epoch.
    """

    def __init__(
        self, trainer: Trainer, learner: OuterLearner, config: TrainConfig, worker: int, total: int, per_epoch: int
    ) -> None:
        every = config.outer_steps
        assert every is not None
        self._trainer, self._learner = trainer, learner
        self._barrier = config.waits_for_all
        self._timetable = Timetable(every, 0, total, config.outer_qsr, warmup_length(total, per_epoch, config))
        self._auto = config.outer_pace.strip() == "auto"
        paces = config.outer_paces
        #: This worker's part of H.
        self.pace = 1.0 if paces is None else paces[worker]
        self._round: Round | None = None
        self._begin()

    def _begin(self) -> None:
        self._done: list[tuple[StepOutcome, int]] = []
        self._seconds = 0.0
        self._wanted: dict[str, Any] = {}

    @property
    def steps(self) -> int:
        """Steps since the last exchange."""
        return len(self._done)

    def step(
        self,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        batch: Batch,
        at: int,
        *,
        rate: float,
        wanted: Mapping[str, Any],
        timings: Timings,
        data_ms: float,
    ) -> Exchanged | None:
        """Train on a batch, and exchange after the last one of an interval.

        Args:
            micro_batches: Inputs and targets.
            batch: Where they are from.
            at: Steps that the servers had done at the last exchange.
            rate: Learning rate as a fraction of its peak.
            wanted: `stop`, `save` and `lowered`, as of `Learner.step`.
            timings: Where times and bytes are noted.
            data_ms: For how long the batch was waited for.

        Returns:
            What the servers answered, with times and bytes of a step; None where there was no exchange.

        Raises:
            SyncError: A shard is gone, or an update waits for a worker that is.
        """
        if not self._done:
            self._round = self._timetable.next_round(at, rate)
        assert self._round is not None
        started = time.perf_counter()
        outcome = self._trainer.engine.step(StepInput(micro_batches, batch.samples, batch.samples, rate))
        self._done.append((outcome, batch.samples))
        length = max(1, round((self._round.stop - self._round.start) * self.pace))
        leaves = self.steps >= length or (wanted["stop"] and not self._barrier)
        if leaves:
            self._trainer.wait()
        seconds = time.perf_counter() - started
        self._seconds += seconds
        self._wanted |= {key: value for key, value in wanted.items() if value}
        if not leaves:
            self._learner.stay()
            timings.add(StepTimes(seconds * 1e3, 0.0, data_ms), 0, bytes_pulled=0)
            return None
        result = self._exchange(rate)
        timings.add(StepTimes(seconds * 1e3, result.exposed_ms, data_ms), result.pushed, bytes_pulled=result.pulled)
        steps = self.steps
        self._begin()
        return replace(
            result,
            compute_ms=result.compute_ms / steps,
            exposed_ms=result.exposed_ms / steps,
            pushed=result.pushed // steps,
            pulled=result.pulled // steps,
        )

    def _exchange(self, rate: float) -> Exchanged:
        assert self._round is not None
        counted = [(one.loss, samples) for one, samples in self._done if one.committed]
        samples = sum(number for _, number in counted)
        loss = sum(loss * number for loss, number in counted) / samples if samples else float("nan")
        speed = self.steps / self._seconds
        end = {"samples": samples, "steps": self.steps, "plain": self._round.is_last, "speed": speed}
        result = self._learner.exchange(end | self._wanted, loss, rate=rate, seconds=self._seconds)
        if self._auto and result.fastest:
            self.pace = min(1.0, speed / result.fastest)
        return result


def outer_step_of(config: TrainConfig, total: int) -> OuterStep:
    """What becomes of outer gradients.

    Args:
        config: Options of the run.
        total: Its steps.
    """
    assert config.outer_steps is not None
    return OuterStep(config.outer_optimizer, *config.outer_rates(total // config.outer_steps))


def saved_outer_state(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a checkpoint has of an outer loop, as `OuterEngine.common_state` has it, and what servers alone know.

    The weights of the last exchange are the model of the checkpoint.

    Args:
        state: What their optimizers keep, by parameter.
    """
    first: Mapping[str, Any] = next(iter(state.values()), {})
    kept = {key: {name: one[key] for name, one in state.items() if key in one} for key in _KEPT}
    rates = {"round": None, "rates": [first.get("rate", 0.0)], "updates": first.get("updates", 0)}
    return {**rates, "anchors": {}, **kept}


def outer_state_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What shards begin with, as `shard_starts` takes it.

    Args:
        saved: What `saved_outer_state` or `OuterEngine.common_state` returned; empty for nothing.
    """
    momentum = saved.get("momentum", {})
    common = {"rate": float(next(iter(saved.get("rates", ())), 0.0)), "updates": int(saved.get("updates", 0))}
    state = {}
    for name in momentum:
        kept = {key: saved[key][name] for key in _KEPT if name in saved.get(key, {})}
        state[name] = {**kept, **common}
    return {"state": state}
