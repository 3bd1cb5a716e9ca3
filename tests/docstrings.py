"""Finds what the docstrings of public names do not say, and sections in the docstrings of others.

    python -m tests.docstrings [FOLDER...]    print file:line: name: what is wrong

Public is what a user imports from a package or reads in the docs: functions and classes that an `__init__` with an
`__all__` exports, that a Python block of a document imports, or that a document names in backticks; and the public
methods of such classes.

- A public function has an `Args:` section that names each parameter, a public class one of what its `__init__` takes. A
  method that overrides another may leave it all to the docstring of the base class.
- Everything else has none of these sections: a sentence at most, where it says more than the name and the signature.
  Only `Attributes:` of a dataclass, named tuple or pydantic model is free.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.structure import PACKAGE, ROOT, python_files, relative

#: Sections that only docstrings of public names have.
SECTIONS = ("Args", "Arguments", "Returns", "Yields", "Raises", "Attributes")
#: Base classes whose fields are parameters.
_FIELDS = frozenset({"BaseModel", "NamedTuple", "TypedDict"})

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Missing:
    """What is wrong with one docstring.

    Attributes:
        path: the file.
        line: the line of the `def` or `class`, from 1.
        name: `function`, `Class` or `Class.method`.
        what: what is missing, or too much, in words.
    """

    path: Path
    line: int
    name: str
    what: str

    def __str__(self) -> str:
        return f"{relative(self.path)}:{self.line}: {self.name}: {self.what}"


@dataclass
class _Classes:
    """The classes of the package by name: their bases' names, and the methods that have a docstring."""

    bases: dict[str, set[str]] = field(default_factory=dict)
    documented: dict[str, set[str]] = field(default_factory=dict)

    def inherits(self, name: str, method: str) -> bool:
        """Whether a base of a class documents a method, or is of another library."""
        for base in self.bases.get(name, ()):
            if base not in self.bases:
                return base not in {"object", "Generic", "Protocol", "ABC", "Enum"}
            if method in self.documented[base] or self.inherits(base, method):
                return True
        return False


@cache
def _classes() -> _Classes:
    found = _Classes()
    for path in python_files("hybridpar"):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ClassDef):
                methods = {item.name for item in node.body if isinstance(item, _Function) and ast.get_docstring(item)}
                found.bases.setdefault(node.name, set()).update(map(_name, node.bases))
                found.documented.setdefault(node.name, set()).update(methods)
    return found


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _name(node: ast.expr) -> str:
    """The last name of `a.b.c[d](e)`: c."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _section(text: str, *titles: str) -> str:
    """The indented lines below a title of a Google style docstring."""
    found = re.search(rf"^(?:{'|'.join(titles)}):\n((?:[ \t]+.*\n|\n)*)", text + "\n", flags=re.MULTILINE)
    return found[1] if found else ""


def _named(section: str) -> set[str]:
    """Names that a section describes, as in `a, b: two numbers` or `` `c` (int): another``."""
    heads = re.findall(r"^[ \t]+([*`\w][\w*`, /]*?)(?: \([^)]*\))?:", section, flags=re.MULTILINE)
    return {name for head in heads for name in re.findall(r"\w+", head)}


def _parameters(function: _Function) -> list[str]:
    """Names of the public parameters, without self and cls."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    if plain and plain[0].arg in ("self", "cls"):
        del plain[0]
    named = [item.arg for item in (*plain, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg) if item]
    return [name for name in named if not name.startswith("_")]


def _missing_of_function(function: _Function, text: str) -> Iterator[str]:
    described = _named(_section(text, "Args", "Arguments"))
    lacking = [name for name in _parameters(function) if name not in described]
    if lacking:
        yield f"Args: {', '.join(lacking)}"


def _missing_of_class(node: ast.ClassDef, text: str) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, _Function) and item.name == "__init__":
            described = _named(_section(text + "\n\n" + (ast.get_docstring(item) or ""), "Args", "Arguments"))
            described |= _named(_section(ast.get_docstring(item) or "", "Args", "Arguments"))
            lacking = [name for name in _parameters(item) if name not in described]
            if lacking and not (not text and _classes().inherits(node.name, "__init__")):
                yield f"Args: {', '.join(lacking)}"


