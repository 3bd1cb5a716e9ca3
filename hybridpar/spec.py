"""Options that are one word with more inside: `name:key=value,...` as a frozen dataclass.

    outer:16,opt=nesterov,lr=0.7      Outer(every=16, opt="nesterov", lr=0.7)
    ps,servers=2                      ParameterServers(servers=2)
    0.9998,warmup                     Average(decay=0.9998, warmup=True)

The keys are the fields of the dataclass, and their types say how a value is read: text, whole numbers, numbers, `on`
and `off`, a choice (`Literal`), or numbers with `/` between them (a tuple). Fields without a default, and those marked
`UNNAMED`, may be given without their key, in order; a key alone means `on`; `auto` is None, where the type allows it.
What a number must be stands beside its type, as in `Annotated[float, POSITIVE]`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from hybridpar.errors import UsageError, nearest, shortened

_T = TypeVar("_T")

_WORDS = {"on": True, "true": True, "off": False, "false": False}

#: Beside the type of a field: it may be given without its key, though it has a default.
UNNAMED = "unnamed"


@dataclass(frozen=True)
class Rule:
    """What a number must be.

    Attributes:
        text: In words, to be put behind "It must be".
        holds: Whether a number is that.
    """

    text: str
    holds: Callable[[float], bool]

    def allows(self, value: Any) -> bool:
        """Whether a value of any type is a number that the rule holds for."""
        try:
            return self.holds(value)
        except TypeError:
            return False


AT_LEAST_0 = Rule("at least 0", lambda number: number >= 0)
AT_LEAST_1 = Rule("at least 1", lambda number: number >= 1)
POSITIVE = Rule("greater than 0", lambda number: number > 0)
BELOW_1 = Rule("at least 0 and less than 1", lambda number: 0 <= number < 1)
BETWEEN_0_AND_1 = Rule("between 0 and 1", lambda number: 0 < number < 1)
FINITE = Rule("greater than 0 and finite", lambda number: 0 < number < math.inf)
AT_MOST_1 = Rule("greater than 0 and at most 1", lambda number: 0 < number <= 1)


def between(low: int, high: int) -> Rule:
    """A number from one to another, both included."""
    return Rule(f"from {low} to {high}", lambda number: low <= number <= high)


def check_rules(options: object) -> None:
    """Check that the fields of a dataclass are what stands beside their types; None is no value, and always allowed."""
    for name, kind in fields_of(type(options)).items():
        value = getattr(options, name)
        for rule in typing.get_args(kind) if typing.get_origin(kind) is Annotated and value is not None else ():
            if isinstance(rule, Rule) and not all(map(rule.allows, value if isinstance(value, tuple) else (value,))):
                raise UsageError(f"--{name.replace('_', '-')} is {value}", f"It must be {rule.text}.")


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


def _split(label: str, text: str, kind: type) -> dict[str, str]:
    flags = [name for name, declared in fields_of(kind).items() if declared is bool]
    return split_fields(label, text, _unnamed(kind), flags)


def _unnamed(kind: type) -> list[str]:
    """The fields that may be given without their key."""
    defaults = defaults_of(kind)
    return [
        name
        for name, declared in fields_of(kind).items()
        if name not in defaults or UNNAMED in getattr(declared, "__metadata__", ())
    ]


def fields_of(kind: type) -> Mapping[str, Any]:
    """Names and types of the fields of a dataclass, in order."""
    types_of = typing.get_type_hints(kind, include_extras=True)
    return {field.name: types_of[field.name] for field in dataclasses.fields(kind)}


def defaults_of(kind: type) -> dict[str, Any]:
    """Defaults of the fields of a dataclass that have any."""
    return {field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}


def with_options(text: str, **options: object) -> str:
    """The text of a choice with other values of some keys, and without those that are None.

    `sgd:nesterov` with momentum=0 is `sgd:nesterov,momentum=0`.
    """
    name, rest = split_name(text)
    parts = [part.strip() for part in rest.split(",") if part.strip()]
    parts = [part for part in parts if part.partition("=")[0].strip() not in options]
    parts += [f"{key}={value}" for key, value in options.items() if value is not None]
    return f"{name}:{','.join(parts)}" if parts else name


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
    """Values as their types say; errors name the default."""
    for key in given:
        if key not in types_of:
            fix = nearest(key, types_of) if types_of else "It takes no options."
            raise UsageError(f"{label} has no option {shortened(repr(key))}", fix=fix)
    return {key: _read(label, key, value, types_of[key], defaults) for key, value in given.items()}


def _read(label: str, key: str, text: str, kind: Any, defaults: Mapping[str, Any]) -> Any:
    rules = [mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, Rule)]
    if typing.get_origin(kind) is Annotated:
        kind = kind.__origin__
    allowed = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    if types.NoneType in allowed and text == "auto":
        return None
    (kind,) = (one for one in allowed if one is not types.NoneType)
    what = f"{label}: {key}={shortened(text)}"
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise UsageError(what, f"It must be {' or '.join(choices)}.", nearest(text, choices))
        return text
    several = typing.get_origin(kind) is tuple
    if several:
        kind = typing.get_args(kind)[0]
    values = tuple(_convert(what, key, one.strip(), kind) for one in (text.split("/") if several else (text,)))
    for rule in rules:
        if not all(map(rule.holds, values)):
            usual = defaults.get(key)
            fix = "" if key not in defaults else "Leave it out." if usual is None else f"Use {key}={_text_of(usual)}."
            raise UsageError(what, f"{'They' if several else 'It'} must be {rule.text}.", fix)
    return values if several else values[0]


def _text_of(value: Any) -> str:
    return "/".join(map(_text_of, value)) if isinstance(value, tuple) else f"{value:g}"


def _convert(what: str, key: str, text: str, kind: Any) -> Any:
    try:
        if kind is int and len(text) > 20:
            raise ValueError
        value = _WORDS[text.lower()] if kind is bool else kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
        return value
    except (ValueError, KeyError):
        wanted = {bool: "on or off", int: "a whole number", float: "a number"}[kind]
        raise UsageError(what, f"The value of {key} is {wanted}.") from None
