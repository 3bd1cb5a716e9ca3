"""Reads the package's own imports, for the tests of its layout and the figures in docs/internals.md."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hybridpar"

#: Which folders and top-level modules a folder or module of hybridpar may import, lowest first. What is not listed is
#: forbidden, also inside functions and under TYPE_CHECKING.
_BELOW = {
    "errors": "",
    "formats": "errors",
    "machine": "errors formats",
    "codegen": "errors formats",
    "registry": "errors",
    "tvm_kernels": "codegen errors formats machine registry",
    "spec": "errors",
    "models": "errors formats registry spec",
    "schedule": "errors formats registry",
    "lanes": "errors",
    "comm": "errors formats machine models schedule",
    "compress": "codegen comm errors formats machine registry spec",
    "sync": "codegen comm compress errors lanes machine models",
    "plan": "errors formats schedule",
    "pipeline": "comm compress errors lanes models schedule sync",
    "partition": "errors formats machine models plan registry schedule",
    "config": "errors formats schedule spec",
    "optim": "compress config errors models spec",
    "planner": (
        "comm compress config errors formats lanes machine models optim partition pipeline plan schedule sync "
        "tvm_kernels"
    ),
    "data": "config errors formats lanes models registry spec",
    "train": (
        "comm compress config data errors formats lanes models optim partition pipeline plan planner spec "
        "sync tvm_kernels"
    ),
    "server": "comm compress config errors formats lanes machine models optim pipeline registry sync train",
    "observe": "errors formats registry schedule",
    "run": (
        "comm compress config data errors formats machine models observe optim pipeline plan planner schedule "
        "server spec sync train tvm_kernels"
    ),
    "integrations": "comm compress config errors models planner sync train",
    "__init__": "config errors integrations optim partition plan registry train",
    "commands": (
        "__init__ codegen comm compress config data errors formats lanes machine models observe optim "
        "partition plan planner registry run schedule server spec train tvm_kernels"
    ),
    "cli": "__init__ commands errors formats machine",
    "__main__": "cli machine",
}
LAYERS: dict[str, set[str]] = {layer: set(below.split()) for layer, below in _BELOW.items()}


def python_files(*folders: str) -> list[Path]:
    """All Python files below some folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    """A path as seen from the root of the repository."""
    return str(path.relative_to(ROOT))


def layer_of(module: str) -> str:
    """The folder, or top-level module, of a module given by its dotted name below hybridpar."""
    return module.partition(".")[0]


def dotted(path: Path) -> str:
    """hybridpar/pipeline/executor.py -> pipeline.executor; a package's `__init__` has the name of the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    """Whether a dotted name below hybridpar is a module or a package."""
    place = PACKAGE / name.replace(".", "/")
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of all modules that a file imports, wherever the import stands."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} imports relatively; the project does not"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                # `from hybridpar.data import sampling` imports a module, `... import Batch` a name.
                inside = full.startswith("hybridpar.") and is_module(full.removeprefix("hybridpar."))
                yield full if inside else str(node.module)


def own_imports(path: Path) -> set[str]:
    """Dotted names below hybridpar of the modules that a file imports."""
    names = [name.partition(".") for name in imports(path)]
    return {rest or "__init__" for first, _, rest in names if first == "hybridpar"} - {dotted(path)}


def modules() -> dict[str, set[str]]:
    """The modules that every module of the package imports."""
    return {dotted(path): own_imports(path) for path in python_files("hybridpar")}


def layers() -> dict[str, set[str]]:
    """The layers that every layer of the package imports."""
    found: dict[str, set[str]] = {}
    for module, imported in modules().items():
        found.setdefault(layer_of(module), set()).update(map(layer_of, imported))
    return {layer: imported - {layer} for layer, imported in found.items()}


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """The floor of every layer: 1 where it imports no other, else one more than the highest that it imports."""
    known: dict[str, int] = {}

    def floor(layer: str) -> int:
        if layer not in known:
            known[layer] = 1 + max((floor(below) for below in graph[layer]), default=0)
        return known[layer]

    return {layer: floor(layer) for layer in graph}


def code_lines(path: Path) -> int:
    """Lines of a file that hold code: without blank lines, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)
