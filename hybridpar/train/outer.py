"""Training in an outer loop: workers train on their own for many steps, and exchange what they learned.

`hybridpar.sync.outer` has the exchange and the outer step, and says when.

A **party** trains on its own: a worker, a replica of a pipeline, or, where there are several nodes of several workers,
all workers of a node, which add their gradients in every step. Between two exchanges parties agree on nothing: loss and
gradient norm of a step are the party's own, a step whose gradients are not finite is skipped by it alone, and requests
to stop or save wait for the next exchange. At an exchange the loss is that of all workers, as in any other run.
"""

from __future__ import annotations

import logging
import math
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.replicate import replicate
from hybridpar.comm.world import all_reduce_bytes
from hybridpar.compress.nodes import NodeWorlds
from hybridpar.compress.policy import Policy, agree_on_policy
from hybridpar.config.sync import Outer
from hybridpar.errors import TrainingError, check
from hybridpar.models.state_dicts import copy_of, load_values
from hybridpar.pipeline.step import StepOutcome, StepRequest, StepSpans, StepValues
from hybridpar.sync.batchnorm import ReplicaBuffers
from hybridpar.sync.compression import Compression
from hybridpar.sync.figures import SyncFigures, WireFormat, add_up, layer_bytes
from hybridpar.sync.outer import OuterLoop, OuterResult, OuterRound, Timetable
from hybridpar.sync.stage_gradients import SyncOptions
from hybridpar.sync.statistics import average_model
from hybridpar.train.engine import Engine, EngineParts

_log = logging.getLogger(__name__)


class OuterOutcome(StepOutcome):
    """What a worker knows of a step that its party took alone, or with the exchange that it ended with.

    Of an exchange all workers know the same. What is known of the party's step is read when it is asked for.
    """

    def __init__(self, party: StepOutcome, samples: int, full: int) -> None:
        self._party, self._samples, self._full = party, samples, full
        self.waited_ms = 0.0
        self.result: OuterResult | None = None

    @property
    def is_agreed(self) -> bool:  # type: ignore[override]
        """Whether the step ended with an exchange."""
        return self.result is not None

    @property
    def exposed_sync_ms(self) -> float:  # type: ignore[override]
        """Time in which the worker only waited for its party, or for the exchange."""
        return self._party.exposed_sync_ms + self.waited_ms

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes that this worker sent to its party, and to others."""
        return self._party.bytes_sent + (0 if self.result is None else self.result.sent)

    @property
    def spans(self) -> StepSpans:
        """When the step ran; an exchange is not in it."""
        return self._party.spans

    @property
    def sync(self) -> SyncFigures:
        """What the exchange took, or else the party's sync, of what an all-reduce would have sent."""
        if self.result is None:
            return replace(self._party.sync, bytes_before=self._full)
        return replace(add_up([self.result.costs]), bytes_before=self._full, bytes_after=self.bytes_sent)

    @property
    def values(self) -> StepValues:
        """What all workers know of an exchange; else what is known of the party's step."""
        if self.result is None:
            return self._party.values._replace(samples=self._samples, stop=0.0, save=0.0)
        losses, counted, squares, norms, samples, stop, save = self.result.report
        loss = losses / counted if counted else math.nan
        return StepValues(loss, samples, stop, save, float(self.result.good), squares / norms if norms else -1.0)


