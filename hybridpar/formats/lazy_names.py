"""Names that a package loads from its modules when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from the names that each of its modules defines.

    For type checkers the package imports the same names under `if TYPE_CHECKING:`.
    """
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names.split()}
    names = sorted(module_of)

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return load, lambda: names, names
