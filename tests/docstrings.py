"""Finds what the docstrings of public names do not say, and sections in the docstrings of others.

    python -m tests.docstrings [FOLDER...]    print file:line: name: what is wrong

Public is what a user imports from a package or reads in the docs: functions and classes that an `__init__` with an
`__all__` exports, that a Python block of a document imports, or that a document names in backticks; and the public
methods of such classes.

- A public function has an `Args:` section that names each parameter, and a `Returns:` or `Yields:` section where it
  hands something back, unless its docstring begins with what that is ("Bytes of ...") or has the word "returns"; and a
  `Raises:` section where it raises an error itself. A public class says in `Args:` what its `__init__` takes; a
  dataclass, named tuple or pydantic model describes its fields in `Attributes:`, in `Args:`, or in a string or comment
  beside each. A method that overrides another may leave it all to the docstring of the base class.
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
    if is_record(node):
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


def _wrong(node: ast.AST, prefix: str, path: Path, lines: list[str], public: bool | None) -> Iterator[Missing]:
    """What is wrong in a module, class or function; `public` is None in a module, where each name says it."""
    for item in ast.iter_child_nodes(node):
        if not isinstance(item, (*_Function.__args__, ast.ClassDef)):
            yield from _wrong(item, prefix, path, lines, public)  # under an `if`, or in a `with`
            continue
        name, text = prefix + item.name, ast.get_docstring(item) or ""
        seen = (path, item.name) in public_names() if public is None else public
        seen &= not item.name.startswith("_") or item.name == "__init__"
        inherited = isinstance(node, ast.ClassDef) and _classes().inherits(node.name, item.name)
        wrong: list[str] = []
        if not seen:
            wrong.extend(_superfluous(item, text))
        elif isinstance(item, ast.ClassDef):
            wrong.extend(_missing_of_class(item, text, lines) if text else ["docstring"])
        elif text and not inherited and item.name != "__init__":
            wrong.extend(_missing_of_function(item, text))
        elif not text and not inherited and not {"overload", "setter"} & set(map(_name, item.decorator_list)):
            wrong.extend(["docstring"] if item.name != "__init__" else [])
        if seen and re.search(r"\ASee (also )?[^.]*\.?\Z|^ +(\w+: )?See `[^`]*`", text, flags=re.MULTILINE):
            wrong.append("more than a reference")
        for what in wrong:
            yield Missing(path, item.lineno, name, what)
        yield from _wrong(item, f"{name}.", path, lines, seen and isinstance(item, ast.ClassDef))


def missing(path: Path) -> list[Missing]:
    """What is wrong with the docstrings of a file of the repository."""
    return list(_wrong(_parsed(path), "", path, path.read_text(encoding="utf-8").splitlines(), None))


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
