"""Serves a shard to workers over sockets.

Each connection has a thread, which reads what a worker asks, does it under the lock, waits where others are to push
first, and writes the answer. What goes wrong on a connection ends that connection, and the others are served on. The
thread that called `run` lets workers in, and looks whether any of them is silent for too long.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress import Policy
from hybridpar.errors import HybridparError, SyncError, UsageError
from hybridpar.machine.process import usable_memory
from hybridpar.server import wire
from hybridpar.server.encoding import PushDecoder
from hybridpar.server.ledger import StepRow
from hybridpar.server.rules import Rules
from hybridpar.server.running import RunningBuffers
from hybridpar.server.shard import Answer, OptimizerOf, Shard
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


def save_occasion(number: int) -> str:
    """Name of the occasion on which workers write a checkpoint that any of them asked for."""
    return f"save-{number}"


@dataclass(frozen=True)
class ServerOptions:
    """What a server must know before a worker connects.

    Attributes:
        number: Which shard it is, from 0.
        rules: What to do with gradients.
        optimizer: Makes the optimizer.
        policy: Codecs of pushes.
        half: Whether weights are sent as float16.
        token: What a worker must know to be let in.
        timeout: Seconds after which a silent worker is an error, where others wait for it.
    """

    number: int
    rules: Rules
    optimizer: OptimizerOf
    policy: Policy
    half: bool
    token: str = field(repr=False)
    timeout: float


@dataclass
class _Peer:
    """A worker that takes part: its connection, and what it is to hear next.

    Attributes:
        clock: Of the weights that it has.
        saved: Number of the last request to save that it was sent.
        rows: Step up to which it knows what the steps did; None for a worker that does not want to know.
        answer: To its push, once it is known.
        missed: Since when nothing has come from it, once that has been said.
    """

    connection: Connection
    clock: int
    saved: int
    rows: int | None
    answer: wire.Weights | None = None
    missed: float | None = None


class ShardServer:
    """Serves a shard until all workers have left. `clock` gives seconds."""

    def __init__(
        self, options: ServerOptions, host: str = "127.0.0.1", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options, self._now = options, clock
        self._listener = socket.create_server((host, 0), backlog=128)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        # Held by who reads or changes what follows; notified when it changed.
        self._changed = threading.Condition()
        self.shard: Shard | None = None
        self._decoder: PushDecoder
        self._problem: HybridparError | None = None
        self._first: wire.Hello | None = None
        self._buffers, self._rest = RunningBuffers(options.rules), dict[str, Any]()
        self._weights: tuple[int, Tensor] | None = None  # as they are sent, and their clock
        self._hellos: dict[Connection, wire.Hello] = {}  # of all that are connected
        self._peers: dict[int, _Peer] = {}
        self._waiting: set[Connection] = set()
        self._farewell = False  # whether who left last had finished
        self._alone_since: float | None = None
        self._waiting_since: float | None = None
        self._stop, self._save = False, 0
        self._lowered: float | None = None
        self._news: list[str] = []
        self._parties: dict[str, set[int]] = {}  # who takes part in an occasion
        self._items: dict[str, dict[int, Any]] = {}  # what was said under a tag
        # Connections in the handshake, since when, oldest first; and addresses that were refused.
        self._most_waiting = max(_LEAST_WAITING, _WAITING_PER_WORKER * options.rules.learners)
        self._strangers: dict[Connection, float] = {}
        self._let_in: dict[Connection, float] = {}  # those that have not said who they are, since when
        self._ended = False
        self._named: set[str] = set()

    @property
    def address(self) -> str:
        """What a worker needs to come here."""
        return f"{self.host}:{self.port}"

    def run(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Serve until all workers that came have left."""
        self._listener.settimeout(0.05)
        try:
            while not give_up():
                with contextlib.suppress(OSError):
                    self._accept(self._listener.accept()[0])
                with self._changed:
                    if self._is_over():
                        return
                    self._keep_time()
        except HybridparError as error:
            with self._changed:
                self._problem = error
                self._changed.notify_all()
            for connection in list(self._hellos):
                with contextlib.suppress(OSError):
                    connection.send(wire.Refused(error=error))
            raise
        finally:
            self._listener.close()
            with self._changed:
                self._ended = True
                for connection in [*self._strangers, *self._let_in, *self._hellos]:
                    connection.end()

    # ------------------------------------------------------------- connections

    def _accept(self, accepted: socket.socket) -> None:
        connection = Connection(accepted, self._options.timeout, clock=self._now)
        with self._changed:
            if len(self._strangers) >= self._most_waiting:
                self._refuse(next(iter(self._strangers)), "too many came at the same time")
            self._strangers[connection] = self._now()
        threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _refuse(self, connection: Connection, reason: str) -> None:
        """Close a connection whose other end has not shown that it knows the token."""
        if self._strangers.pop(connection, None) is None:
            return
        connection.end()
        source = connection.source
        if source not in self._named and len(self._named) < _MOST_NAMED:
            self._named.add(source)
            text = "server at %s refused a connection from %s: %s; training goes on, and further ones from there are "
            _log.warning(f"{text}refused silently", self.address, source, reason)

    def _attend(self, connection: Connection) -> None:
        """The thread of a connection."""
        try:
            connection.let_in(self._options.token, self.address)
        except Exception as error:
            with self._changed:
                self._refuse(connection, str(error))
            return
        with self._changed:
            self._strangers.pop(connection, None)
            self._let_in[connection] = self._now()
        problem: Exception | None = None
        try:
            while not isinstance(message := connection.receive(self._most_bytes(connection)), wire.Bye):
                with self._changed:
                    answer = self._handle(connection, message)
                connection.send(answer)
        except Exception as error:
            problem = error
        with self._changed:
            try:
                self._part(connection, problem)
            except HybridparError as error:  # `run` says so to all workers
                self._problem = self._problem or error
            self._changed.notify_all()

    def _part(self, connection: Connection, error: Exception | None) -> None:
        """A connection has ended, with an error or without; whatever it is, the others are served on."""
        if isinstance(error, HybridparError) and connection in self._hellos:
            raise error
        self._let_in.pop(connection, None)
        hello = self._hellos.pop(connection, None)
        connection.end()
        if error is not None and not isinstance(error, OSError):
            who = "a process" if hello is None else f"worker {hello.worker}"
            text = str(error)[:200] if isinstance(error, Garbled) else f"{type(error).__name__}: {str(error)[:200]}"
            _log.warning("server at %s closed the connection of %s: %s", self.address, who, text)
        if hello is None or hello.worker not in self._peers or self._peers[hello.worker].connection is not connection:
            return
        self._farewell = error is None
        if error is not None:
            text = f"worker {hello.worker} is gone ({error})"
            if self._options.rules.barrier:
                raise SyncError(
                    f"{text}, and every update needs its gradient",
                    "A synchronous update takes a gradient of every worker.",
                    "A launched job restarts from its last checkpoint; --sync ps-async goes on without the worker.",
                )
            self._news.append(f"{text}; the others go on")
        self._leave(hello.worker)

    def _leave(self, worker: int) -> None:
        """A worker takes part no more, until it comes again."""
        del self._peers[worker]
        for tag, items in self._items.items():
            if not self._parties[_occasion(tag)] <= items.keys():
                items.pop(worker, None)
        for party in self._parties.values():
            party.discard(worker)
        self._deliver(self._started.leave(worker))

    def _most_bytes(self, connection: Connection) -> int:
        """Bytes that the tensors of the next message may have."""
        hello = self._hellos.get(connection)
        if hello is None or self.shard is None:
            return usable_memory() if hello is not None and hello.worker == 0 else _FACT_BYTES
        return _FACT_BYTES + 4 * (self.shard.stripe.count + self._buffers.values.numel())

    # ---------------------------------------------------------------- messages

    @property
    def _started(self) -> Shard:
        """The shard, where it is sure that there are weights."""
        assert self.shard is not None
        return self.shard

    def _handle(self, connection: Connection, message: wire.ServerMessage) -> wire.ServerMessage:
        """Do what a worker asks, under the lock; what to answer."""
        hello = message if isinstance(message, wire.Hello) else self._hellos.get(connection)
        if self._ended:
            raise ConnectionResetError("the server has ended")
        if hello is None:
            raise Garbled(f"a {type(message).__name__} before the Hello")
        worker, peer = hello.worker, self._peers.get(hello.worker)
        if hello is message:
            return self._hello(connection, hello)
        if isinstance(message, wire.Start) and worker == 0:
            if self.shard is None:  # else it goes on with the weights that it has
                self._start(message)
            return self._welcome(connection, hello)
        if peer is None or peer.connection is not connection:
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
            state = self._started.state_dict() | {"buffers": self._buffers.values.clone()}
            return wire.ShardState(state=state, rows=self._rows_for(peer))
        raise Garbled(f"a {type(message).__name__} that nobody waits for")

    def _hello(self, connection: Connection, hello: wire.Hello) -> wire.ServerMessage:
        """A worker has come, for the first time or again."""
        if not 0 <= hello.worker < self._options.rules.learners:
            raise Garbled(f"worker {hello.worker} of {self._options.rules.learners}")
        first = self._first = self._first or hello
        alike = (first.fingerprint, first.stripe, first.buffers) == (hello.fingerprint, hello.stripe, hello.buffers)
        if not alike or first.policy != hello.policy:
            what = "--compress" if alike else "the model"
            error = UsageError(
                f"worker {hello.worker} and worker {first.worker} differ in {what}",
                "All workers train one model: names, shapes and dtypes of all parameters must be equal, and so must be "
                "the codecs of gradients.",
                "Start all workers with the same command and the same code.",
            )
            return wire.Refused(error=error)
        self._hellos[connection] = hello
        self._let_in.pop(connection, None)
        if self.shard is None and hello.worker == 0:
            return wire.Welcome()
        self._wait(connection, lambda: self.shard is not None)
        return self._welcome(connection, hello)

    def _start(self, start: wire.Start) -> None:
        """Worker 0 brings the weights."""
        stripe, options = Stripe(tuple(start.pieces)), self._options
        known: dict[str, Any] = {"limit": start.limit, "clipping": start.clipping}
        shard = Shard(stripe, start.state["values"], options.rules, options.optimizer, **known)
        shard.load_state_dict(start.state)
        shard.ledger.restart()
        self._decoder, self.shard = PushDecoder(options.policy, stripe), shard
        self._buffers.values, self._rest = start.statistics, start.rest
        self._changed.notify_all()

    def _welcome(self, connection: Connection, hello: wire.Hello) -> wire.Welcome:
        shard, worker = self._started, hello.worker
        if worker in self._peers:  # it comes again before its old connection was missed
            self._peers[worker].connection.end()
            self._leave(worker)
        again = hello.pushes > 0
        if not self._options.rules.barrier and (again or shard.taken):
            self._news.append(f"worker {worker} has joined {'again ' if again else ''}at step {shard.step}")
        shard.join(worker, again=again)
        self._peers[worker] = _Peer(connection, shard.clock, self._save, hello.rows)
        return wire.Welcome(
            values=self._weights_now(),
            clock=shard.clock,
            step=shard.step,
            lowered=self._lowered,
            statistics=self._buffers.values,
            rest=self._rest,
        )

    def _push(self, peer: _Peer, push: wire.Gradient) -> None:
        peer.answer, shard, gradient = None, self._started, torch.empty(0)
        if push.sound and shard.expects(push.learner, push.sequence):
            gradient = torch.empty(shard.stripe.count)
            self._decoder.decode(push.pieces, push.states, gradient)
            self._buffers.take(push.learner, push.statistics)
        self._stop |= push.stop
        if push.save and not shard.done and not self._stop:  # else some have heard their last answer
            self._save += 1
            # Who joins from now on does not hear of it.
            self._parties[save_occasion(self._save)] = set(self._peers)
        self._lowered = self._lowered if push.lowered is None else push.lowered
        self._deliver(shard.push(push, gradient))

    def _deliver(self, answers: Sequence[Answer]) -> None:
        """Workers may go on, after an update or without one."""
        if answers:
            self._buffers.meet(any(answer.applied for answer in answers))
        for answer in answers:
            if (peer := self._peers.get(answer.learner)) is not None:
                peer.answer = self._weights_for(peer, answer)
        self._changed.notify_all()

    def _weights_for(self, peer: _Peer, answer: Answer) -> wire.Weights:
        shard, news, save = self._started, list[str](), self._save if self._save > peer.saved else 0
        has_them = answer.clock == peer.clock and not answer.repeated
        if peer.rows is not None:
            news, self._news = self._news, news
        peer.saved, peer.clock = self._save, answer.clock
        return wire.Weights(
            **vars(answer),
            values=None if has_them else self._weights_now(),
            statistics=self._buffers.values,
            step=shard.step,
            done=shard.done,
            stop=self._stop,
            save=save,
            lowered=self._lowered,
            rows=self._rows_for(peer),
            news=news,
        )

    def _rows_for(self, peer: _Peer) -> list[StepRow]:
        """What the steps did that a worker has not heard of."""
        rows = [] if peer.rows is None else self._started.ledger.rows_after(peer.rows)
        peer.rows = rows[-1].step if rows else peer.rows
        return rows

    def _weights_now(self) -> Tensor:
        """The weights as they are to be sent. They must not change on their way, so there is a copy of each state."""
        shard, half = self._started, self._options.half
        if self._options.rules.barrier and not half:
            return shard.values  # which change when all workers have got them and pushed again
        if self._weights is None or self._weights[0] != shard.clock:
            self._weights = shard.clock, shard.values.half() if half else shard.values.clone()
        return self._weights[1]

    def _answer(self, peer: _Peer, worker: int) -> wire.ServerMessage:
        """The answer to a push, once it is known; worker 0 first adds up norms where that is needed."""
        shard = self._started
        self._wait(peer.connection, lambda: peer.answer is not None or (worker == 0 and shard.squares is not None))
        return peer.answer or wire.Squares(squares=shard.squares or 0.0)

    def _gather(self, peer: _Peer, worker: int, message: wire.GatherItem) -> wire.GatheredItems:
        """Collect an item of each worker of an occasion; a tag is `occasion/number`.

        With a barrier all take part. Else that was settled when workers heard of the occasion, or by the first message
        of it; a worker that has left since is not waited for.
        """
        rules = self._options.rules
        all_there = set(range(rules.learners)) if rules.barrier else set(self._peers)
        party = self._parties.setdefault(_occasion(message.tag), all_there)
        if worker not in party:  # it came late, and there is no other message for it
            return wire.GatheredItems(items={worker: message.item})
        for earlier in self._parties.values() if not rules.barrier else ():
            if earlier is party:
                break
            earlier.discard(worker)  # all come to occasions in the same order: it comes to none of these
        items = self._items.setdefault(message.tag, {})
        items[worker] = message.item
        self._changed.notify_all()
        self._wait(peer.connection, lambda: party <= items.keys())
        self._items.pop(message.tag, None)
        return wire.GatheredItems(items=dict(sorted(items.items())))

    def _wait(self, connection: Connection, ready: Callable[[], bool]) -> None:
        """Wait until something is so; the worker hears now and then that the server lives."""
        every, last = _WAIT_EVERY * self._options.timeout, time.monotonic()
        self._waiting.add(connection)
        try:
            while not ready():
                if self._problem is not None:
                    raise self._problem
                if connection.is_over():
                    raise ConnectionResetError("the connection was closed")
                if time.monotonic() - last > every:
                    last = time.monotonic()
                    connection.send(wire.Wait())
                self._changed.wait(min(_LOOK_EVERY, every))
        finally:
            self._waiting.discard(connection)

    # ----------------------------------------------------------------- silence

    def _is_over(self) -> bool:
        """Whether all workers have left, or none has come back whose connection was lost."""
        if self._problem is not None:
            raise self._problem
        now = self._now()
        if self._first is None or self._hellos:
            self._alone_since = None
            return False
        self._alone_since = self._alone_since or now
        if not self._farewell and now - self._alone_since > self._options.timeout:
            raise SyncError(
                f"no worker came back to shard {self._options.number} within {self._options.timeout:g} s",
                "A server without workers has nothing to do.",
                "Start the run again with --resume.",
            )
        return self._farewell

    def _keep_time(self) -> None:
        """End slow handshakes, name workers that are silent, and go on without those that keep others waiting."""
        now, timeout, barrier = self._now(), self._options.timeout, self._options.rules.barrier
        for connection in [stranger for stranger, since in self._strangers.items() if now - since > HANDSHAKE_SECONDS]:
            self._refuse(connection, f"it sent no reply within {HANDSHAKE_SECONDS:g} s")
        for connection in [silent for silent, since in self._let_in.items() if now - since > timeout]:
            connection.end()  # its thread then ends
        waiting = {worker for worker, peer in self._peers.items() if peer.connection in self._waiting}
        self._waiting_since = (self._waiting_since or now) if waiting else None
        # Without a barrier worker 0 may be testing, which takes some time.
        tests = not barrier and not (self.shard is not None and self.shard.waiting)
        late = []
        for worker in set(range(self._options.rules.learners) if barrier else self._peers) - waiting:
            peer = self._peers.get(worker)
            quiet = math.inf if peer is None else now - peer.connection.active
            waited = 0.0 if self._waiting_since is None else min(quiet, now - self._waiting_since)
            if waited > timeout * (_PATIENCE if tests and worker == 0 else 1):
                late.append(worker)
            elif peer is not None and not barrier and self._options.number == 0:  # a single shard says it for all
                self._note_silence(worker, peer, quiet, is_waited_for=bool(waiting))
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
            self._peers[worker].connection.end()
            self._leave(worker)

    def _note_silence(self, worker: int, peer: _Peer, quiet: float, *, is_waited_for: bool) -> None:
        """Say once that nothing comes from a worker, and when something does again."""
        timeout, active = self._options.timeout, peer.connection.active
        if peer.missed is not None and active > peer.missed:
            self._say(worker, f"worker {worker} goes on after {active - peer.missed:.0f} s of silence")
            peer.missed = None
        elif peer.missed is None and quiet > timeout and (worker == 0 or not is_waited_for):
            peer.missed = active
            then = "the others go on, and its next gradient still counts"
            if is_waited_for:
                then = f"others wait for it, at most {_PATIENCE * timeout:g} s where it is testing"
            self._say(worker, f"nothing has come from worker {worker} for {quiet:.0f} s; {then}")

    def _say(self, worker: int, text: str) -> None:
        """Have worker 0 tell the user something about a worker, or do it here where worker 0 hears nothing now."""
        first = self._peers.get(0)
        if worker == 0 or first is None or first.connection in self._waiting:
            _log.warning("%s", text)
        else:
            self._news.append(text)


def _occasion(tag: str) -> str:
    return tag.partition("/")[0]
