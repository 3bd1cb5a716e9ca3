"""Arguments that a user hands to a model's builder: `key=value` texts, and what a builder does with them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date, time
from typing import TYPE_CHECKING

from hybridpar.errors import UsageError, check, shortened, user_error

if TYPE_CHECKING:
    from torch import nn

#: What a constructor says of an argument that it does not have, or that its builder sets itself.
_NOT_TAKEN = re.compile(r"(?:unexpected keyword argument|multiple values for (?:keyword )?argument) '(\w+)'")

#: What users type for a rate.
_OPTIONS = {"drop_rate": "--drop", "drop_path_rate": "--drop path"}


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
        key, equals, value = (part.strip() for part in text.partition("="))
        rule = "It must be key=value, where key is an argument of the model's factory."
        valid = bool(equals) and key.isidentifier()
        check(valid, f"--model-arg {shortened(text)}", rule, "Write for example --model-arg width=64.")
        check(key not in arguments, f"--model-arg {key} is given twice", fix="Leave out one of them.")
        arguments[key] = _value(value)
    return arguments


def _value(text: str) -> object:
    with suppress(tomllib.TOMLDecodeError, KeyError):
        table = tomllib.loads(f"value = {text}")
        if len(table) == 1 and not isinstance(table["value"], (date, time)):
            return table["value"]
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    return text


def with_rates(
    args: Mapping[str, object] | None, drop_rate: float | None, drop_path_rate: float | None
) -> dict[str, object]:
    """Arguments of a factory with the rates that are set, under the names of timm."""
    rates = {"drop_rate": drop_rate, "drop_path_rate": drop_path_rate}
    given: dict[str, object] = {key: rate for key, rate in rates.items() if rate is not None}
    for key in given.keys() & (args or {}).keys():
        raise UsageError(f"{_OPTIONS[key]} with --model-arg {key}", "They say the same.", "Leave out one of them.")
    return {**(args or {}), **given}


def not_taken(name: str, key: str, takes: Sequence[str] = ()) -> UsageError:
    """The error for an argument that a model does not take."""
    option = _OPTIONS.get(key, f"--model-arg {key}")
    what = {"drop_rate": "dropout rate", "drop_path_rate": "rate of stochastic depth"}.get(key, f"argument {key!r}")
    rule = f"It takes {', '.join(takes)}." if takes else ""
    return UsageError(f"{option} with {name}: this model has no {what} to set", rule, f"Leave {option} out.")


def refused_argument(error: Exception, args: Mapping[str, object]) -> str | None:
    """The argument of the user's that a constructor did not take."""
    match = _NOT_TAKEN.search(str(error)) if isinstance(error, TypeError) else None
    return match[1] if match is not None and match[1] in args else None


def build_with(name: str, args: Mapping[str, object], build: Callable[[], nn.Module]) -> nn.Module:
    """What a builder builds with arguments of the user's; what it does not take, and its failure, are one error."""
    try:
        return build()
    except (Exception, SystemExit) as error:  # whatever a constructor, or a script that is imported, raises
        if isinstance(error, Exception) and (key := refused_argument(error, args)) is not None:
            raise not_taken(name, key) from error
        given = ", ".join(f"{key}={shortened(repr(value))}" for key, value in args.items())
        raise user_error(f"building {name}{given and f' with {given}'} failed", error) from error
