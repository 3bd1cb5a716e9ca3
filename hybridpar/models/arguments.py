"""Arguments that a user hands to a model's factory: `key=value` texts, and dropout rates under each library's names."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time

from hybridpar.errors import UsageError, shortened

#: What a constructor says of an argument that it does not have, or that its builder sets itself.
_NOT_TAKEN = re.compile(r"(?:unexpected keyword argument|multiple values for (?:keyword )?argument) '(\w+)'")

#: What stands before the rate, as users type it.
_OPTIONS = {"drop_rate": "--drop ", "drop_path_rate": "--drop path="}


def parse_arguments(texts: Sequence[str]) -> dict[str, object]:
    """Read arguments of a model's factory as they are typed.

    Args:
        texts: `key=value` each. A value is a TOML value (`0.1`, `true`, `[1, 2]`), else a Python literal (`True`,
            `None`, `(1, 2)`), else the text as it is.

    Returns:
        Values by key.

    Raises:
        UsageError: A text is no `key=value`, or a key comes twice.
    """
    arguments: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UsageError(
                f"--model-arg {shortened(text)}",
                "It must be key=value, where key is an argument of the model's factory.",
                "Write for example --model-arg width=64.",
            )
        if key.strip() in arguments:
            raise UsageError(f"--model-arg {key.strip()} is given twice", fix="Leave out one of them.")
        arguments[key.strip()] = _value(value.strip())
    return arguments


def _value(text: str) -> object:
    try:
        table = tomllib.loads(f"value = {text}")
        if len(table) == 1 and not isinstance(table["value"], (date, time)):
            found: object = table["value"]
            return found
    except (tomllib.TOMLDecodeError, KeyError):
        pass
    try:
        literal: object = ast.literal_eval(text)
        return literal
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def with_rates(
    args: Mapping[str, object] | None, drop_rate: float | None, drop_path_rate: float | None
) -> dict[str, object]:
    """Arguments of a factory with the rates that are set, under the names of timm."""
    merged = dict(args or {})
    for key, rate in (("drop_rate", drop_rate), ("drop_path_rate", drop_path_rate)):
        if rate is None:
            continue
        if key in merged:
            raise UsageError(
                f"{_OPTIONS[key]}{rate:g} with --model-arg {key}={merged[key]}",
                "They say the same.",
                "Leave out one of them.",
            )
        merged[key] = rate
    return merged


def not_taken(name: str, key: str, takes: Sequence[str] = ()) -> UsageError:
    """The error for an argument that a model does not take."""
    option = _OPTIONS.get(key, f"--model-arg {key}").rstrip(" =")
    what = {"drop_rate": "dropout rate", "drop_path_rate": "rate of stochastic depth"}.get(key, f"argument {key!r}")
    known = f"It takes {', '.join(takes)}." if takes else ""
    return UsageError(f"{option} with {name}: this model has no {what} to set", known, f"Leave {option} out.")


def refused_argument(error: Exception, args: Mapping[str, object]) -> str | None:
    """The argument of the user's that a constructor did not take."""
    found = _NOT_TAKEN.search(str(error)) if isinstance(error, TypeError) else None
    return found[1] if found is not None and found[1] in args else None


def not_built(name: str, args: Mapping[str, object], error: Exception) -> UsageError:
    """The error for a model of a library that cannot be built with the arguments that were given."""
    given = ", ".join(f"{key}={value!r}" for key, value in args.items())
    return UsageError(
        f"building {name} with {given or 'its defaults'} failed: {type(error).__name__}: {error}",
        fix="Correct --model-arg; --debug shows the whole traceback.",
    )
