"""Finds out whether queues of actions deadlock.

Queues run in order, and an action waits for what it needs and, if it stands in several queues, until it is the next in
all of them. Nothing that one action does can stop another that could go on. So every run gets equally far, and one run
is a proof.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from hybridpar.schedule.actions import COMPUTE, Action, Kind

K = TypeVar("K", bound=Hashable)


class QueueRun(Generic[K]):
    """Runs queues in unit time until none can go on: a whole backward pass takes 2 slots, other computation 1.

    Args:
        queues: For every queue its actions, in order. A transfer stands in two: its sender's and its receiver's.
        needs: For every action what must end before it starts.

    Attributes:
        starts: For every queue when its actions started; as many as did.
        ends: For every action that ran when it ended.
    """

    def __init__(self, queues: Mapping[K, Sequence[Action]], needs: Mapping[Action, Sequence[Action]]) -> None:
        self._queues, self._needs = queues, needs
        self._standing: dict[Action, list[K]] = {}
        for key, queue in queues.items():
            for action in queue:
                self._standing.setdefault(action, []).append(key)
        self.starts: dict[K, list[int]] = {key: [] for key in queues}
        self.ends: dict[Action, int] = {}
        self._clock = dict.fromkeys(queues, 0)
        going = True
        while going:
            going = False
            for key in queues:
                while self._advance(key):
                    going = True

    @property
    def slots(self) -> int:
        """When the last action ended."""
        return max(self.ends.values(), default=0)

    @property
    def stuck(self) -> list[Action]:
        """For every queue that did not come to its end the action at which it stopped."""
        return [action for key in self._queues if (action := self._head(key)) is not None]

    def why_stuck(self) -> tuple[Action, str]:
        """The circle of actions that wait for each other, or the row that ends at something that never comes.

        Returns:
            One of the actions that waits, and the reasons in words.
        """
        action = self.stuck[0]
        seen: list[Action] = []
        reasons: list[str] = []
        while action not in seen:
            seen.append(action)
            reason, following = self._reason(action)
            reasons.append(reason)
            if following is None:
                return action, reason
            action = following
        first = seen.index(action)  # what leads into the circle is not its cause
        return action, " ".join(reasons[first:])

    def _head(self, key: K) -> Action | None:
        place = len(self.starts[key])
        return self._queues[key][place] if place < len(self._queues[key]) else None

    def _advance(self, key: K) -> bool:
        action = self._head(key)
        if action is None or any(need not in self.ends for need in self._needs.get(action, ())):
            return False
        keys = set(self._standing[action])
        if any(self._head(other) != action for other in keys):
            return False
        start = max([self._clock[one] for one in keys] + [self.ends[need] for need in self._needs.get(action, ())])
        self.ends[action] = start + slots_of(action)
        for one in keys:
            self.starts[one].append(start)
            self._clock[one] = self.ends[action]
        return True

    def _reason(self, action: Action) -> tuple[str, Action | None]:
        """What an action waits for first, in words, and the action that this comes down to."""
        for key in self._standing[action]:
            head = self._head(key)
            if head is not None and head != action:
                return f"{action} comes after {head} on {key}.", head
        need = next(need for need in self._needs[action] if need not in self.ends)
        if need not in self._standing:
            return f"{action} needs {need}, which nobody does.", None
        return f"{action} needs {need}.", need


def slots_of(action: Action) -> int:
    """How long an action takes in unit time.

    Args:
        action: The action.
    """
    if action.kind is Kind.BACKWARD:
        return 2
    return 1 if action.kind in COMPUTE else 0