class OuterEngine(Engine):
    """Trains each party on its own share, and exchanges the progress now and then."""

    def __init__(self, parts: EngineParts, *, total_steps: int | None = None, warmup_steps: int = 0) -> None:
        config, world, plan, loop = parts.config, parts.world, parts.plan, parts.config.outer
        assert loop is not None
        check(
            total_steps is None or loop.every <= total_steps,
            f"--sync {config.sync} in a run of {total_steps} steps",
            "Workers would exchange once, at the very end.",
            "Use a smaller H, or a longer run.",
        )
        self._delay = loop.delay
        self._job = world
        self._steps = 0
        self._flags = [False, False]
        self._holds_average = False  # the model is the mean of the parties' moving averages for the moment
        #: Samples since the last exchange of each fragment, in steps that counted.
        self._trained = [0] * loop.fragments
        self._unread: list[tuple[StepOutcome, int]] = []  # steps whose decision is not known yet
        self._timetable = Timetable(loop.every, total_steps, loop.qsr, warmup_steps)
        self._round: OuterRound | None = None
        nodes, columns, parties = None, plan.layout.columns, plan.layout.ranks
        with ExitStack() as opened:
            if parts.stages is None and config.exchange.hierarchy:
                nodes = NodeWorlds.open(world, columns, 1)
            if nodes is not None:
                opened.callback(nodes.close)
                parties = nodes.nodes
            self._party = world.split(parties, len(world.lane_groups) or 1)
            opened.callback(self._party.close)
            self._team = world
            if len(columns) > 1:
                self._team = world.split(columns, 1)
                opened.callback(self._team.close)
            if parts.stages is not None:  # random operations of stages know their place in the party only
                config = replace(config, seed=config.seed + 1_000_003 * self._team.rank)
            super().__init__(replace(parts, world=self._party, config=config))
            self._open_loop(parts, loop, nodes)
            self._worlds = opened.pop_all()
        #: Bytes that an all-reduce of the gradients would have sent.
        self._full_bytes = all_reduce_bytes(self.outer.bytes, world.size)
        if self._team.size == 1 and self.outer.is_mean:
            who = "worker" if world.size == 1 else "replica"
            _log.warning("--sync %s changes nothing: there is one %s, and no other to exchange with", config.sync, who)

    def _open_loop(self, parts: EngineParts, loop: Outer, nodes: NodeWorlds | None) -> None:
        model, plan, total = parts.model, parts.plan, self._timetable.total
        modules = [stage.module for stage in self.pipeline.stages.values()]
        local = {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
        buffer_names = {name for name, buffer in model.named_buffers() if id(buffer) in local}
        policy = agree_on_policy(plan.sync.codec, dict(model.named_parameters()), parts.world)
        assert isinstance(policy, Policy)
        self._policy = policy
        lr, momentum = loop.rates(None if total is None else total // loop.every)
        optimizer = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.outer = OuterLoop(
            {name: param for name, param in model.named_parameters() if id(param) in local},
            lambda: {name: buffer for name, buffer in model.named_buffers() if name in buffer_names},
            self._team,
            parts.lanes,
            policy,
            None if (lr, momentum) == (1, 0) else optimizer,
            fragments=loop.fragments,
            delayed=loop.delay > 0,
            seed=parts.config.seed,
            nodes=nodes,
            bucket_bytes=plan.sync.bucket_bytes,
        )
        agree = plan.pipeline.micro_batches, self._timetable, lr, momentum, loop.delay, self.outer.layout
        replicate(model, self._team, agree=agree)
        #: Integers have no mean: those of the first party count where a model is tested or saved.
        self._buffers = [ReplicaBuffers(module, self._team, None) for module in modules]
        self.outer.begin()

    def recover(self, steps: int) -> int:
        """As of `Engine`; refuses to go on, as what was exchanged may hold steps that have not been."""
        done = super().recover(steps)
        if done < steps:
            raise TrainingError(
                f"an error has ended step {done + 1} of an outer loop",
                "What the workers exchange would count it.",
                "Go on from a checkpoint.",
            )
        return done

    # ------------------------------------------------------------------ a step

    def step(self, given: StepRequest) -> StepOutcome:
        """Train on this worker's share of a batch; requests to stop or save are agreed on at the next exchange."""
        if self._round is None or self._steps >= self._round.stop:
            self._round = self._timetable.next_round(self._steps, given.rate_factor)
        party = super().step(replace(given, global_samples=None))
        self._steps += 1
        self._unread.append((party, given.samples))
        self._read(1)  # the step before is known by now
        samples = round(given.global_samples or given.samples * self._team.size)
        outcome = OuterOutcome(party, samples, self._full_bytes)
        for transfer in self._round.transfers(len(self._trained), self._delay):
            if self._steps not in (transfer.sent, transfer.arrives):
                continue
            self.pipeline.wait()  # parameters are looked at
            started = time.perf_counter()
            if transfer.sent == self._steps:
                is_end = self._round.is_last and transfer.arrives == self._round.stop
                self._send(transfer.fragment, party, given, plain=is_end)
            if transfer.arrives == self._steps and self.outer.exchange is not None:
                result, before = self.outer.arrive(), outcome.result
                # Several fragments arrive in the last step.
                outcome.result = result if before is None else result._replace(sent=before.sent + result.sent)
            outcome.waited_ms += (time.perf_counter() - started) * 1e3
        return outcome

    def _send(self, fragment: int, party: StepOutcome, given: StepRequest, *, plain: bool) -> None:
        self._read(0)
        trained, self._trained[fragment] = self._trained[fragment], 0
        # In the order in which `OuterOutcome` reads their sums.
        counted = given.samples if party.committed and math.isfinite(party.loss) else 0
        squares = party.values.squares if party.committed else -1.0
        norm = (squares, 1) if squares >= 0 else (0.0, 0)
        report = (party.loss * counted if counted else 0.0, counted, *norm, given.samples, *self._flags)
        self._flags = [False, False]
        self.outer.send(fragment, trained, report, plain=plain)

    def _read(self, left: int) -> None:
        """Count the samples of steps that are over, but for the last ones, and note what was asked for in them."""
        while len(self._unread) > left:
            outcome, samples = self._unread.pop(0)
            if outcome.committed:
                self._trained = [count + samples for count in self._trained]
            self._flags = [self._flags[0] or outcome.stop, self._flags[1] or outcome.save]

    def refuse(self) -> None:
        """Tell the others of the party that this worker cannot do the step."""
        if self.pipeline.replicas > 1:
            super().refuse()

    # ----------------------------------------------------------- between steps

    @property
    def _differs(self) -> bool:
        """Whether workers have, or may have, different weights."""
        return not self._holds_average and (self._team.size > 1 or not self.outer.is_mean)

    @contextmanager
    def _at_last_exchange(self) -> Iterator[None]:
        """Inside, the whole model is that of the last exchange, which all parties have; a collective of each party."""
        before = copy_of(self.model.state_dict())
        self.pipeline.wait()
        self.outer.load_last()
        for buffers in self._buffers:
            buffers.share()
        self.pipeline.collect()
        try:
            yield
        finally:
            load_values(self.model, before)

    @contextmanager
    def evaluating(self) -> Iterator[Callable[..., Any]]:
        """The model of the last exchange in evaluation mode; a collective. Each party goes on with its own."""
        with self._at_last_exchange() if self._differs else nullcontext(), super().evaluating() as forward:
            yield forward

    def synchronize_buffers(self) -> None:
        """Make the model whole; parties on their own keep theirs, and `model_state` has that of the last exchange."""
        self.pipeline.wait()
        if not self._differs:
            super().synchronize_buffers()

    def collect(self) -> None:
        """Make the model whole on every worker: parties on their own have that which they train."""
        super().collect()
        if self._differs:
            self.pipeline.collect()

    @property
    def codecs(self) -> list[Compression]:
        """What compresses outer gradients, of each fragment."""
        return self.outer.compressions

    def wire_format(self) -> WireFormat:
        """What outer gradients are sent as; a collective."""
        mine = {name: row for codec in self.codecs for name, row in codec.bytes_by_parameter().items()}
        parts: list[Any] = self._job.gather(mine)
        return WireFormat(self._policy, layer_bytes(self.model, ChainMap(*parts)))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the whole model is the mean of the parties' moving averages; a collective."""
        with super().averaged():
            if differs := self._differs:
                self.pipeline.collect()
                load_values(self.model, average_model(self.model, self._team))
            self._holds_average = differs
            try:
                yield
            finally:
                self._holds_average = False

    # ------------------------------------------------------------------- state

    def model_state(self) -> dict[str, Tensor]:
        """The model of the last exchange, which all parties have; a collective of each party."""
        if not self._differs:
            return super().model_state()
        with self._at_last_exchange():
            return copy_of(super().model_state())

    def average_state(self) -> dict[str, Tensor] | None:
        """The mean of the parties' moving averages; a collective. Each keeps its own."""
        if self._config.model_ema is None or not self._differs:
            return super().average_state()
        with self.averaged():
            return copy_of(self.model.state_dict(), "cpu")

    def training_state(self) -> dict[str, Any]:
        """Also the round, the weights of the last exchange and outer momentum, on rank 0; a collective."""
        state, mine = super().training_state(), self.outer.common_state()
        parts: list[dict[str, Any]] = self.pipeline.gather_on_main(mine) or [mine]
        merged = {key: {name: value for part in parts for name, value in part[key].items()} for key in mine}
        return {**state, "outer": {"round": self._round and [*self._round], **merged}}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `training_state` returned, after `go_on_from`."""
        super().load_training_state(state)
        if (outer := state.get("outer")) is not None:
            self._round = None if outer["round"] is None else OuterRound(*outer["round"])
            self.outer.load_common_state(outer)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run on the same layout needs: all that this party has."""
        state = super().state_dict()
        self._read(0)
        party = {
            "model": copy_of(self.model.state_dict()),
            "training": super().training_state(),
            "average": copy_of(ChainMap(*(average.state_dict() for average in self.averages))),
            "flags": list(self._flags),
            "trained": list(self._trained),
            "outer": self.outer.state_dict(),
        }
        return {**state, "party": party}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; `load_training_state` is called before.

        On another number of workers, each begins with the weights of the last exchange; outer momentum stays.
        """
        super().load_state_dict(state)
        party = state.get("party", {})
        trained = party.get("trained", ())
        self._unread, self._flags = [], list(party.get("flags", (False, False)))
        self._trained = list(trained) if len(trained) == len(self._trained) else [0] * len(self._trained)
        self.outer.load_state_dict(party.get("outer", {}))
        if party:  # else all are at the weights of the last exchange
            load_values(self.model, party["model"])
            super().load_training_state(party["training"])
            if party["average"]:
                self.load_average_state(party["average"])

    def go_on_from(self, step: int) -> None:
        """Number of the last step, which says when parties exchange next."""
        super().go_on_from(step)
        self._steps = step
        self.outer.begin()
        self._round = self._timetable.round_at(step)

    def close(self) -> None:
        """Remove all hooks and leave the parties. The model stays as trained."""
        try:
            super().close()
        finally:
            self._worlds.close()

    def _sync_options(self) -> SyncOptions:
        # The codec is for outer gradients.
        return replace(super()._sync_options(), codec="none")
