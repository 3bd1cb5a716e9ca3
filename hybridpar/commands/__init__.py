"""The commands of `hybridpar`, one module or folder here for each.

A module registers its command with `register_command`, and imports what is heavy in the function that runs it: the
modules are imported to list the commands, which must not take the seconds that torch takes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from hybridpar.config.foreign import check_foreign
from hybridpar.registry import Registry

Options = TypeVar("Options")

#: Option of a command with groups that prints all of its options; `--help` prints those that most users need.
HELP_ALL = "--help-all"


@dataclass(frozen=True)
class Command:
    """A command as it was registered; see `register_command`.

    Attributes:
        options: Dataclass of its options.
        run: Function that runs it.
        groups: Titles of its help screen, with the base classes of `options` that each shows; empty for one group.
        shown: Names of the options that `--help` shows where there are groups; `--help-all` shows all.
        read: Called with a command line; returns the values in the files that it names, by option, and its other words.
    """

    options: type
    run: Callable[[Any, Sequence[str]], int]
    groups: Mapping[str, tuple[type, ...]]
    shown: Collection[str]
    read: Callable[[Sequence[str]], tuple[dict[str, Any], list[str]]] | None = None

    def parse(self, name: str, arguments: Sequence[str]) -> Any:
        """Read a command line, and the files that it names."""
        config: tuple[Any, ...] = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
        if {"--help", "-h", *([HELP_ALL] if self.groups else [])} & set(arguments):
            most = {one.name for one in fields(self.options)}
            target = grouped(
                self.options, self.groups, self.shown if self.groups and HELP_ALL not in arguments else most
            )
            return tyro.cli(target, args=["--help"], prog=f"hybridpar {name}", config=(*config, tyro.conf.DisallowNone))
        if self.read is None:
            return tyro.cli(self.options, args=_unset(arguments, self.options), prog=f"hybridpar {name}", config=config)
        values, words = self.read(arguments)
        check_foreign(words, self.options)
        model = {"model": values.pop("model")} if "model" in values else {}
        usual = {one.name: one.default for one in fields(self.options) if one.default is not MISSING}
        default = self.options(**{"model": tyro.MISSING, **usual, **model})
        # What a file has switched is switched back by the word for the default, which is no option of its own.
        back = {
            f"--{'' if on else 'no-'}{option.replace('_', '-')}" for option, on in usual.items() if type(on) is bool
        }
        line = _unset([word for word in words if word not in back], self.options)
        typed = tyro.cli(self.options, args=line, prog=f"hybridpar {name}", config=config, default=default)
        named = named_options(words, self.options)
        left = {option: value for option, value in values.items() if option not in named}
        made = replace(typed, **left)
        # A run that is resumed has its own options, which files and presets were for when it began.
        return replace(made, given=named if getattr(made, "resume", False) else named | left.keys())


COMMANDS: Registry[Command] = Registry("command")


def register_command(
    name: str,
    description: str,
    options: type[Options],
    *,
    groups: Mapping[str, tuple[type, ...]] | None = None,
    shown: Collection[str] = (),
    read: Callable[[Sequence[str]], tuple[dict[str, Any], list[str]]] | None = None,
) -> Callable[[Callable[[Options, Sequence[str]], int]], Callable[[Options, Sequence[str]], int]]:
    """Decorator that makes a function a command.

    The function gets the options and the whole command line, with which a command starts itself in several workers;
    it returns the exit code.

    Args:
        name: What users type after `hybridpar`.
        description: One sentence for `hybridpar --help`.
        options: Dataclass whose fields are the options; their docstrings are the help.
        groups: Titles of its help screen, with the base classes of `options` that each shows.
        shown: Options that `--help` shows where there are groups.
        read: Called with a command line; returns the values in the files that it names, by option, and its other words.

    Returns:
        The decorator; it returns the function as it is.
    """

    def enter(run: Callable[[Options, Sequence[str]], int]) -> Callable[[Options, Sequence[str]], int]:
        COMMANDS.register(name, description)(Command(options, run, groups or {}, shown, read))
        return run

    return enter


def find_command(name: str) -> Command:
    """Import the module that a command is named after, or all if there is none, and look the command up."""
    load_commands(name)
    return COMMANDS.get(name)


def load_commands(name: str | None = None) -> None:
    """Import the modules of this folder, so that their commands are registered."""
    modules = [module.name for module in pkgutil.iter_modules(__path__)]
    name = name and name.replace("-", "_")
    for module in [name] if name in modules else modules:
        importlib.import_module(f"{__name__}.{module}")


def named_options(arguments: Sequence[str], options: type) -> frozenset[str]:
    """The options that a command line names, whatever value it gives them."""
    words = {word.partition("=")[0][2:].replace("-", "_") for word in arguments if word.startswith("--")}
    return frozenset(one.name for one in fields(options) if {one.name, f"no_{one.name}"} & words)


def _unset(arguments: Sequence[str], options: type) -> list[str]:
    """A command line with `None` for `none` where that unsets an option, as one that a preset sets."""
    flags = {f"--{one.name.replace('_', '-')}" for one in fields(options) if one.default is None}
    line = list(arguments)
    for at, (before, word) in enumerate(zip(["", *line], line, strict=False)):
        option, joined, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if value == "none" and option.replace("_", "-") in flags:
            line[at] = f"{option}=None" if joined else "None"
    return line


def grouped(options: type, groups: Mapping[str, tuple[type, ...]], shown: Collection[str]) -> type:
    """A dataclass with the options of another one in titled groups, for a help screen."""
    parts: list[Any] = []
    for number, (title, bases) in enumerate(groups.items()):
        options_here = [_explained(base, one) for base in bases for one in fields(base) if one.name in shown]
        group = make_dataclass(f"Group{number}", options_here)
        hint: Any = Annotated[group, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title, help="")]
        parts.append((f"group_{number}", hint, field(default_factory=group)))
    inside = {one.name for bases in groups.values() for base in bases for one in fields(base)}
    loose = [_explained(options, one) for one in fields(options) if one.name not in inside]
    return make_dataclass(options.__name__, [*loose, *parts], kw_only=True, namespace={"__doc__": options.__doc__})


def _explained(owner: type, one: Field[Any]) -> tuple[str, Any, Field[Any]]:
    """A field with its docstring as help text, without line breaks, and without a default that says nothing."""
    hint = get_type_hints(owner, include_extras=True)[one.name]
    if not any(getattr(part, "help", None) for part in getattr(hint, "__metadata__", ())):
        docs = [_field_docs(base) for base in owner.__mro__ if is_dataclass(base)]
        text = " ".join(next((texts[one.name] for texts in docs if one.name in texts), "").split())
        says_nothing = one.default in (None, "", ()) or one.default is False
        hint = Annotated[hint, tyro.conf.arg(help=text, help_behavior_hint="" if says_nothing else None)]
    return one.name, hint, field() if one.default is MISSING else field(default=one.default)


def _field_docs(owner: type) -> dict[str, str]:
    """The strings below the fields of a dataclass, by field."""
    try:
        source = textwrap.dedent(inspect.getsource(owner))
    except (OSError, TypeError):  # it was made without a file
        return {}
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return {
        above.target.id: ast.literal_eval(below.value)
        for above, below in pairwise(body)
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
