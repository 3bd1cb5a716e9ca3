"""Collects one message of every worker, for facts that workers exchange over a server."""

from __future__ import annotations

from torch import Tensor


class Meetings:
    """Collects one message of each worker under a name, and says when all are there.

    A name is `occasion/number`. Who takes part in an occasion is settled by the first message of it; who dies is not
    waited for.
    """

    def __init__(self) -> None:
        self._parties: dict[str, set[int]] = {}
        self._messages: dict[str, dict[int, Tensor]] = {}

    @property
    def waiting(self) -> set[int]:
        """Workers that have left a message and not been answered."""
        return {worker for messages in self._messages.values() for worker in messages}

    def deposit(self, tag: str, worker: int, message: Tensor, present: set[int]) -> dict[str, dict[int, Tensor]]:
        """Take in a message.

        Args:
            tag: Its name.
            worker: Whose.
            message: What it says.
            present: Who is there now.

        Returns:
            By name, the messages by worker of each meeting that is complete now.
        """
        occasion = tag.partition("/")[0]
        party = self._parties.setdefault(occasion, set(present))
        if worker not in party:
            return {tag: {worker: message}}  # it came late, and there is no other message for it
        self._messages.setdefault(tag, {})[worker] = message
        return self._complete()

    def leave(self, worker: int) -> dict[str, dict[int, Tensor]]:
        """A worker is not waited for any more.

        Args:
            worker: Its number.

        Returns:
            As `deposit`.
        """
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
