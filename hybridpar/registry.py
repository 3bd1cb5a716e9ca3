"""Registries: data sets, schedules, codecs and commands are chosen by name, and an unknown name is one kind of error.

Each entry has a description for listings, and a name can be taken only once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from hybridpar.errors import UsageError, nearest, shortened

T = TypeVar("T")


class Registry(Generic[T]):
    """Names mapped to things of one kind. Classes are given their name as `name`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, tuple[T, str]] = {}

    def register(self, name: str, description: str) -> Callable[[T], T]:
        """Decorator that enters its argument under a name."""

        def enter(entry: T) -> T:
            if name in self._entries:
                first = self._entries[name][1]
                raise ValueError(f"{self.kind} {name!r} is registered twice: as {first!r} and as {description!r}")
            self._entries[name] = (entry, description)
            if isinstance(entry, type):
                entry.name = name  # type: ignore[attr-defined]
            return entry

        return enter

    def get(self, name: str) -> T:
        """The entry of a name."""
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


def names_in_source(folder: Path, decorator: str) -> set[str]:
    """Names that decorators register in the modules of a folder, read from the source: nothing is imported."""
    found: set[str] = set()
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if f"@{decorator}(" not in text:
            continue
        for function in ast.parse(text).body:  # they decorate what a module holds itself
            for call in getattr(function, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                    found.add(str(ast.literal_eval(call.args[0])) if call.args else function.name)  # type: ignore[attr-defined]
    return found
