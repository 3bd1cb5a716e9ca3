"""Finds what the docstrings of public functions, methods and classes do not say.

    python -m tests.docstrings [FOLDER...]    print file:line: name: what is missing

A function or method with parameters has an `Args:` section that names each one, and a `Returns:` or `Yields:` section
where it hands something back, unless its docstring begins with what that is ("Bytes of ...") or has the word "returns";
and a `Raises:` section where it raises an error itself.
A class says in `Args:` what its `__init__` takes; a dataclass, named tuple or pydantic model describes its fields in
`Attributes:`, in `Args:`, or in a string or comment beside each. A method that overrides another may leave it all to
the docstring of the base class.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.structure import ROOT, python_files, relative

#: Words that begin a docstring which says what a function does; any other word begins what it returns.
_VERBS = set(
    re.findall(
        r"\w+",
        """
accept add adopt advance agree allocate allow append apply arrange ask assign attach await balance become begin bind
block bring broadcast build calculate call capture change check choose clear clip close collect combine come commit
compare compile compute connect convert copy count create cut decide declare decode define delete describe detach
divide do draw drop empty encode end enter estimate evaluate exchange execute expect explain export extend fetch
fill find finish fix flush fold follow forget format free fuse gather generate get give go guess handle have hold
import initialise insert install issue join keep know launch learn leave let list load look make map mark match
measure meet merge move multiply name need note observe open pack parse pass pause pick place plan predict prepare
press print probe process produce profile project prove prune put raise reach read rebuild receive record reduce
refuse register release remove rename repeat replace replay report reset resolve restore resume roll round run
sample save scale scan schedule search select send separate set share show simulate skip sort split start step stop
store sum swap synchronize take tell test time trace train translate try tune turn unpack update use validate verify
visit wait walk watch write
""",
    )
)
#: Words of that list which are also nouns: "Time of a message", "Plan of a run".
_NOUN = (
    r"(count|cut|end|measure|name|need|pass|plan|place|project|record|report|round|sample|schedule|share|start|step|"
)
_NOUN += r"sum|test|time|trace|walk)s? (of|in|that|until|between|for|from|\w+ of|and)\b"
#: Base classes whose fields are parameters.
_FIELDS = frozenset({"BaseModel", "NamedTuple", "TypedDict"})

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Missing:
    """What one docstring lacks.

    Attributes:
        path: the file.
        line: the line of the `def` or `class`, from 1.
        name: `function`, `Class` or `Class.method`.
        what: what is missing, in words.
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


