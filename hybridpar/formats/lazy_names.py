"""Names that a package loads from its modules when they are first used (PEP 562), each written once."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str, source: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The names that a package imports under `if TYPE_CHECKING:`, as attributes that are loaded on first use."""
    blocks = [block for block in ast.parse(Path(source).read_bytes()).body if isinstance(block, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    home = {alias.name: str(node.module) for node in imports for alias in node.names}
    names = sorted(home)

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return load, lambda: names, names
