"""Options that are one word with more inside: `name:key=value,...` as a frozen dataclass.

    outer:16,opt=nesterov,lr=0.7      Outer(every=16, opt="nesterov", lr=0.7)
    ps:servers=2                      ParameterServers(servers=2)
    0.9998,warmup                     Average(decay=0.9998, warmup=True)

The keys are the fields of the dataclass, and pydantic reads their values as their types say; a tuple is written with
`/` between its parts. A field with `Unnamed` beside its type may be given without its key, in order; a key alone means
`on`; `auto` is None, where the type allows it. What a number must be stands beside its type, as in
`Annotated[float, POSITIVE]`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Interval

from hybridpar.errors import UsageError, nearest, shortened

_T = TypeVar("_T")

# What a number must be, beside its type; infinities and NaN are refused in any case.
AT_LEAST_0 = Ge(0)
AT_LEAST_1 = Ge(1)
POSITIVE = Gt(0)
BELOW_1 = Interval(ge=0, lt=1)
BETWEEN_0_AND_1 = Interval(gt=0, lt=1)
AT_MOST_1 = Interval(gt=0, le=1)


def between(low: int, high: int) -> Interval:
    """A number from one to another, both included."""
    return Interval(ge=low, le=high)


class Unnamed(NamedTuple):
    """Beside the type of a field: it may be given without its key; `shown` stands for it in messages."""

    shown: str


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
class Options:
    """Base of options: a subclass is a frozen dataclass that is made by keywords.

    With `class Cosine(Schedule, choice="cosine")` that is its name among the subclasses of `Schedule`.
    """

    choice: ClassVar[str] = ""

    def __init_subclass__(cls, choice: str = "") -> None:
        cls.choice = choice
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@functools.cache
def choices_of(kind: Any) -> dict[str, Any]:
    """A class and the classes derived from it by the names that users choose them by, where they have one."""
    here = {kind.choice: kind} if issubclass(kind, Options) and kind.choice else {}
    return here | {name: choice for below in kind.__subclasses__() for name, choice in choices_of(below).items()}


class Spec(Generic[_T]):
    """An attribute of options: what the text of one of them stands for, as `ema = Spec("model_ema", Average)`.

    Args:
        option: The field with the text.
        kind: The dataclass, or the base of several, one of which is chosen by the name before the colon.
        usual: The name of a text without one.
        absent: What None stands for.
    """

    def __init__(self, option: str, kind: type[_T], *, usual: str = "", absent: _T | None = None) -> None:
        self.option, self._usual, self._absent = option, usual, absent
        self.kind: Any = kind  # for what is cached by it

    def __get__(self, options: object, owner: type) -> _T:
        text = getattr(options, self.option)
        if text is None:
            return typing.cast("_T", self._absent)
        text = str(text)
        label = f"--{self.option.replace('_', '-')} {shortened(text)}"
        if not (choices := choices_of(self.kind)):
            return typing.cast("_T", read_fields(label, text, self.kind))
        name, rest = split_name(text)
        if self._usual and "=" in name:
            name, rest = self._usual, text
        if name not in choices:
            near = nearest(name.partition(",")[0], choices)
            raise UsageError(label, f"There is no {shortened(repr(name))}.", near)
        return typing.cast("_T", read_fields(label, rest, choices[name]))


@functools.cache
def read_fields(label: str, text: str, kind: type) -> Any:
    """A dataclass of the values in `value,key=value,...`."""
    types_of, defaults = fields_of(kind), defaults_of(kind)
    values = read_values(label, _split(label, text, kind), types_of, defaults)
    for name in types_of.keys() - defaults.keys() - values.keys():
        shown = unnamed_of(kind).get(name)
        fix = f"Give {shown} first." if shown else f"Add {name}=VALUE."
        raise UsageError(f"{label} without {shown or name}", "It has no default.", fix)
    return kind(**values)


def check_rules(options: Any) -> None:
    """Check that the fields of a dataclass are what their types say, and that each text stands for something."""
    for name, kind in fields_of(type(options)).items():  # type: ignore[arg-type]
        value = getattr(options, name)
        if not (isinstance(value, str) and Path in _alternatives(kind)):  # a path may be given as text
            validated(f"--{name.replace('_', '-')} is {shortened(value)}", kind, value, strict=True)
    for owner in type(options).__mro__:
        for spec in vars(owner).values():
            if isinstance(spec, Spec):
                spec.__get__(options, owner)


def validated(what: str, kind: Any, value: Any, fix: str = "", *, strict: bool = False, toml: bool = False) -> Any:
    """A value as a type says, and its rules; `what` names it in the error.

    Strict: it must be of the type already. Of TOML, which has neither tuples nor paths, lists and texts stand for them.
    """
    from pydantic import ValidationError

    try:
        if toml:
            return _adapter(kind).validate_json(json.dumps(value, default=str), strict=True)
        return _adapter(kind).validate_python(value, strict=strict)
    except ValidationError as error:
        # Of a type with alternatives there is an error for each.
        rules = [detail["msg"].partition("nput should be ")[2].partition(", unable")[0] for detail in error.errors()]
        rule = " or ".join(dict.fromkeys(filter(None, rules)))
        rule = rule.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
        rule = rule.replace("an instance of Path", "a path").replace("a valid array", "a list")
        raise UsageError(what, f"It must be {rule}." if rule else f"{error.errors()[-1]['msg']}.", fix) from None


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter  # takes a moment, which `--help` need not wait for

    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def split_name(text: str) -> tuple[str, str]:
    """`name` and `key=value,...` of `name:key=value,...`."""
    name, _, rest = text.partition(":")
    return name.strip(), rest


def overlay(label: str, below: str, above: str, kind: type) -> str:
    """Two texts of `value,key=value,...` as one, in which the second wins."""
    given = _split(label, below, kind) | _split(label, above, kind)
    unnamed = unnamed_of(kind)
    return ",".join(given[key] if key in unnamed else f"{key}={given[key]}" for key in fields_of(kind) if key in given)


def read_literal(text: str) -> Any:
    """A Python literal, also `true` and `false`; else the text as it is."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text.lower(), text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def with_options(text: str, **options: object) -> str:
    """The text of a choice with other values of some keys, and without those that are None.

    `sgd:nesterov` with momentum=0 is `sgd:nesterov,momentum=0`.
    """
    name, rest = split_name(text)
    parts = [part.strip() for part in rest.split(",") if part.strip()]
    parts = [part for part in parts if part.partition("=")[0].strip() not in options]
    parts += [f"{key}={value}" for key, value in options.items() if value is not None]
    return f"{name}:{','.join(parts)}" if parts else name


