"""Registries: data sets, schedules, codecs and commands are chosen by name, and an unknown name is one kind of error.

Each entry has a description for listings, and a name can be taken only once. Models and data sets of a user's own are
named as `package.module:factory`. Names that a package loads from its modules when they are first used (PEP 562) are
here, too.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from hybridpar.errors import UsageError, nearest, shortened, user_error

T = TypeVar("T")


class Registry(Generic[T]):
    """Names mapped to things of one kind. Classes are given their name as `name`.

    The modules of `package`, if there is one, each enter something. They are imported when a name is looked up, the
    module of that name first, and the others only while the name is not known.
    """

    def __init__(self, kind: str, package: str | None = None) -> None:
        self.kind = kind
        self._package = package
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
        if name not in self:
            raise UsageError(f"unknown {self.kind} {shortened(repr(name))}", fix=nearest(name, self._entries))
        return self._entries[name][0]

    def describe(self) -> dict[str, str]:
        """Every name with its description, in alphabetical order."""
        return {name: self._entries[name][1] for name in self}

    def __contains__(self, name: object) -> bool:
        self._load(name)
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load(None)
        return iter(sorted(self._entries))

    def _load(self, name: object) -> None:
        """Import modules until there is an entry of that name; all of them for None."""
        if self._package is None or name in self._entries:
            return
        folder = importlib.import_module(self._package).__path__
        modules = [module.name for module in pkgutil.iter_modules(folder)]
        for module in sorted(modules, key=lambda module: module != name):
            importlib.import_module(f"{self._package}.{module}")
            if name in self._entries:
                return


def find_factory(name: str, kind: str) -> Callable[..., object]:
    """What `package.module:factory` names, of a user's own; the current directory is searched, too."""
    module_name, _, factory_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if not all(part.isidentifier() for part in module_name.split(".")):
            raise ModuleNotFoundError(f"{module_name!r} is no absolute module name", name=module_name)
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that reads its command line when it is imported exits
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise user_error(f"importing {module_name!r} for the {kind} {name!r} failed", error) from error
        raise UsageError(
            f"cannot import {module_name!r} for the {kind} {name!r}: {error}",
            "The part before the colon is a module that Python finds in the current directory or the environment.",
            "Check the spelling, or run from the directory that holds it.",
        ) from error
    factory: Callable[..., object] | None = getattr(module, factory_name, None)
    if factory is None or not callable(factory):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        fix = nearest(factory_name, callables) if callables else "The module defines nothing that can be called."
        raise UsageError(f"module {module_name!r} has no factory {factory_name!r}", fix=fix)
    return factory


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from the names that each of its modules defines.

    A module of another package has its full name.

    For type checkers the package imports the same names under `if TYPE_CHECKING:`.
    """
    module_of = {
        name: module if module.startswith("hybridpar.") else f"{package}.{module}"
        for module, names in modules.items()
        for name in names.split()
    }
    names = sorted(module_of)

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return load, lambda: names, names
