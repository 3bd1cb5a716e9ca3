"""Why: a shard takes one call at a time, so whoever brings it messages from many workers does so from one thread.

The loop waits for all sockets together and works through what has come in the order in which it came, which makes the
server the single writer of its stripe without any lock. It never waits for one worker: what cannot be sent yet is sent
when the socket takes it. To a worker that has to wait for others it says so now and then, so that the worker can tell a
server that waits from one that is gone.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress import Policy
from hybridpar.errors import HybridparError, SyncError, UsageError
from hybridpar.server.encoding import PushDecoder
from hybridpar.server.meetings import Meetings
from hybridpar.server.rules import Rules
from hybridpar.server.running import RunningBuffers
from hybridpar.server.shard import Answer, OptimizerOf, Push, Shard
from hybridpar.server.stripes import Piece, Stripe
from hybridpar.server.wire import Connection, Frame, Garbled, bytes_of, frame_of, pack

_log = logging.getLogger(__name__)

#: How often a worker that waits is told so, as a part of the time-out.
_TELL = 0.2


@dataclass(frozen=True)
class ServerOptions:
    """What a server must know before anybody has come.

    Attributes:
        number: Which shard it is, from 0.
        shards: How many there are.
        rules: What to do with gradients.
        optimizer: Makes the optimizer.
        policy: What pushes travel as.
        half: Whether weights are sent as float16.
        token: What a worker must know to be let in.
        timeout: Seconds after which a silent worker is an error, where others wait for it.
    """

    number: int
    shards: int
    rules: Rules
    optimizer: OptimizerOf
    policy: Policy
    half: bool
    token: str
    timeout: float


@dataclass
class _Peer:
    """A worker that is connected.

    Attributes:
        session: Names the process, so that one that lost its connection is told from its successor.
        clock: Of the weights that it has; None where it has none of this shard.
        end: Push that has arrived but for its end.
        told: When it was last told anything.
        saved: The last wish to save that it has been told.
        rows: Step up to which it has been told what the steps did; None for one that does not want to know.
    """

    connection: Connection
    session: str
    decoder: PushDecoder
    clock: int | None = None
    push: Frame | None = None
    told: float = field(default_factory=time.monotonic)
    saved: int = 0
    rows: int | None = None


class ShardServer:
    """Serves one shard until all workers have left.

    Args:
        options: What is known beforehand. The model comes from the first worker, the weights from worker 0.
        host: Address to listen at.
        clock: Seconds.
    """

    def __init__(
        self, options: ServerOptions, host: str = "127.0.0.1", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._now = clock
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self.shard: Shard | None = None
        self._buffers = RunningBuffers(options.rules)
        self._rest: bytes = b""
        self._expected: dict[str, Any] | None = None
        self._peers: dict[int, _Peer] = {}
        self._early: dict[int, tuple[Connection, Frame]] = {}  # came before there were weights
        self._past: dict[tuple[int, str], tuple[int, PushDecoder]] = {}
        self._meetings = Meetings()
        self._seen = False
        self._stop = False
        self._save = 0
        self._news: list[str] = []
        self._waiting_since: float | None = None
        self._weights: tuple[int, Tensor] | None = None
        self._received = self._sent = 0

    @property
    def address(self) -> str:
        """What a worker needs to come here."""
        return f"{self.host}:{self.port}"

    # -------------------------------------------------------------------- loop

    def run(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Serve until everybody who came has left.

        Args:
            give_up: Asked now and then; True ends it.

        Raises:
            SyncError: An update waits for a worker that is gone, or silent.
        """
        try:
            while not give_up() and not (self._seen and not self._peers and not self._early):
                self._turn(0.05 if self._peers else 0.2)
        except HybridparError as error:
            self._tell_all(error)
            raise
        finally:
            self.close()

    def _turn(self, seconds: float) -> None:
        for key, events in self._selector.select(seconds):
            if key.data is None:
                self._accept()
                continue
            connection: Connection = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    connection.flush()
                if events & selectors.EVENT_READ:
                    for frame in connection.read():
                        self._handle(connection, frame)
                self._watch(connection)
            except (OSError, Garbled) as error:
                self._lost(connection, error)
        self._keep_time()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        self._selector.register(accepted, selectors.EVENT_READ, Connection(accepted))

    def _watch(self, connection: Connection) -> None:
        """Wait for a socket to take more only while there is more."""
        if connection.socket.fileno() < 0:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.sending else 0)
        self._selector.modify(connection.socket, events, connection)

    def _send(self, peer: _Peer, meta: dict[str, Any], *payload: memoryview) -> None:
        peer.told = self._now()
        self._send_to(peer.connection, meta, *payload)

    def _send_to(self, connection: Connection, meta: dict[str, Any], *payload: memoryview) -> None:
        try:
            connection.send(frame_of(meta, *payload))
            self._watch(connection)
        except OSError as error:
            self._lost(connection, error)

    def _drop(self, connection: Connection) -> None:
        self._received += connection.received
        self._sent += connection.sent
        connection.received = connection.sent = 0
        if connection.socket.fileno() >= 0:
            self._selector.unregister(connection.socket)
            connection.close()

    def _lost(self, connection: Connection, error: BaseException) -> None:
        """A connection ended without a good-bye."""
        worker = connection.worker
        self._drop(connection)
        self._early = {number: held for number, held in self._early.items() if held[0] is not connection}
        if worker is None or worker not in self._peers or self._peers[worker].connection is not connection:
            return
        text = f"worker {worker} is gone ({error})"
        if self._options.rules.barrier:
            raise SyncError(
                f"{text}, and every update needs its gradient",
                "A synchronous update takes a gradient of every worker.",
                "A launched job restarts from its last checkpoint; --sync ps-async goes on without the worker.",
            )
        self._news.append(f"{text}; the others go on")
        self._leave(worker)

    def _leave(self, worker: int) -> None:
        peer = self._peers.pop(worker)
        shard = self.shard
        assert shard is not None
        known = shard.sequence_of(worker)
        self._past[worker, peer.session] = (known, peer.decoder)
        for answer in shard.leave(worker):
            self._answer(answer)
        self._meet(self._meetings.leave(worker))

    def _keep_time(self) -> None:
        """Tell those who wait that they still do, and end it where a barrier waits for somebody silent."""
        shard, now = self.shard, self._now()
        if shard is None:
            for connection, _ in list(self._early.values()):
                self._tell_waiting(connection, now)
            return
        waiting = {*shard.waiting, *self._meetings.waiting}
        for worker in waiting:
            peer = self._peers.get(worker)
            if peer is not None and now - peer.told > _TELL * self._options.timeout:
                self._send(peer, {"kind": "wait"})
        if not waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > self._options.timeout:
            self._end_waiting(waiting)

    def _tell_waiting(self, connection: Connection, now: float) -> None:
        if now - connection.told > _TELL * self._options.timeout:
            connection.told = now
            self._send_to(connection, {"kind": "wait"})

    def _end_waiting(self, waiting: set[int]) -> None:
        """Somebody keeps others waiting for longer than the time-out."""
        shard = self.shard
        assert shard is not None
        self._waiting_since = None
        present = range(self._options.rules.learners) if self._options.rules.barrier else [*self._peers]
        silent = [worker for worker in present if worker not in waiting]
        text = f"worker{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        if self._options.rules.barrier:
            raise SyncError(
                f"{text} did not push a gradient within {self._options.timeout:g} s",
                "A synchronous update takes a gradient of every worker.",
                "Look at the first worker that failed, or raise --timeout.",
            )
        for worker in silent:
            self._news.append(f"worker {worker} did not answer within {self._options.timeout:g} s; the others go on")
            self._drop(self._peers[worker].connection)
            self._leave(worker)

    def _tell_all(self, error: HybridparError) -> None:
        """Tell everybody why it ends, as far as they still listen."""
        meta = _refusal(error)
        for connection in [peer.connection for peer in self._peers.values()] + [
            held[0] for held in self._early.values()
        ]:
            try:
                connection.socket.setblocking(True)
                connection.socket.settimeout(1.0)
                connection.send(frame_of(meta))
            except OSError:
                continue

    def close(self) -> None:
        """Close all sockets."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self._listener.close()
        self._selector.close()

    # ------------------------------------------------------------------ frames

    def _handle(self, connection: Connection, frame: Frame) -> None:
        kind = frame.kind
        if kind == "hello":
            self._hello(connection, frame)
            return
        worker = connection.worker
        if worker is None:
            raise Garbled("a frame before the hello")
        if kind == "init":
            self._initialise(frame)
            return
        peer = self._peers[worker]
        if kind == "push":
            peer.push = frame
        elif kind == "end":
            self._end_push(worker, peer, frame)
        elif kind == "gather":
            tag = str(frame.meta["tag"])
            self._meet(self._meetings.deposit(tag, worker, frame.payload, set(self._peers)))
        elif kind == "state":
            self._send_state(peer)
        elif kind == "coders":
            assert self.shard is not None
            peer.decoder = PushDecoder(self._options.policy, self.shard.stripe, frame.unpack())
        elif kind == "bye":
            self._leave(worker)
            self._drop(connection)
        else:
            raise Garbled(f"a frame of kind {kind!r}")

    def _hello(self, connection: Connection, frame: Frame) -> None:
        """A worker has come, for the first time or again."""
        meta = frame.meta
        if meta.get("token") != self._options.token:
            raise Garbled("a stranger")
        worker = int(meta["worker"])
        own = {key: meta[key] for key in ("fingerprint", "stripe", "policy", "buffers")}
        if self._expected is None:
            self._expected = own | {"worker": worker}
        difference = [key for key, value in own.items() if value != self._expected[key]]
        if difference:
            error = UsageError(
                f"worker {worker} and worker {self._expected['worker']} differ in "
                f"{'the model' if {'fingerprint', 'stripe', 'buffers'} & set(difference) else '--compress'}",
                "All workers train one model: names, shapes and dtypes of all parameters must be equal, and so must be "
                "what gradients travel as.",
                "Start all workers with the same command and the same code.",
            )
            self._send_to(connection, _refusal(error))
            self._drop(connection)
            return
        self._seen = True
        connection.worker = worker
        if self.shard is not None:
            self._welcome(connection, frame)
        else:
            self._early[worker] = connection, frame
            if worker == 0:
                self._send_to(connection, {"kind": "welcome", "initialised": False})

    def _welcome(self, connection: Connection, frame: Frame) -> None:
        shard, worker, session = self.shard, connection.worker, str(frame.meta["session"])
        assert shard is not None
        assert worker is not None
        if worker in self._peers:  # it comes again before its old connection was missed
            self._drop(self._peers[worker].connection)
            self._leave(worker)
        sequence, decoder = self._past.pop((worker, session), (0, None))
        if decoder is None:
            decoder = PushDecoder(self._options.policy, shard.stripe, frame.unpack())
            if not self._options.rules.barrier and shard.taken and frame.meta.get("joins", True):
                self._news.append(f"worker {worker} has joined at step {shard.step}")
        peer = _Peer(connection, session, decoder, clock=shard.clock, saved=self._save)
        peer.rows = frame.meta.get("rows")
        self._peers[worker] = peer
        shard.join(worker, sequence)
        meta = {
            "kind": "welcome",
            "initialised": True,
            "clock": shard.clock,
            "step": shard.step,
            "sequence": sequence,
            "buffers": self._buffers.size,
            "rest": len(self._rest),
        }
        self._send(peer, meta, self._weights_now(), self._buffers.memory(), memoryview(self._rest))

    def _initialise(self, frame: Frame) -> None:
        """Worker 0 brings the weights; a shard that has them keeps its own."""
        if self.shard is not None:
            return
        start = frame.unpack()
        stripe = Stripe(tuple(Piece(**{**piece, "shape": tuple(piece["shape"])}) for piece in start["pieces"]))
        options = self._options
        self.shard = Shard(stripe, start["values"], options.rules, options.optimizer, limit=start["limit"])
        self.shard.load_values(start["values"], start["optimizer"])
        if start["state"]:
            self.shard.load_progress(start["state"])
        self._buffers.values = start["buffers"]
        self._rest = bytes(pack(start["rest"]))
        self.shard.ledger.restart()
        early, self._early = self._early, {}
        for worker in sorted(early):
            self._welcome(*early[worker])

    def _end_push(self, worker: int, peer: _Peer, frame: Frame) -> None:
        """All of a push is there."""
        shard, arrived = self.shard, peer.push
        assert shard is not None
        if arrived is None:
            raise Garbled("an end without a push")
        peer.push = None
        meta = {**arrived.meta, **frame.meta}
        self._stop |= bool(meta["stop"])
        if meta["save"] and not shard.done:  # else some have heard their last answer, and would not come
            self._save += 1
        push = Push(
            worker,
            int(meta["sequence"]),
            int(meta["clock"]),
            weight=meta["weight"],
            rate=float(meta["rate"]),
            samples=int(meta["samples"]),
            loss=float(meta["loss"]),
            sound=bool(meta["sound"]),
            unused=frozenset(meta["unused"]),
        )
        gradient = torch.empty(0)
        if shard.expects(worker, push.sequence) and push.sound:
            gradient = torch.empty(shard.stripe.count)
            if meta["coded"]:
                peer.decoder.decode(arrived.payload, gradient, meta["warm"])
            else:
                gradient = arrived.payload.view(torch.float32)
            self._buffers.take(worker, frame.payload)
        answers = shard.push(push, gradient)
        if answers:
            self._buffers.meet(all(answer.applied for answer in answers))
        for answer in answers:
            self._answer(answer)

    def _answer(self, answer: Answer) -> None:
        """A worker may go on."""
        peer, shard = self._peers.get(answer.learner), self.shard
        if peer is None or shard is None:
            return
        if not answer.repeated:
            peer.decoder.commit() if answer.applied else peer.decoder.rollback()
        same = answer.clock == peer.clock and not answer.repeated
        meta: dict[str, Any] = {
            "kind": "weights",
            "sequence": answer.sequence,
            "clock": answer.clock,
            "staleness": answer.staleness,
            "applied": answer.applied,
            "repeated": answer.repeated,
            "same": same,
            "buffers": self._buffers.size,
            "step": shard.step,
            "done": shard.done,
            "stop": self._stop,
            "save": self._save if self._save > peer.saved else 0,
        }
        if peer.rows is not None:
            rows = shard.ledger.rows_after(peer.rows)
            peer.rows = rows[-1]["step"] if rows else peer.rows
            meta |= {"rows": rows, "news": self._news, "workers": len(self._peers)}
            self._news = []
        peer.saved, peer.clock = self._save, answer.clock
        weights = memoryview(b"") if same else self._weights_now()
        self._send(peer, meta, weights, self._buffers.memory())

    def _weights_now(self) -> memoryview:
        """The weights as they are to be sent. They must not change on their way, so there is a copy of each state."""
        shard = self.shard
        assert shard is not None
        if self._weights is None or self._weights[0] != shard.clock:
            self._weights = shard.clock, shard.values.half() if self._options.half else shard.values.clone()
        return bytes_of(self._weights[1])

    def _meet(self, done: dict[str, dict[int, Tensor]]) -> None:
        """Everybody has left a message of some kind: everybody gets all of them."""
        for tag, messages in done.items():
            workers = sorted(messages)
            sizes = [messages[worker].numel() for worker in workers]
            for worker in workers:
                peer = self._peers.get(worker)
                if peer is not None:
                    meta = {"kind": "gathered", "tag": tag, "workers": workers, "sizes": sizes}
                    self._send(peer, meta, *(bytes_of(messages[one]) for one in workers))

    def _send_state(self, peer: _Peer) -> None:
        """Everything that a checkpoint keeps of this shard."""
        shard = self.shard
        assert shard is not None
        live = [one.connection for one in self._peers.values()]
        traffic = {
            "received": self._received + sum(one.received for one in live),
            "sent": self._sent + sum(one.sent for one in live),
        }
        state = shard.state_dict() | {"buffers": self._buffers.values.clone(), "traffic": traffic}
        meta: dict[str, Any] = {"kind": "state"}
        if peer.rows is not None:
            meta["rows"] = shard.ledger.rows_after(peer.rows)
            peer.rows = shard.step
        self._send(peer, meta, pack(state))


def _refusal(error: HybridparError) -> dict[str, Any]:
    kind = "usage" if isinstance(error, UsageError) else "sync"
    return {"kind": "refused", "error": kind, "what": error.what, "why": error.why, "fix": error.fix}
