"""Why: data sets, schedules and codecs are all chosen by name; one registry gives them the same rules.

Each entry has a description for listings, a name can be taken only once, and asking for an unknown name is an error
that lists the near ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hybridpar.errors import UsageError, nearest, shortened

T = TypeVar("T")


class Registry(Generic[T]):
    """Names mapped to things of one kind.

    Args:
        kind: What the entries are called in messages, in the singular ("data set").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, tuple[T, str]] = {}

    def register(self, name: str, description: str) -> Callable[[T], T]:
        """Decorator that enters its argument under a name.

        Args:
            name: The name users type.
            description: One line for listings.

        Raises:
            ValueError: The name is taken (a programming error, so not a `UsageError`).
        """

        def enter(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = (entry, description)
            return entry

        return enter

    def get(self, name: str) -> T:
        """The entry of that name.

        Raises:
            UsageError: No such entry; the message names the nearest ones.
        """
        if name not in self._entries:
            raise UsageError(f"unknown {self.kind} {shortened(repr(name))}", fix=nearest(name, self._entries))
        return self._entries[name][0]

    def describe(self) -> dict[str, str]:
        """Every name with its description, in alphabetical order."""
        return {name: self._entries[name][1] for name in sorted(self._entries)}

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
