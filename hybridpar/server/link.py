"""A worker's connections to all servers, which it asks at the same time, each on a thread.

Without a barrier, a worker whose connection breaks connects again and repeats its push under the same number, and the
shard knows whether it has seen it. So a push is applied exactly once.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.handshake import HandshakeError
from hybridpar.compress import Policy
from hybridpar.errors import SyncError, UsageError
from hybridpar.server import wire
from hybridpar.server.encoding import PushEncoder
from hybridpar.server.stripes import Stripe, piece_views


@dataclass(frozen=True)
class LinkOptions:
    """What a worker must know to come to the servers.

    Attributes:
        worker: Its number.
        fingerprint: Of the model.
        policy: Codecs of pushes.
        token: What lets it in.
        timeout: Seconds after which a silent server is an error.
        returns: Whether to come again where a connection breaks.
    """

    worker: int
    fingerprint: str
    policy: Policy
    token: str = field(repr=False)
    timeout: float
    returns: bool = False


class ServerLink:
    """A worker's way to a server."""

    def __init__(
        self, name: str, address: str, stripe: Stripe, tensors: Mapping[str, Tensor], options: LinkOptions
    ) -> None:
        self._name, self._address, self.stripe, self._options = name, address, stripe, options
        self.encoder = PushEncoder(options.policy, stripe)
        self._views = piece_views(stripe, tensors)
        self._connection: wire.Connection | None = None
        self._hello: wire.Hello
        self._before = 0, 0  # bytes of connections that broke
        self._closed = False
        self.clock = self.sequence = 0
        #: Running statistics as they came last.
        self.statistics = torch.empty(0)

    def hello(self, buffers: int, rows: int | None) -> Any:
        """Come to the server, and wait until it has weights, unless this is worker 0, which brings them."""
        options = self._options
        self._hello = wire.Hello(
            worker=options.worker,
            pushes=0,
            fingerprint=options.fingerprint,
            stripe=self.stripe.fingerprint,
            policy=str(options.policy),
            buffers=buffers,
            rows=rows,
        )
        with self._named():
            return self._come()

    def push(self, push: wire.Gradient, gradients: Sequence[Tensor]) -> Any:
        """Push a gradient, and wait for the weights, or for what is to be added up before."""
        self.sequence += 1
        self.encoder.rescale(push.rate)
        pieces, states = self.encoder.encode(gradients)
        message = replace(push, sequence=self.sequence, clock=self.clock, pieces=pieces, states=states)
        with self._named():
            try:
                return self._ask(message)
            except (OSError, wire.Garbled):
                if self._closed or not self._options.returns:
                    raise
                self._come()
                return self._ask(message)  # computed on the weights of before, as its clock says

    def ask(self, message: wire.ServerMessage) -> Any:
        """What the server answers."""
        with self._named():
            return self._ask(message)

    def close(self, *, graceful: bool = True) -> None:
        """Leave."""
        self._closed = True
        if self._connection is not None:
            with contextlib.suppress(OSError):
                if graceful:
                    self._connection.send(wire.Bye())
            self._connection.end()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received."""
        now = (0, 0) if self._connection is None else (self._connection.sent, self._connection.received)
        return self._before[0] + now[0], self._before[1] + now[1]

    def _come(self) -> Any:
        self._before = self.traffic
        if self._connection is not None:
            self._connection.end()
        host, _, port = self._address.rpartition(":")
        timeout = self._options.timeout
        self._connection = wire.Connection(socket.create_connection((host, int(port)), timeout), timeout, timeout)
        self._connection.knock(self._options.token, self._address)
        return self._ask(replace(self._hello, pushes=self.sequence))

    def _ask(self, message: wire.ServerMessage) -> Any:
        assert self._connection is not None
        with contextlib.suppress(ConnectionError):  # a server that has ended has said why
            self._connection.send(message)
        while isinstance(answer := self._connection.receive(1 << 62), wire.Wait):
            pass
        if isinstance(answer, wire.Refused):
            raise answer.error
        if getattr(answer, "rows", None):  # should it come again, it knows these
            self._hello = replace(self._hello, rows=answer.rows[-1].step)
        if isinstance(answer, wire.Welcome | wire.Weights):
            self._take(answer)
        return answer

    @torch.no_grad()
    def _take(self, answer: wire.Welcome | wire.Weights) -> None:
        """Take over weights, and what the answer says of this worker's pushes."""
        self.clock, self.statistics = answer.clock, answer.statistics
        if answer.values is not None:
            for view, (first, last) in zip(self._views, self.stripe.ranges, strict=True):
                view.copy_(answer.values[first:last])
        if isinstance(answer, wire.Weights) and answer.applied:
            self.encoder.commit()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the connection as what they mean to the user."""
        try:
            yield
        except (OSError, wire.Garbled, HandshakeError) as error:
            raise self._gone(error) from error

    def _gone(self, error: BaseException) -> SyncError:
        silent = isinstance(error, TimeoutError)
        reason = f"did not answer within {self._options.timeout:g} s" if silent else f"is gone ({error})"
        return SyncError(
            f"shard {self._name} at {self._address} {reason}, and worker {self._options.worker} needs it",
            "Each shard holds a stripe of the parameters that exists nowhere else.",
            "A launched job restarts from its last checkpoint; else start it again with --resume.",
        )


class Links:
    """A worker's ways to all servers. `tensors` are the parameters by name, into which weights come."""

    def __init__(
        self, addresses: Sequence[str], stripes: Sequence[Stripe], tensors: Mapping[str, Tensor], options: LinkOptions
    ) -> None:
        pairs = enumerate(zip(addresses, stripes, strict=True))
        names = f"{{}} of {len(addresses)}"
        self.links = [ServerLink(names.format(n), *pair, tensors, options) for n, pair in pairs]
        self._threads = ThreadPoolExecutor(len(self.links), thread_name_prefix="server")
        #: Squared norm of the last gradient of all workers, where it was added up.
        self.squares: float | None = None

    def hello(self, buffers: int, rows: int | None) -> list[wire.Welcome]:
        """Come to all servers; see `ServerLink.hello`. Weights and statistics are then those of the shards."""
        return self._all(lambda number: self.links[number].hello(*((0, None) if number else (buffers, rows))))

    def start(self, starts: Sequence[wire.Start], welcome: Sequence[wire.Welcome]) -> list[wire.Welcome]:
        """Bring the weights to all servers that have none."""

        def start(number: int) -> wire.Welcome:
            known = welcome[number]
            return self.links[number].ask(starts[number]) if known.values is None else known

        return self._all(start)

    def push(self, pushes: Sequence[wire.Gradient], gradients: Sequence[Sequence[Tensor]]) -> list[wire.Weights]:
        """Push a gradient, for each server its part, and wait for the weights of all."""
        self.squares = None
        answers = self._all(lambda number: self.links[number].push(pushes[number], gradients[number]))
        if any(isinstance(answer, wire.Squares) for answer in answers):
            self.squares = squares = sum(answer.squares for answer in answers)
            answers = self._all(lambda number: self.links[number].ask(wire.Squares(squares=squares)))
        return answers

    def states(self) -> list[wire.ShardState]:
        """All that a checkpoint keeps of each shard."""
        return self._all(lambda number: self.links[number].ask(wire.AskState()))

    def gather(self, tag: str, item: object) -> dict[int, Any]:
        """Tell all workers something, and hear what they say under the same tag, over shard 0."""
        gathered: wire.GatheredItems = self.links[0].ask(wire.GatherItem(tag=tag, item=item))
        return gathered.items

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received."""
        sent, received = zip(*(link.traffic for link in self.links), strict=True)
        return sum(sent), sum(received)

    def coder_states(self) -> list[dict[str, Any]]:
        """What the codecs keep, by shard."""
        return [link.encoder.state_dict() for link in self.links]

    def load_coders(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore what `coder_states` returned, as far as it is of the same pieces."""
        known = {name: state for of_shard in states for name, state in of_shard.items()}
        for link in self.links:
            link.encoder.load_state_dict(known)

    def close(self, *, graceful: bool = True) -> None:
        """Leave all servers."""
        for link in self.links:
            link.close(graceful=graceful)
        self._threads.shutdown()

    def _all(self, call: Callable[[int], Any]) -> list[Any]:
        """The results of a call for each server, by its number."""
        return _results([self._threads.submit(call, number) for number in range(len(self.links))])


def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """All results, or what went wrong: of several problems what the user is to change."""
    problems = [error for future in futures if (error := future.exception()) is not None]
    if problems:
        raise next((error for error in problems if isinstance(error, UsageError)), problems[0])
    return [future.result() for future in futures]
