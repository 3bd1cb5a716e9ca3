"""Options that are one word with more inside: `name:key=value,...` as a frozen dataclass.

    outer:16,opt=nesterov,lr=0.7      Outer(every=16, opt="nesterov", lr=0.7)
    ps,servers=2                      ParameterServers(servers=2)
    0.9998,warmup                     Average(decay=0.9998, warmup=True)

The keys are the fields of the dataclass, and pydantic reads their values as their types say; a tuple is written with
`/` between its parts. Fields without a default, and those marked `UNNAMED`, may be given without their key, in order; a
key alone means `on`; `auto` is None, where the type allows it. What a number must be stands beside its type, as in
`Annotated[float, POSITIVE]`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Interval

from hybridpar.errors import UsageError, nearest, shortened

_T = TypeVar("_T")


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
class Options:
    """Base of options: a subclass is a frozen dataclass that is made by keywords."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


#: Beside the type of a field: it may be given without its key, though it has a default.
UNNAMED = "unnamed"

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


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter  # takes a moment, which `--help` need not wait for

    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def validated(what: str, kind: Any, value: Any, fix: str = "", *, strict: bool = False, toml: bool = False) -> Any:
    """A value as a type says, and its rules; `what` names it in the error.

    Strict: it must be of the type already. Of TOML, which has neither tuples nor paths, lists and texts stand for them.
    """
    from pydantic import ValidationError

    if toml:
        value, strict = _of_toml(kind, value), True
    try:
        return _adapter(kind).validate_python(value, strict=strict)
    except ValidationError as error:
        # Of a type with alternatives there is an error for each.
        rules = [detail["msg"].partition("nput should be ")[2].partition(", unable")[0] for detail in error.errors()]
        rule = " or ".join(dict.fromkeys(filter(None, rules))) or "a value of its type"
        rule = rule.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
        rule = rule.replace("a valid tuple", "a list").replace("an instance of Path", "a path")
        raise UsageError(what, f"It must be {rule}.", fix) from None


def _of_toml(kind: Any, value: Any) -> Any:
    """A value of TOML with tuples for lists, and a path for a text that only a path can be."""
    if isinstance(value, list):
        return tuple(value)
    alternatives = _alternatives(kind)
    words = {word for found in alternatives if typing.get_origin(found) is Literal for word in typing.get_args(found)}
    takes_text = str in alternatives or value in words
    return Path(value) if isinstance(value, str) and Path in alternatives and not takes_text else value


def check_rules(options: object) -> None:
    """Check that the fields of a dataclass are what their types say."""
    for name, kind in fields_of(type(options)).items():
        value = getattr(options, name)
        if not (isinstance(value, str) and Path in _alternatives(kind)):  # a path may be given as text
            validated(f"--{name.replace('_', '-')} is {shortened(value)}", kind, value, strict=True)


def split_name(text: str) -> tuple[str, str]:
    """`name` and `key=value,...` of `name:key=value,...` or `name,key=value,...`."""
    name, *rest = re.split(r"\s*[:,]", text.strip(), maxsplit=1)
    return name, "".join(rest)


def read_choice(option: str, text: str, choices: Mapping[str, type[_T]], usual: str | None = None) -> _T:
    """The dataclass that `name:key=value,...` or `name,key=value,...` stands for; without a name, the usual choice."""
    name, rest = split_name(text)
    if usual is not None and "=" in name:
        name, rest = usual, text
    if name not in choices:
        raise UsageError(f"{option} {shortened(text)}", f"There is no {shortened(repr(name))}.", nearest(name, choices))
    return read_fields(f"{option} {shortened(text)}", rest, choices[name])


def read_fields(label: str, text: str, kind: type[_T]) -> _T:
    """A dataclass of the values in `value,key=value,...`."""
    made: _T = _made(label, text, kind)  # type: ignore[arg-type]  # classes can be hashed
    return made


@functools.cache
def _made(label: str, text: str, kind: type) -> Any:
    defaults = defaults_of(kind)
    values = read_values(label, _split(label, text, kind), fields_of(kind), defaults)
    if missing := [name for name in fields_of(kind) if name not in defaults and name not in values]:
        raise UsageError(f"{label} without {missing[0]}", "It has no default.", f"Add {missing[0]}=VALUE.")
    return kind(**values)


def overlay(label: str, below: str, above: str, kind: type) -> str:
    """Two texts of `value,key=value,...` as one, in which the second wins."""
    given = _split(label, below, kind) | _split(label, above, kind)
    unnamed = _unnamed(kind)
    return ",".join(given[key] if key in unnamed else f"{key}={given[key]}" for key in fields_of(kind) if key in given)


def with_options(text: str, **options: object) -> str:
    """The text of a choice with other values of some keys, and without those that are None.

    `sgd:nesterov` with momentum=0 is `sgd:nesterov,momentum=0`.
    """
    name, rest = split_name(text)
    parts = [part.strip() for part in rest.split(",") if part.strip()]
    parts = [part for part in parts if part.partition("=")[0].strip() not in options]
    parts += [f"{key}={value}" for key, value in options.items() if value is not None]
    return f"{name}:{','.join(parts)}" if parts else name


def fields_of(kind: type) -> Mapping[str, Any]:
    """Names and types of the fields of a dataclass, in order."""
    types_of = typing.get_type_hints(kind, include_extras=True)
    return {field.name: types_of[field.name] for field in dataclasses.fields(kind)}


def defaults_of(kind: type) -> dict[str, Any]:
    """Defaults of the fields of a dataclass that have any."""
    return {field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}


def _unnamed(kind: type) -> list[str]:
    """The fields that may be given without their key."""
    defaults = defaults_of(kind)
    marked = {name for name, declared in fields_of(kind).items() if UNNAMED in getattr(declared, "__metadata__", ())}
    return [name for name in fields_of(kind) if name not in defaults or name in marked]


def _split(label: str, text: str, kind: type) -> dict[str, str]:
    flags = [name for name, declared in fields_of(kind).items() if declared is bool]
    return split_fields(label, text, _unnamed(kind), flags)


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
        fix = "Leave it out to have the default." if key in defaults else ""
        values[key] = _read(f"{label}: {key}={shortened(text)}", text, types_of[key], fix)
    return values


def _read(what: str, text: str, kind: Any, fix: str) -> Any:
    alternatives = _alternatives(kind)
    if type(None) in alternatives and text == "auto":
        return None
    is_tuple = any(typing.get_origin(option) is tuple for option in alternatives)
    return validated(what, kind, [part.strip() for part in text.split("/")] if is_tuple else text, fix)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one that a type is; without what stands beside it."""
    bare = kind.__origin__ if typing.get_origin(kind) is Annotated else kind
    return typing.get_args(bare) if typing.get_origin(bare) in (types.UnionType, typing.Union) else (bare,)
