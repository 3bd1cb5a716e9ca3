"""A worker's connections to all shards, which are used at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from threading import Barrier, BrokenBarrierError
from typing import Any

from torch import Tensor

from hybridpar.errors import UsageError
from hybridpar.server.shard_link import PushFlight, ShardLink
from hybridpar.server.stripes import Stripe
from hybridpar.server.wire import unpack


class Links:
    """A worker's ways to all shards."""

    def __init__(self, links: Sequence[ShardLink]) -> None:
        self.links = tuple(links)
        self._flights: list[PushFlight] = []
        self._futures: list[Future[dict[str, Any]]] = []
        self._squares = [0.0] * len(self.links)
        self._all_squares = Barrier(len(self.links))
        for number, link in enumerate(self.links):
            link.add_up = partial(self._add_up, number)
        #: Squared norm of the last gradient of all workers, where the shards had it added up.
        self.squares: float | None = None

    def hello(self, buffers: int, rows: int | None) -> list[dict[str, Any]]:
        """Come to all shards; see `ShardLink.hello`. Weights and statistics are then those of the shards."""
        first, *others = self.links
        futures = [first.submit(first.hello, buffers, rows)]
        futures += [link.submit(link.hello, 0, None) for link in others]
        return _results(futures)

    def initialise(self, starts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Bring the weights to all shards that have none."""
        pairs = zip(self.links, starts, strict=True)
        return _results([link.submit(link.initialise, one) for link, one in pairs if not link.has_weights])

    def begin_push(self, rate: float) -> None:
        """A backward pass is about to make a gradient."""
        self.squares = None
        for link in self.links:
            if link.encoder is not None:
                link.encoder.rescale(rate)
        self._flights = [
            PushFlight({"rate": rate}, link.encoder.sizes if link.encoder is not None else _plain_sizes(link.stripe))
            for link in self.links
        ]
        self._futures = [
            link.submit(self._push, link, flight) for link, flight in zip(self.links, self._flights, strict=True)
        ]

    def _push(self, link: ShardLink, flight: PushFlight) -> dict[str, Any]:
        try:
            return link.push(flight)
        except BaseException:
            self._all_squares.abort()  # others may wait there for this shard
            raise

    def _add_up(self, number: int, squares: float) -> float:
        """On the thread of a shard: the squared norm of the whole gradient, once all shards have said theirs."""
        self._squares[number] = squares
        self._all_squares.wait()
        self.squares = sum(self._squares)
        return self.squares

    def ready(self, shard: int, piece: int, gradient: Tensor) -> None:
        """A piece of the gradient is there."""
        flight = self._flights[shard]
        flight.messages[piece] = gradient
        flight.ready.put(piece)

    def finish_push(
        self, end: dict[str, Any], unused: Sequence[Sequence[int]], statistics: Tensor
    ) -> list[dict[str, Any]]:
        """The gradient is complete; wait for the answers of all shards."""
        for flight, missing in zip(self._flights, unused, strict=True):
            flight.end = end | {"unused": list(missing)}
            if flight is self._flights[0]:
                flight.statistics = statistics
            flight.finish()
        return _results(self._futures)

    def states(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Of each shard what it says, and its state as `Shard.state_dict` has it, with statistics."""
        answers = _results([link.submit(link.ask, {"kind": "state"}) for link in self.links])
        return [(meta, unpack(payload)) for meta, payload in answers]

    def coder_states(self) -> list[dict[str, Any]]:
        """What the codecs keep, by shard."""
        return [link.encoder.state_dict() if link.encoder is not None else {} for link in self.links]

    def load_coders(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore what `coder_states` returned, as far as it is of the same pieces."""
        known = {name: state for own in states for name, state in own.items()}
        for link in self.links:
            if link.encoder is not None:
                link.encoder.load_state_dict(known)
        _results([link.submit(link.send_coders) for link in self.links])

    def close(self, *, graceful: bool = True) -> None:
        """Leave all shards."""
        for flight in self._flights:
            flight.finish()
        self._all_squares.abort()
        for link in self.links:
            link.close(graceful=graceful)


def _plain_sizes(stripe: Stripe) -> list[int]:
    return [4 * piece.count for piece in stripe.pieces]


def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """All results, or what went wrong: of several problems the one that is not only a consequence of another."""
    done, problems = [], list[BaseException]()
    for future in futures:
        try:
            done.append(future.result())
        except Exception as error:
            problems.append(error)
    if problems:
        causes = [error for error in problems if not isinstance(error, BrokenBarrierError)] or problems
        raise next((error for error in causes if isinstance(error, UsageError)), causes[0])
    return done
