"""Serves a shard to workers over sockets.

Each connection has a thread, which reads what a worker asks, does it under the lock, waits where others are to push
first, and writes the answer. What goes wrong on a connection ends that connection, and the others are served on. The
thread that called `run` looks whether any worker is silent for too long.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.handshake import Door
from hybridpar.compress import read_policy
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, SyncError, UsageError
from hybridpar.machine.process import usable_memory
from hybridpar.server import wire
from hybridpar.server.encoding import PushDecoder
from hybridpar.server.rules import Rules
from hybridpar.server.shard import Answer, Shard, StepRow
from hybridpar.server.stripes import Stripe
from hybridpar.server.wire import Connection, Garbled

_log = logging.getLogger(__name__)

#: Seconds that a connection has for the handshake, and how many may be in it at a time, for each worker but not below
#: a least number. With more of them the oldest is closed: who knows the token is through within a round trip.
HANDSHAKE_SECONDS, _WAITING_PER_WORKER, _LEAST_WAITING = 5.0, 2, 64

#: Addresses of which it is said that a connection from there was refused; what comes from others is refused silently.
_MOST_NAMED = 20

#: How often a worker that waits hears so, as a part of the time-out, and how often it is looked whether it is there.
_WAIT_EVERY, _LOOK_EVERY = 0.2, 0.2

#: Bytes of tensors in messages other than weights and gradients, at most.
_FACT_BYTES = 1 << 24

#: How many time-outs workers wait for worker 0 while it may be testing.
_PATIENCE = 10


@dataclass(eq=False)
class _Peer:
    """The other end of a connection, and what it is to hear next.

    Attributes:
        since: When it was let in.
        hello: What it said of itself.
        waits: Whether it waits for what others are to do.
        clock: Of the weights that it has.
        heard: As its last push said.
        answer: To its push, once it is known.
        missed: Since when nothing has come from it, when that was said last.
    """

    connection: Connection
    since: float
    hello: wire.Hello | None = None
    waits: bool = False
    clock: int = 0
    heard: int | None = None
    answer: wire.Weights | None = None
    missed: float = -math.inf


class ShardServer:
    """Serves shard `number` until all workers have left; `token` lets them in, and `clock` gives seconds."""

    def __init__(
        self,
        config: TrainConfig,
        rules: Rules,
        number: int,
        token: str,
        host: str = "127.0.0.1",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.parameter_servers is not None
        self._config, self._rules, self._number, self._now = config, rules, number, clock
        self._half = config.parameter_servers.pull == "fp16"
        listener = socket.create_server((host, 0), backlog=128)
        self.host, self.port = host, int(listener.getsockname()[1])
        most_waiting = max(_LEAST_WAITING, _WAITING_PER_WORKER * rules.learners)
        self._door = Door(listener, self.address, token, HANDSHAKE_SECONDS, most_waiting)
        # Held by who reads or changes what follows; notified when it changed.
        self._changed = threading.Condition()
        self.shard: Shard | None = None
        self._decoder: PushDecoder
        self._rest: dict[str, Tensor] = {}
        self._problem: HybridparError | None = None
        self._ended = False
        self._peers: list[_Peer] = []  # all that are connected, oldest first
        self._workers: dict[int, _Peer] = {}  # those that take part
        self._first: wire.Hello | None = None
        self._weights: tuple[int, Tensor] | None = None  # as they are sent, and their clock
        self._farewell = False  # whether who left last had finished
        self._alone_since: float | None = None
        self._waiting_since: float | None = None
        self._stop = self._save = False
        self._news: list[str] = []
        self._items: dict[str, dict[int, Any]] = {}  # what was said under a tag
        self._refused: set[str] = set()  # addresses

    @property
    def address(self) -> str:
        """What a worker needs to come here."""
        return f"{self.host}:{self.port}"

    def run(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Serve until all workers that came have left."""
        self._door.open(self._attend, self._refuse)
        try:
            while not give_up():
                with self._changed:
                    if self._is_over():
                        return
                    self._keep_time()
                    self._changed.wait(0.05)
        except HybridparError as error:
            with self._changed:
                self._problem = error
                self._changed.notify_all()
                workers = [peer for peer in self._peers if peer.hello is not None]
            for peer in workers:
                with contextlib.suppress(OSError):
                    peer.connection.send(wire.Refused(error=error))
            raise
        finally:
            with self._changed:
                self._ended = True
            self._door.close()
            with self._changed:
                for peer in self._peers:
                    peer.connection.end()

    # ------------------------------------------------------------- connections

    def _refuse(self, source: str, reason: str) -> None:
        """Say where somebody came from who has not shown to know the token."""
        if source not in self._refused and len(self._refused) < _MOST_NAMED and not self._ended:
            self._refused.add(source)
            text = "server at %s refused a connection from %s: %s; training goes on, and further ones from there are "
            _log.warning(f"{text}refused silently", self.address, source, reason)

    def _attend(self, accepted: socket.socket, _: bytes) -> None:
        """The thread of a connection."""
        peer = _Peer(Connection(accepted, self._config.timeout, clock=self._now), self._now())
        with self._changed:
            self._peers.append(peer)
            if self._ended:
                peer.connection.end()
        problem: Exception | None = None
        try:
            while not isinstance(message := peer.connection.receive(self._most_bytes(peer)), wire.Bye):
                with self._changed:
                    answer = self._handle(peer, message)
                peer.connection.send(answer)
        except Exception as error:
            problem = error
        with self._changed:
            try:
                self._part(peer, problem)
            except HybridparError as error:  # `run` says so to all workers
                self._problem = self._problem or error
            self._changed.notify_all()

    def _part(self, peer: _Peer, error: Exception | None) -> None:
        """A connection has ended, with an error or without; whatever it is, the others are served on."""
        if isinstance(error, HybridparError) and peer.hello is not None:
            raise error
        self._peers.remove(peer)
        peer.connection.end()
        worker = None if peer.hello is None else peer.hello.worker
        if error is not None and not isinstance(error, OSError):
            who = "a process" if worker is None else f"worker {worker}"
            text = str(error)[:200] if isinstance(error, Garbled) else f"{type(error).__name__}: {str(error)[:200]}"
            _log.warning("server at %s closed the connection of %s: %s", self.address, who, text)
        if self._first is None and error is None:  # the run was over before anybody came
            self._farewell = True
        if worker is None or self._workers.get(worker) is not peer:
            return
        self._farewell = error is None
        if error is not None:
            text = f"worker {worker} is gone ({error})"
            if self._rules.barrier:
                raise SyncError(
                    f"{text}, and every update needs its gradient",
                    "A synchronous update takes a gradient of every worker.",
                    "A launched job restarts from its last checkpoint; --sync ps-async goes on without the worker.",
                )
            self._news.append(f"{text}; the others go on")
        self._leave(worker)

    def _leave(self, worker: int) -> None:
        """A worker takes part no more, until it comes again."""
        del self._workers[worker]
        self._deliver(self._started.leave(worker))

    def _most_bytes(self, peer: _Peer) -> int:
        """Bytes that the tensors of the next message may have."""
        if peer.hello is None or self.shard is None:
            return usable_memory() if peer.hello is not None and peer.hello.worker == 0 else _FACT_BYTES
        return _FACT_BYTES + 4 * (self.shard.stripe.count + self.shard.statistics.numel())

    # ---------------------------------------------------------------- messages

    @property
    def _started(self) -> Shard:
        """The shard, where it is sure that there are weights."""
        assert self.shard is not None
        return self.shard

    def _handle(self, peer: _Peer, message: wire.ServerMessage) -> wire.ServerMessage:
        """Do what a worker asks, under the lock; what to answer."""
        if self._ended:
            raise ConnectionResetError("the server has ended")
        if isinstance(message, wire.Hello):
            return self._hello(peer, message)
        if peer.hello is None:
            raise Garbled(f"a {type(message).__name__} before the Hello")
        worker = peer.hello.worker
        if isinstance(message, wire.Start) and worker == 0:
            if self.shard is None:  # else it goes on with the weights that it has
                self._start(message)
            return self._welcome(peer, peer.hello)
        if self._workers.get(worker) is not peer:
            raise Garbled(f"a {type(message).__name__} of a worker that takes no part")
        if isinstance(message, wire.Gradient) and message.learner == worker and message.clock <= self._started.clock:
            self._push(peer, message)
            return self._answer(peer, worker)
        if isinstance(message, wire.Squares) and worker == 0 and self._started.squares is not None:
            self._deliver(self._started.finish(message.squares))
            return self._answer(peer, worker)
        if isinstance(message, wire.GatherItem):
            return self._gather(peer, worker, message)
        if isinstance(message, wire.AskState):
            return wire.ShardState(state=self._started.state_dict(), rows=self._rows_after(message.heard))
        raise Garbled(f"a {type(message).__name__} that nobody waits for")

    def _hello(self, peer: _Peer, hello: wire.Hello) -> wire.ServerMessage:
        """A worker has come, for the first time or again."""
        if not 0 <= hello.worker < self._rules.learners:
            raise Garbled(f"worker {hello.worker} of {self._rules.learners}")
        first = self._first = self._first or hello
        if (first.model, first.policy) != (hello.model, hello.policy):
            what = "the model" if first.model != hello.model else "--compress"
            error = UsageError(
                f"worker {hello.worker} and worker {first.worker} differ in {what}",
                "All workers train one model: names, shapes and dtypes of all parameters must be equal, and so must be "
                "the codecs of gradients.",
                "Start all workers with the same command and the same code.",
            )
            return wire.Refused(error=error)
        peer.hello = hello
        if self.shard is None and hello.worker == 0:
            return wire.Missing()
        self._wait(peer, lambda: self.shard is not None)
        return self._welcome(peer, hello)

    def _start(self, start: wire.Start) -> None:
        """Worker 0 brings the weights."""
        stripe, state = Stripe(tuple(start.pieces)), start.state
        known: dict[str, Any] = {"limit": start.limit, "clipping": start.clipping}
        shard = Shard(stripe, state["values"], self._rules, self._config, **known)
        shard.load_state_dict(state)
        shard.ledger.restart()
        self._decoder, self.shard = PushDecoder(read_policy(self._config.compress), stripe), shard
        self._rest = start.rest
        self._changed.notify_all()

    def _welcome(self, peer: _Peer, hello: wire.Hello) -> wire.Weights:
        shard, worker, again = self._started, hello.worker, hello.pushes > 0
        if worker in self._workers:  # it comes again before its old connection was missed
            self._workers[worker].connection.end()
            self._leave(worker)
        if not self._rules.barrier and (again or shard.taken):
            self._news.append(f"worker {worker} has joined {'again ' if again else ''}at step {shard.step}")
        shard.join(worker, again=again)
        self._workers[worker] = peer
        weights = self._weights_for(peer, Answer(worker, 0, shard.clock, 0, applied=False, repeated=True))
        return replace(weights, rest=self._rest)

    def _push(self, peer: _Peer, push: wire.Gradient) -> None:
        peer.answer, peer.heard = None, push.heard
        shard, gradient = self._started, torch.empty(0)
        if push.sound and shard.expects(push.learner, push.sequence):
            gradient = torch.empty(shard.stripe.count)
            self._decoder.decode(push.pieces, push.states, gradient)
        self._stop |= push.stop
        self._save |= push.save and self._rules.barrier  # else worker 0 saves without the others
        self._deliver(shard.push(push, gradient, push.statistics))

    def _deliver(self, answers: Sequence[Answer]) -> None:
        """Workers may go on, after an update or without one."""
        for answer in answers:
            if (peer := self._workers.get(answer.learner)) is not None:
                peer.answer = self._weights_for(peer, answer)
        if answers:
            self._save = False
        self._changed.notify_all()

    def _weights_for(self, peer: _Peer, answer: Answer) -> wire.Weights:
        shard, news = self._started, list[str]()
        has_them = answer.clock == peer.clock and not answer.repeated
        if peer.heard is not None:
            news, self._news = self._news, news
        peer.clock = answer.clock
        return wire.Weights(
            **vars(answer),
            values=None if has_them else self._weights_now(),
            statistics=shard.statistics,
            step=shard.step,
            done=shard.done,
            stop=self._stop,
            save=self._save,
            rows=self._rows_after(peer.heard),
            news=news,
        )

    def _rows_after(self, heard: int | None) -> list[StepRow]:
        """What the steps did of which a worker has not heard."""
        return [] if heard is None else self._started.ledger.rows_after(heard)

    def _weights_now(self) -> Tensor:
        """The weights as they are to be sent. They must not change on their way, so there is a copy of each state."""
        shard = self._started
        if self._rules.barrier and not self._half:
            return shard.values  # which change when all workers have got them and pushed again
        if self._weights is None or self._weights[0] != shard.clock:
            self._weights = shard.clock, shard.values.half() if self._half else shard.values.clone()
        return self._weights[1]

    def _answer(self, peer: _Peer, worker: int) -> wire.ServerMessage:
        """The answer to a push, once it is known; worker 0 first adds up norms where that is needed."""
        shard = self._started
        self._wait(peer, lambda: peer.answer is not None or (worker == 0 and shard.squares is not None))
        return peer.answer or wire.Squares(squares=shard.squares or 0.0)

    def _gather(self, peer: _Peer, worker: int, message: wire.GatherItem) -> wire.GatheredItems:
        """Collect an item of each worker: with a barrier of all, else of those that are there."""
        items = self._items.setdefault(message.tag, {})
        items[worker] = message.item
        self._changed.notify_all()
        everybody = range(self._rules.learners) if self._rules.barrier else self._workers
        self._wait(peer, lambda: items.keys() >= set(everybody))
        self._items.pop(message.tag, None)
        return wire.GatheredItems(items=dict(sorted(items.items())))

    def _wait(self, peer: _Peer, ready: Callable[[], bool]) -> None:
        """Wait until something is so; the worker hears now and then that the server lives."""
        every, last = _WAIT_EVERY * self._config.timeout, time.monotonic()
        peer.waits = True
        try:
            while not ready():
                if self._problem is not None:
                    raise self._problem
                if peer.connection.is_over():
                    raise ConnectionResetError("the connection was closed")
                if time.monotonic() - last > every:
                    last = time.monotonic()
                    peer.connection.send(wire.Wait())
                self._changed.wait(min(_LOOK_EVERY, every))
        finally:
            peer.waits = False

    # ----------------------------------------------------------------- silence

    def _is_over(self) -> bool:
        """Whether all workers have left, or none has come back whose connection was lost."""
        if self._problem is not None:
            raise self._problem
        if any(peer.hello for peer in self._peers) or (self._first is None and not self._farewell):
            self._alone_since = None
            return False
        now, timeout = self._now(), self._config.timeout
        self._alone_since = self._alone_since or now
        if not self._farewell and now - self._alone_since > timeout:
            raise SyncError(
                f"no worker came back to shard {self._number} within {timeout:g} s",
                "A server without workers has nothing to do.",
                "Start the run again with --resume.",
            )
        return self._farewell

    def _keep_time(self) -> None:
        """Name workers that are silent, and go on without those that keep others waiting."""
        now, timeout, barrier = self._now(), self._config.timeout, self._rules.barrier
        for peer in self._peers:
            if peer.hello is None and now - peer.since > timeout:
                peer.connection.end()  # its thread then ends
        waiting = {worker for worker, peer in self._workers.items() if peer.waits}
        self._waiting_since = (self._waiting_since or now) if waiting else None
        # Without a barrier worker 0 may be testing, which takes some time.
        tests = not barrier and not (self.shard is not None and self.shard.waiting)
        late = []
        for worker in set(range(self._rules.learners) if barrier else self._workers) - waiting:
            silent = self._workers.get(worker)
            quiet = math.inf if silent is None else now - silent.connection.active
            waited = 0.0 if self._waiting_since is None else min(quiet, now - self._waiting_since)
            if waited > timeout * (_PATIENCE if tests and worker == 0 else 1):
                late.append(worker)
            elif (
                silent is not None
                and quiet > timeout
                and silent.missed < silent.connection.active
                and (worker == 0 or not waiting)
                and self._number == 0  # a single shard says it for all
            ):
                silent.missed = silent.connection.active
                then = "others wait for it" if waiting else "the others go on, and its next gradient still counts"
                self._say(worker, f"nothing has come from worker {worker} for {quiet:.0f} s; {then}")
        if late and barrier:
            raise SyncError(
                f"worker{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} did not push a gradient within "
                f"{timeout:g} s",
                "A synchronous update takes a gradient of every worker.",
                "Look at the first worker that failed, or raise --timeout.",
            )
        for worker in late:
            then = "they go on, and it joins again when it answers"
            self._say(worker, f"worker {worker} did not answer within {timeout:g} s, and others waited for it; {then}")
            self._workers[worker].connection.end()
            self._leave(worker)

    def _say(self, worker: int, text: str) -> None:
        """Have worker 0 tell the user something about a worker, or do it here where worker 0 hears nothing now."""
        main = self._workers.get(0)
        if worker == 0 or main is None or main.waits:
            _log.warning("%s", text)
        else:
            self._news.append(text)
