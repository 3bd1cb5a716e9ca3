"""Collects one message of every worker, for facts that workers exchange over a server."""

from __future__ import annotations

from torch import Tensor


def save_occasion(number: int) -> str:
    """Name of the occasion on which workers write a checkpoint that one of them asked for."""
    return f"save-{number}"


class Meetings:
    """Collects one message of each worker under a name, and says when all are there.

    A name is `occasion/number`. Who takes part in an occasion is settled by `begin`, or else by the first message of
    it. A worker that has left is not waited for, nor is one that is at a later occasion: all workers come to occasions
    in the same order.
    """

    def __init__(self) -> None:
        self._parties: dict[str, set[int]] = {}
        self._messages: dict[str, dict[int, Tensor]] = {}

    @property
    def waiting(self) -> set[int]:
        """Workers that have left a message and not been answered."""
        return {worker for messages in self._messages.values() for worker in messages}

    def begin(self, occasion: str, present: set[int]) -> None:
        """Say who takes part in an occasion that workers are told of; who joins later does not."""
        self._parties[occasion] = set(present)

    def deposit(self, tag: str, worker: int, message: Tensor, present: set[int]) -> dict[str, dict[int, Tensor]]:
        """Take in a message."""
        occasion = tag.partition("/")[0]
        party = self._parties.setdefault(occasion, set(present))
        for earlier, others in self._parties.items():
            if earlier == occasion:
                break
            others.discard(worker)
        if worker not in party:
            return self._complete() | {tag: {worker: message}}  # it came late, and there is no other message for it
        self._messages.setdefault(tag, {})[worker] = message
        return self._complete()

    def leave(self, worker: int) -> dict[str, dict[int, Tensor]]:
        """A worker is not waited for any more."""
        for party in self._parties.values():
            party.discard(worker)
        for messages in self._messages.values():
            messages.pop(worker, None)
        return self._complete()

    def _complete(self) -> dict[str, dict[int, Tensor]]:
        done = {
            tag: messages
            for tag, messages in self._messages.items()
            if messages and set(messages) >= self._parties[tag.partition("/")[0]]
        }
        self._messages = {tag: messages for tag, messages in self._messages.items() if messages and tag not in done}
        return done