@functools.cache
def fields_of(kind: type) -> Mapping[str, Any]:
    """Names and types of the fields of a dataclass, in order."""
    types_of = typing.get_type_hints(kind, include_extras=True)
    return {field.name: types_of[field.name] for field in dataclasses.fields(kind)}


def defaults_of(kind: type) -> dict[str, Any]:
    """Defaults of the fields of a dataclass that have any."""
    return {field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}


def unnamed_of(kind: type) -> dict[str, str]:
    """The fields that may be given without their key, and what is shown for them."""
    marks = {name: getattr(declared, "__metadata__", ()) for name, declared in fields_of(kind).items()}
    return {name: mark.shown for name, beside in marks.items() for mark in beside if isinstance(mark, Unnamed)}


def _split(label: str, text: str, kind: type) -> dict[str, str]:
    flags = [name for name, declared in fields_of(kind).items() if declared is bool]
    return split_fields(label, text, unnamed_of(kind), flags)


def split_fields(
    label: str, text: str, unnamed: Collection[str] = (), flags: Collection[str] | None = ()
) -> dict[str, str]:
    """Keys and values of `key=value,...`; a flag, of which None allows any, may be without a value."""
    given: dict[str, str] = {}
    left = list(unnamed)
    for part in text.split(",") if text.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if (flags is None or key in flags) and key and not equals:
            value = "on"
        elif key and left and not equals:
            key, value = left.pop(0), key
        if not key or not value:
            raise UsageError(f"{part.strip()!r} in {label}", "Options are key=value, separated by commas.")
        if key in given:
            raise UsageError(f"{key} is given twice in {label}", fix="Give it once.")
        given[key] = value
    return given


def read_values(
    label: str, given: Mapping[str, str], types_of: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Values as their types say."""
    values: dict[str, Any] = {}
    for key, text in given.items():
        if key not in types_of:
            fix = nearest(key, types_of) if types_of else "It takes no options."
            raise UsageError(f"{label} has no option {shortened(repr(key))}", fix=fix)
        alternatives = _alternatives(types_of[key])
        if type(None) in alternatives and text == "auto":
            values[key] = None
            continue
        is_tuple = any(typing.get_origin(option) is tuple for option in alternatives)
        value = [part.strip() for part in text.split("/")] if is_tuple else text
        fix = "Leave it out to have the default." if key in defaults else ""
        values[key] = validated(f"{label}: {key}={shortened(text)}", types_of[key], value, fix)
    return values


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one that a type is; without what stands beside it."""
    bare = kind.__origin__ if typing.get_origin(kind) is Annotated else kind
    return typing.get_args(bare) if typing.get_origin(bare) in (types.UnionType, typing.Union) else (bare,)
