"""Serves one shard to workers over sockets.

The server is the single writer of its stripe (`hybridpar.server.loop`). A worker that has to wait for others is
sent a message now and then, so that it can tell a waiting server from one that is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridpar.errors import HybridparError, SyncError, UsageError
from hybridpar.machine.process import usable_memory
from hybridpar.server.clipping import Clipping
from hybridpar.server.encoding import PushDecoder
from hybridpar.server.loop import SocketLoop
from hybridpar.server.meetings import Meetings, save_occasion
from hybridpar.server.peers import Peer, ServerOptions, refusal
from hybridpar.server.running import RunningBuffers
from hybridpar.server.shard import Answer, Push, Shard
from hybridpar.server.stripes import Piece, Stripe
from hybridpar.server.wire import Connection, Frame, Garbled, bytes_of, pack

_log = logging.getLogger(__name__)

#: How often a worker that waits is told so, as a part of the time-out.
_TELL = 0.2

#: Bytes of what workers tell each other over shard 0, and of what they say of themselves, at most.
_FACT_BYTES = 1 << 24

#: Tensors as large as the stripe that the state of codecs has at most.
_MOST_STATES = 8

#: How many time-outs workers wait for one that is busy with other things than a gradient.
_PATIENCE = 10


class ShardServer(SocketLoop):
    """Serves one shard until all workers have left."""

    def __init__(
        self, options: ServerOptions, host: str = "127.0.0.1", clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(host, options.token, options.rules.learners, clock)
        self._options = options
        self.shard: Shard | None = None
        self._buffers = RunningBuffers(options.rules)
        self._rest: bytes = b""
        self._expected: dict[str, Any] | None = None
        self._peers: dict[int, Peer] = {}
        self._early: dict[int, tuple[Connection, Frame]] = {}  # came before there were weights
        self._past: dict[tuple[int, str], tuple[int, PushDecoder]] = {}
        self._meetings = Meetings()
        self._seen = False
        self._farewell = False  # whether who left last had finished
        self._alone_since: float | None = None
        self._stop = False
        self._save = 0
        self._news: list[str] = []
        self._waiting_since: float | None = None
        self._weights: tuple[int, Tensor] | None = None
        self._lowered: float | None = None  # what worker 0 last said that learning rates are multiplied with

    # -------------------------------------------------------------------- loop

    def run(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Serve until all workers that came have left."""
        try:
            while not give_up() and not self._is_over():
                self.turn(0.05)
                self._keep_time()
        except HybridparError as error:
            self._tell_all(error)
            raise
        finally:
            self.close()

    @property
    def _started(self) -> Shard:
        """The shard, where it is sure that there are weights."""
        assert self.shard is not None
        return self.shard

    def _is_over(self) -> bool:
        """Whether all workers have left, or none has come back whose connection was lost."""
        if not self._seen or self._peers or self._early:
            self._alone_since = None
            return False
        if self._farewell:
            return True
        now = self._now()
        self._alone_since = self._alone_since or now
        if now - self._alone_since > self._options.timeout:
            raise SyncError(
                f"no worker came back to shard {self._options.number} within {self._options.timeout:g} s",
                "A server without workers has nothing to do.",
                "Start the run again with --resume.",
            )
        return False

    def _send(self, peer: Peer, meta: dict[str, Any], *payload: memoryview) -> None:
        peer.told = self._now()
        self.send(peer.connection, meta, *payload)

    def lost(self, connection: Connection, error: BaseException) -> None:
        """Take a worker out whose connection ended without a good-bye."""
        worker = connection.worker
        self.drop(connection)
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
        self._farewell = False
        self._leave(worker)

    def _leave(self, worker: int) -> None:
        peer = self._peers.pop(worker)
        shard = self._started
        # Should it come again, it will hear what became of its last push.
        peer.decoder.commit() if shard.counted(worker) else peer.decoder.rollback()
        self._past[worker, peer.session] = (shard.sequence_of(worker), peer.decoder)
        for answer in shard.leave(worker):
            self._answer(answer)
        self._meet(self._meetings.leave(worker))

    def _keep_time(self) -> None:
        """Tell workers that they still wait, and end the run where a barrier waits for a silent worker."""
        shard, now = self.shard, self._now()
        if shard is None:
            for connection, _ in list(self._early.values()):
                self._tell_waiting(connection, now)
            return
        waiting = set(shard.waiting) | self._meetings.waiting
        for worker in waiting:
            peer = self._peers.get(worker)
            if peer is not None and now - peer.told > _TELL * self._options.timeout:
                self._send(peer, {"kind": "wait"})
        if not waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        self._report_silent(waiting, now)
        if late := self._late(waiting, now):
            self._end_waiting(late)

    def _late(self, waiting: set[int], now: float) -> list[int]:
        """Workers that others have waited for too long, while nothing came from them."""
        if self._waiting_since is None:
            return []
        shard, options, late = self._started, self._options, list[int]()
        for worker in range(options.rules.learners) if options.rules.barrier else [*self._peers]:
            peer = self._peers.get(worker)
            since = self._waiting_since if peer is None else max(self._waiting_since, peer.active)
            # Without a barrier worker 0 may be testing, which takes some time.
            testing = worker == 0 and not options.rules.barrier and not shard.waiting
            if worker not in waiting and now - since > options.timeout * (_PATIENCE if testing else 1):
                late.append(worker)
        return late

    def _report_silent(self, waiting: set[int], now: float) -> None:
        """Without a barrier: say of which worker nothing comes, and when something does again."""
        timeout = self._options.timeout
        if self._options.rules.barrier or self._options.number:  # one shard says it for all
            return
        for worker, peer in self._peers.items():
            if peer.missed is not None and peer.connection.active > peer.missed:
                seconds = peer.connection.active - peer.missed
                self._report(worker, f"worker {worker} goes on after {seconds:.0f} s of silence")
                peer.missed = None
            elif peer.missed is None and worker not in waiting and now - peer.active > timeout:
                if waiting and worker != 0:
                    continue  # it will be dropped
                peer.missed = peer.active
                then = "the others go on, and its next gradient still counts"
                if waiting:
                    then = f"others wait for it, at most {_PATIENCE * timeout:g} s where it is testing"
                self._report(worker, f"nothing has come from worker {worker} for {now - peer.active:.0f} s; {then}")

    def _report(self, worker: int, text: str) -> None:
        """Have worker 0 tell the user something about a worker, or tell it here where worker 0 hears nothing now."""
        if worker == 0 or 0 not in self._peers or 0 in self._meetings.waiting:
            _log.warning("%s", text)
        else:
            self._news.append(text)

    def _tell_waiting(self, connection: Connection, now: float) -> None:
        if now - connection.told > _TELL * self._options.timeout:
            connection.told = now
            self.send(connection, {"kind": "wait"})

    def _end_waiting(self, silent: list[int]) -> None:
        """Workers keep others waiting for longer than the time-out."""
        self._waiting_since = None
        text = f"worker{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        if self._options.rules.barrier:
            raise SyncError(
                f"{text} did not push a gradient within {self._options.timeout:g} s",
                "A synchronous update takes a gradient of every worker.",
                "Look at the first worker that failed, or raise --timeout.",
            )
        for worker in silent:
            self._report(
                worker,
                f"worker {worker} did not answer within {self._options.timeout:g} s, and others waited for it; they go "
                "on, and it joins again when it answers",
            )
            self.drop(self._peers[worker].connection)
            self._leave(worker)

    def _tell_all(self, error: HybridparError) -> None:
        """Tell all workers why it ends, as far as they still listen."""
        early = [connection for connection, _ in self._early.values()]
        for connection in [*(peer.connection for peer in self._peers.values()), *early]:
            self.send_last(connection, refusal(error))

    # ------------------------------------------------------------------ frames

    def most_bytes(self, connection: Connection, meta: dict[str, Any]) -> int:
        """Bytes that a frame may have at most; once the shard has weights, what a push of them can take."""
        kind, shard = meta["kind"], self.shard
        peer = None if connection.worker is None else self._peers.get(connection.worker)
        if kind in ("hello", "coders"):  # a codec keeps some tensors of a parameter's size at most
            return _FACT_BYTES + (usable_memory() if shard is None else _MOST_STATES * 4 * shard.stripe.count)
        if kind == "init":
            return usable_memory() if connection.worker == 0 else 0
        if kind == "push" and peer is not None and shard is not None:
            return peer.decoder.size(meta["warm"]) if meta["coded"] else 4 * shard.stripe.count
        if kind == "end":
            return 4 * self._buffers.size
        return _FACT_BYTES if kind == "gather" else 0

    def handle(self, connection: Connection, frame: Frame) -> None:
        """Act on a frame of a worker."""
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
        peer = self._peers.get(worker)
        if peer is None or peer.connection is not connection:
            raise Garbled(f"a {kind} of one that was not let in")
        if kind == "push":
            peer.push = frame
        elif kind == "end":
            self._end_push(worker, peer, frame)
        elif kind == "norm" and worker == 0:
            self._answer_all(self._started.finish(float(frame.meta["squares"])))
        elif kind == "gather":
            tag = str(frame.meta["tag"])
            self._meet(self._meetings.deposit(tag, worker, frame.payload, set(self._peers)))
        elif kind == "state":
            self._send_state(peer)
        elif kind == "coders":
            peer.decoder = PushDecoder(self._options.policy, self._started.stripe, frame.unpack())
        elif kind == "bye":
            self._farewell = True
            self._leave(worker)
            self.drop(connection)
        else:
            raise Garbled(f"a frame of kind {kind!r}")

    def _hello(self, connection: Connection, frame: Frame) -> None:
        """A worker has come, for the first time or again."""
        meta = frame.meta
        worker = int(meta["worker"])
        if not 0 <= worker < self._options.rules.learners:
            raise Garbled(f"worker {worker} of {self._options.rules.learners}")
        own = {key: meta[key] for key in ("fingerprint", "stripe", "policy", "buffers")}
        if self._expected is None:
            self._expected = own | {"worker": worker}
        difference = [key for key, value in own.items() if value != self._expected[key]]
        if difference:
            error = UsageError(
                f"worker {worker} and worker {self._expected['worker']} differ in "
                f"{'the model' if {'fingerprint', 'stripe', 'buffers'} & set(difference) else '--compress'}",
                "All workers train one model: names, shapes and dtypes of all parameters must be equal, and so must be "
                "the codecs of gradients.",
                "Start all workers with the same command and the same code.",
            )
            self.send(connection, refusal(error))
            self.drop(connection)
            return
        self._seen = True
        connection.worker = worker
        if self.shard is not None:
            self._welcome(connection, frame)
        else:
            self._early[worker] = connection, frame
            if worker == 0:
                self.send(connection, {"kind": "welcome", "initialised": False})

    def _welcome(self, connection: Connection, frame: Frame) -> None:
        shard, worker, session = self._started, connection.worker, str(frame.meta["session"])
        assert worker is not None
        if worker in self._peers:  # it comes again before its old connection was missed
            self.drop(self._peers[worker].connection)
            self._leave(worker)
        sequence, decoder = self._past.pop((worker, session), (0, None))
        if decoder is None:
            decoder = PushDecoder(self._options.policy, shard.stripe, frame.unpack())
            if not self._options.rules.barrier and shard.taken:
                self._news.append(f"worker {worker} has joined at step {shard.step}")
        else:
            self._news.append(f"worker {worker} has joined again at step {shard.step}")
        peer = Peer(connection, session, decoder, clock=shard.clock, told=self._now(), saved=self._save)
        peer.rows = frame.meta.get("rows")
        self._peers[worker] = peer
        shard.join(worker, sequence)
        meta = {
            "kind": "welcome",
            "initialised": True,
            "clock": shard.clock,
            "step": shard.step,
            "lowered": self._lowered,
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
        clipping = Clipping(**start["clipping"])
        kept: dict[str, Any] = {"limit": start["limit"], "clipping": clipping}
        self.shard = Shard(stripe, start["values"], options.rules, options.optimizer, **kept)
        self.shard.load_values(start["values"], start["optimizer"], start["counters"])
        if start["state"]:
            self.shard.load_progress(start["state"])
        self._buffers.values = start["buffers"]
        self._rest = bytes(pack(start["rest"]))
        self.shard.ledger.restart()
        early, self._early = self._early, {}
        for worker in sorted(early):
            self._welcome(*early[worker])

    def _end_push(self, worker: int, peer: Peer, frame: Frame) -> None:
        """All of a push is there."""
        shard, arrived = self._started, peer.push
        if arrived is None:
            raise Garbled("an end without a push")
        peer.push = None
        meta = {**arrived.meta, **frame.meta}
        self._stop |= bool(meta["stop"])
        if meta["save"] and not shard.done and not self._stop:  # else some have heard their last answer
            self._save += 1
            self._meetings.begin(save_occasion(self._save), set(self._peers))  # who joins from now on is not told of it
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
            factor=float(meta["factor"]),
        )
        if "lowered" in meta:
            self._lowered = float(meta["lowered"])
        gradient = torch.empty(0)
        if shard.expects(worker, push.sequence) and push.sound:
            gradient = self._gradient(peer, arrived)
            self._buffers.take(worker, frame.payload)
        self._answer_all(shard.push(push, gradient))
        if shard.squares is not None:  # worker 0 adds up those of all shards
            self._send(self._peers[0], {"kind": "squares", "squares": shard.squares})

    def _gradient(self, peer: Peer, push: Frame) -> Tensor:
        """What a push stands for: 1-D float32 of the stripe's size."""
        shard = self._started
        if push.meta["coded"]:
            if push.payload.numel() != (size := peer.decoder.size(push.meta["warm"])):
                raise Garbled(f"a push of {push.payload.numel()} bytes, where the codec makes {size}")
            gradient = torch.empty(shard.stripe.count)
            peer.decoder.decode(push.payload, gradient, push.meta["warm"])
            return gradient
        if push.payload.numel() != 4 * shard.stripe.count:
            raise Garbled(f"a gradient of {push.payload.numel()} bytes for a stripe of {shard.stripe.count}")
        return push.payload.view(torch.float32)

    def _answer_all(self, answers: list[Answer]) -> None:
        """Workers may go on, after an update or without one."""
        if answers:
            self._buffers.meet(any(answer.applied for answer in answers))
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
            "buffers": self._buffers.size,
            "step": shard.step,
            "done": shard.done,
            "stop": self._stop,
            "save": self._save if self._save > peer.saved else 0,
            "lowered": self._lowered,
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
        shard = self._started
        if self._options.rules.barrier and not self._options.half:
            return bytes_of(shard.values)  # which change when all workers have got them and pushed again
        if self._weights is None or self._weights[0] != shard.clock:
            self._weights = shard.clock, shard.values.half() if self._options.half else shard.values.clone()
        return bytes_of(self._weights[1])

    def _meet(self, done: dict[str, dict[int, Tensor]]) -> None:
        """All workers have left a message under a tag: send all of them to each."""
        for tag, messages in done.items():
            workers = sorted(messages)
            sizes = [messages[worker].numel() for worker in workers]
            for worker in workers:
                peer = self._peers.get(worker)
                if peer is not None:
                    meta = {"kind": "gathered", "tag": tag, "workers": workers, "sizes": sizes}
                    self._send(peer, meta, *(bytes_of(messages[one]) for one in workers))

    def _send_state(self, peer: Peer) -> None:
        """Everything that a checkpoint keeps of this shard."""
        shard = self._started
        state = shard.state_dict() | {"buffers": self._buffers.values.clone()}
        meta: dict[str, Any] = {"kind": "state"}
        if peer.rows is not None:
            meta["rows"] = shard.ledger.rows_after(peer.rows)
            peer.rows = shard.step
        self._send(peer, meta, pack(state))
