"""The commands of `hybridpar`, one module or folder here for each.

A module registers its command with `register_command`, and imports what is heavy in the function that runs it: the
modules are imported to list the commands, which must not take the seconds that torch takes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass, replace
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from hybridpar.config.files import FileOptions, read_sources
from hybridpar.config.foreign import check_foreign
from hybridpar.config.train import GROUPS, TrainConfig
from hybridpar.registry import Registry

_Options = TypeVar("_Options")

#: Option of a command with groups that prints all of its options; `--help` prints those that most users need.
HELP_ALL = "--help-all"

#: Options of `hybridpar train` that `--help` shows.
SHOWN = (
    *("config", "preset"),
    *("model", "weights", "data", "data_root", "batch_size", "image_size", "augment"),
    *("epochs", "steps", "optimizer", "lr", "weight_decay", "lr_schedule"),
    *("nproc", "stages", "replicas", "micro_batches"),
    *("compress", "sync"),
    *("amp", "kernels"),
    *("plan", "fidelity"),
    *("run_dir", "resume", "checkpoints", "log"),
    "seed",
)


@dataclass(frozen=True)
class Command:
    """A command as it was registered; see `register_command`.

    Attributes:
        options: Dataclass of its options.
        run: Function that runs it.
        groups: Titles of its help screen, with the base classes of `options` that each shows; empty for one group.
        shown: Names of the options that `--help` shows where there are groups; `--help-all` shows all.
    """

    options: type
    run: Callable[[Any, Sequence[str]], int]
    groups: Mapping[str, tuple[type, ...]]
    shown: Collection[str]

    def parse(self, name: str, arguments: Sequence[str]) -> Any:
        """Read a command line, and the files that it names."""
        if {"--help", "-h", HELP_ALL} & set(arguments):
            shown = self.shown if self.groups and HELP_ALL not in arguments else None
            target = grouped(self.options, self.groups, shown)
            return _read(name, target, ["--help"], config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone))
        if not issubclass(self.options, TrainConfig):
            return _read(name, self.options, arguments)
        values, words = read_sources(arguments)
        check_foreign(words, self.options)
        named = named_options(words, self.options)
        left = {name: values[name] for name in values.keys() - named}  # a list that is typed does not add to the file's
        unset = {option.name: tyro.MISSING for option in fields(self.options) if option.default is MISSING}
        typed = _read(name, self.options, _unset(words, self.options), default=self.options(**{**unset, **left}))
        # A run that is resumed has its own options, which files and presets were for when it began.
        files = set() if typed.resume else values.keys() - {"model"}
        return replace(typed, given=named | files)


COMMANDS: Registry[Command] = Registry("command", __name__)


def register_command(
    name: str, options: type[_Options], **extra: type
) -> Callable[[Callable[[_Options, Sequence[str]], int]], Callable[[_Options, Sequence[str]], int]]:
    """Decorator that makes a function a command.

    The function gets the options and the whole command line, with which a command starts itself in several workers;
    it returns the exit code. A command whose options are those of `hybridpar train` and more reads files and presets.

    Args:
        name: What users type after `hybridpar`.
        options: Dataclass whose fields are the options. The first sentence of its docstring is for `hybridpar --help`;
            what it says below `Attributes:` is the help of the options. Those that its class attribute
            `without_effect` names are not among what `--help` shows.
        **extra: Where the options are those of training and more: titles for these on the help screen, each with the
            base class of `options` that has them.

    Returns:
        The decorator; it returns the function as it is.
    """
    groups: dict[str, tuple[type, ...]] = {}
    if issubclass(options, TrainConfig):
        groups = {**{title: (kind,) for title, kind in extra.items()}, "Configuration files": (FileOptions,), **GROUPS}
    description = " ".join((options.__doc__ or "").split()).partition(". ")[0].removesuffix(".") + "."
    without_effect = getattr(options, "without_effect", ())
    shown = [name for name in SHOWN if name not in without_effect]
    shown += [option.name for kind in extra.values() for option in fields(kind)]

    def enter(run: Callable[[_Options, Sequence[str]], int]) -> Callable[[_Options, Sequence[str]], int]:
        COMMANDS.register(name, description)(Command(options, run, groups, shown))
        return run

    return enter


def _read(name: str, options: type, arguments: Sequence[str], **how: Any) -> Any:
    """Have tyro read a command line."""
    return tyro.cli(options, args=list(arguments), prog=f"hybridpar {name}", **how)


def named_options(arguments: Sequence[str], options: type) -> frozenset[str]:
    """The options that a command line names, whatever value it gives them."""
    words = {word.partition("=")[0][2:].replace("-", "_") for word in arguments if word.startswith("--")}
    return frozenset(option.name for option in fields(options) if {option.name, f"no_{option.name}"} & words)


def _unset(arguments: Sequence[str], options: type) -> list[str]:
    """A command line with `None` for `none` where that unsets an option, as one that a preset sets."""
    flags = {f"--{option.name.replace('_', '-')}" for option in fields(options) if option.default is None}
    line: list[str] = []
    for word in arguments:
        option, _, value = word.rpartition("=")
        unsets = value == "none" and (option or "".join(line[-1:])) in flags
        line.append(f"{word.removesuffix('none')}None" if unsets else word)
    return line


def grouped(options: type, groups: Mapping[str, tuple[type, ...]], shown: Collection[str] | None) -> type:
    """A dataclass with the options of another one in titled groups, for a help screen; with all, or some of them."""
    texts, hints = option_texts(options), get_type_hints(options, include_extras=True)

    def explained(option: Field[Any]) -> tuple[str, Any, Field[Any]]:
        """A field with its help text, without a default that says nothing."""
        hint = hints[option.name]
        if not any(getattr(mark, "help", None) for mark in getattr(hint, "__metadata__", ())):
            says_nothing = option.default in (None, "", ()) or isinstance(option.default, bool)
            behavior = "(required)" if option.default is MISSING else "" if says_nothing else None
            help_ = tyro.conf.arg(help=texts.get(option.name, ""), help_behavior_hint=behavior)
            hint = Annotated[hint, help_]
        return option.name, hint, field() if option.default is MISSING else field(default=option.default)

    inside, parts = set(), []
    for number, (title, bases) in enumerate(groups.items()):
        names = {option.name for base in bases for option in fields(base)}
        inside |= names
        here = [
            option for option in fields(options) if option.name in names and (shown is None or option.name in shown)
        ]
        group = make_dataclass(f"Group{number}", map(explained, here))
        hint: Any = Annotated[group, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title, help="")]
        parts.append((f"group_{number}", hint, field(default_factory=group)))
    loose = [explained(option) for option in fields(options) if option.name not in inside]
    return make_dataclass(options.__name__, [*loose, *parts], kw_only=True, namespace={"__doc__": options.__doc__})


def option_texts(options: type) -> dict[str, str]:
    """What the docstrings of a dataclass and its bases say of the fields."""
    texts: dict[str, str] = {}
    for base in reversed(options.__mro__):
        attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", attributes, re.MULTILINE):
            texts[name] = " ".join(text.split())
    return texts