def _own_nodes(function: _Function) -> Iterator[ast.AST]:
    """All nodes of a function, without those of functions defined in it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*_Function.__args__, ast.Lambda, ast.ClassDef)):
            waiting.extend(ast.iter_child_nodes(node))


def _gives(function: _Function) -> bool:
    """Whether a function returns or yields something other than None."""
    kind = function.returns
    if kind is not None:
        return ast.unparse(kind) not in ("None", "NoReturn", "Iterator[None]", "Generator[None]")
    returned = (node for node in _own_nodes(function) if isinstance(node, (ast.Return, ast.Yield)))
    return any(node.value is not None for node in returned)


def _missing_of_function(function: _Function, text: str) -> Iterator[str]:
    described = _named(_section(text, "Args", "Arguments"))
    lacking = [name for name in _parameters(function) if name not in described]
    if lacking:
        yield f"Args: {', '.join(lacking)}"
    decorators = set(map(_name, function.decorator_list))
    if _gives(function) and not decorators & {"property", "cached_property"}:
        first = re.split(r"\s", text.lower())[0].strip(".:;")
        does = first in _VERBS and not re.match(_NOUN, text.lower())
        says = _section(text, "Returns", "Yields") or re.search(r"\b(returns?|yields?)\b", text.lower())
        if does and not says:
            yield "Returns"
    if _raises(function) and not _section(text, "Raises"):
        yield "Raises"


def _raises(function: _Function) -> bool:
    """Whether a function raises an error itself, which it does not catch; what is only declared does not count."""
    caught = {id(inner) for node in _own_nodes(function) if isinstance(node, ast.Try) for inner in _nodes(node.body)}
    return any(
        isinstance(node, ast.Raise) and node.exc is not None and _name(node.exc) != "NotImplementedError"
        for node in _own_nodes(function)
        if id(node) not in caught
    )


def _nodes(statements: list[ast.stmt]) -> Iterator[ast.AST]:
    return (node for statement in statements for node in ast.walk(statement))


def _fields(node: ast.ClassDef) -> dict[str, int]:
    """Public fields of a dataclass and the place of each in the body."""
    found = {}
    for index, item in enumerate(node.body):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name, hidden = item.target.id, isinstance(item.value, ast.Call) and "init=False" in ast.unparse(item.value)
            if not name.startswith("_") and _name(item.annotation) != "ClassVar" and not hidden:
                found[name] = index
    return found


def _missing_of_fields(node: ast.ClassDef, text: str, lines: list[str]) -> Iterator[str]:
    described = _named(_section(text, "Args", "Attributes"))
    for name, index in _fields(node).items():
        item, after = node.body[index], node.body[index + 1 :][:1]
        below = after and isinstance(after[0], ast.Expr) and isinstance(after[0].value, ast.Constant)
        beside = "#:" in lines[item.lineno - 2] or "  # " in lines[(item.end_lineno or item.lineno) - 1]
        if name not in described and not below and not beside:
            yield name


def _missing_of_class(node: ast.ClassDef, text: str, lines: list[str]) -> Iterator[str]:
    decorated = "dataclass" in map(_name, node.decorator_list)
    if decorated or _FIELDS & set(map(_name, node.bases)):
        lacking = list(_missing_of_fields(node, text, lines))
        if lacking:
            yield f"Attributes: {', '.join(lacking)}"
    for item in node.body:
        if isinstance(item, _Function) and item.name == "__init__":
            described = _named(_section(text + "\n\n" + (ast.get_docstring(item) or ""), "Args", "Arguments"))
            described |= _named(_section(ast.get_docstring(item) or "", "Args", "Arguments"))
            lacking = [name for name in _parameters(item) if name not in described]
            if lacking and not (not text and _classes().inherits(node.name, "__init__")):
                yield f"Args: {', '.join(lacking)}"


def _missing(node: ast.AST, prefix: str, path: Path, lines: list[str]) -> Iterator[Missing]:
    for item in ast.iter_child_nodes(node):
        if not isinstance(item, (*_Function.__args__, ast.ClassDef)) or item.name.startswith("_"):
            continue
        name, text = prefix + item.name, ast.get_docstring(item) or ""
        lacking: list[str] = []
        if isinstance(item, ast.ClassDef):
            lacking.extend(_missing_of_class(item, text, lines) if text else ["docstring"])
        elif text:
            inherited = isinstance(node, ast.ClassDef) and _classes().inherits(node.name, item.name)
            lacking.extend(() if inherited else _missing_of_function(item, text))
        elif not (isinstance(node, ast.ClassDef) and _classes().inherits(node.name, item.name)):
            overload = {"overload", "setter"} & set(map(_name, item.decorator_list))
            lacking.extend(() if overload else ["docstring"])
        if re.fullmatch(r"See (also )?[^.]*\.?", text) or re.search(
            r"^ +(\w+: )?See `[^`]*`", text, flags=re.MULTILINE
        ):
            lacking.append("more than a reference")
        for what in lacking:
            yield Missing(path, item.lineno, name, what)
        if isinstance(item, ast.ClassDef):
            yield from _missing(item, f"{name}.", path, lines)


def missing(path: Path) -> list[Missing]:
    """What the public docstrings of a file lack.

    Args:
        path: a Python file of the repository.
    """
    return list(_missing(_parsed(path), "", path, path.read_text(encoding="utf-8").splitlines()))


def main(folders: list[str]) -> int:
    """Print what is missing.

    Args:
        folders: folders or files of the repository; all of hybridpar where there are none.

    Returns:
        1 where something is missing, 2 where a folder has no Python files, else 0.
    """
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
    print(f"{len(found)} missing in {len(paths)} files", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