def _exports(package: Path) -> Iterator[tuple[str, str]]:
    """Module and name of all that an `__init__` with an `__all__` hands on, lazily (`import X as X`) or at once."""
    tree = _parsed(package)
    nodes = list(ast.walk(tree))
    if not any(isinstance(node, ast.Name) and node.id == "__all__" for node in nodes):
        return
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names if alias.asname or alias.name in texts)
    yield from ((_module(package), str(text)) for text in texts)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _defined(module: str, name: str) -> tuple[Path, str] | None:
    """The file that defines a name which can be imported from a module of hybridpar."""
    place = ROOT / module.replace(".", "/")
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not module.startswith("hybridpar") or not path.exists():
        return None
    for node in ast.walk(_parsed(path)):
        if isinstance(node, (*_Function.__args__, ast.ClassDef)) and node.name == name:
            return path, name
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return _defined(str(node.module), name)
    return None


@cache
def public_names() -> frozenset[tuple[Path, str]]:
    """File and name of every function and class that a user imports from a package or reads of in a document."""
    wanted = {pair for package in PACKAGE.rglob("__init__.py") for pair in _exports(package)}
    named: set[str] = set()
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = document.read_text(encoding="utf-8")
        for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom):
                    wanted |= {(str(node.module), alias.name) for alias in node.names}
        # Plain words are options and values more often than names.
        named |= {
            name
            for name in re.findall(r"`(?:\w+\.)*(\w+)(?:\([^`]*\))?`", text)
            if re.search(r"[a-z]_[a-z]|[A-Z]", name)
        }
    found = {_defined(module, name) for module, name in wanted}
    for path in python_files("hybridpar"):
        body = _parsed(path).body
        found |= {
            (path, item.name)
            for item in body
            if isinstance(item, (*_Function.__args__, ast.ClassDef)) and item.name in named
        }
    return frozenset(pair for pair in found if pair is not None)


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass, named tuple, typed dictionary or pydantic model."""
    return "dataclass" in map(_name, node.decorator_list) or bool(_FIELDS & set(map(_name, node.bases)))


def _superfluous(item: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, text: str) -> Iterator[str]:
    for title in SECTIONS:
        free = title == "Attributes" and isinstance(item, ast.ClassDef) and is_record(item)
        if not free and re.search(rf"^{title}:\n[ \t]", text, flags=re.MULTILINE):
            yield f"{title}, which is not public"


def _wrong(node: ast.AST, prefix: str, path: Path, public: bool | None) -> Iterator[Missing]:
    """What is wrong in a module, class or function; `public` is None in a module, where each name says it."""
    for item in ast.iter_child_nodes(node):
        if not isinstance(item, (*_Function.__args__, ast.ClassDef)):
            yield from _wrong(item, prefix, path, public)  # under an `if`, or in a `with`
            continue
        name, text = prefix + item.name, ast.get_docstring(item) or ""
        seen = (path, item.name) in public_names() if public is None else public
        seen &= not item.name.startswith("_") or item.name == "__init__"
        inherited = isinstance(node, ast.ClassDef) and _classes().inherits(node.name, item.name)
        wrong: list[str] = []
        if not seen:
            wrong.extend(_superfluous(item, text))
        elif isinstance(item, ast.ClassDef):
            wrong.extend(_missing_of_class(item, text) if text else ["docstring"])
        elif text and not inherited and item.name != "__init__":
            wrong.extend(_missing_of_function(item, text))
        elif not text and not inherited and not {"overload", "setter"} & set(map(_name, item.decorator_list)):
            wrong.extend(["docstring"] if item.name != "__init__" else [])
        for what in wrong:
            yield Missing(path, item.lineno, name, what)
        yield from _wrong(item, f"{name}.", path, seen and isinstance(item, ast.ClassDef))


def missing(path: Path) -> list[Missing]:
    """What is wrong with the docstrings of a file of the repository."""
    return list(_wrong(_parsed(path), "", path, None))


def main(folders: list[str]) -> int:
    """Print what is wrong in some folders or files; 1 where something is, 2 where a folder has no Python files."""
    paths = [
        path
        for folder in folders or ["hybridpar"]
        for path in ([ROOT / folder] if folder.endswith(".py") else python_files(folder))
    ]
    if not paths:
        print(f"no Python files in {', '.join(folders)}", file=sys.stderr)
        return 2
    found = [entry for path in paths for entry in missing(path)]
    print(*found, sep="\n")
    print(f"{len(found)} wrong in {len(paths)} files", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
