"""Reads files that may be damaged or hostile; texts in bounded time and memory.

JSON, TOML and files of `torch.save`. Whatever is wrong with a file is told as one short error of the class that the
caller names; nothing in a file is ever run. Limits are far above what this package writes: bytes of a file, depth of
what is nested in it, digits of an integer.
"""

from __future__ import annotations

import argparse
import json
import pickle
import stat
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.errors import HybridparError, shortened

if TYPE_CHECKING:
    from pydantic import ValidationError

#: Bytes of a file that is read as a whole, unless a reader says otherwise.
MOST_BYTES = 64 << 20

#: How deep lists and tables may lie in each other.
MOST_DEPTH = 100

#: Integers are below this in size: those of 64 bits, signed or not, are.
_INTEGERS = 10**20

#: Mistakes in a file of which the first is named.
_MOST_PROBLEMS = 10_000

#: Characters of a line of TOML: the parser's time grows with the square of a key's parts.
_MOST_LINE = 4_000


class Unreadable(ValueError):
    """What is wrong with a text or a file, in a few words."""


# ------------------------------------------------------------------------------------------------------- whole files


def read_text(
    path: Path,
    kind: str,
    error: type[HybridparError],
    fix: str = "",
    *,
    why: str = "",
    most: int = MOST_BYTES,
    errors: str = "strict",
) -> str:
    """The text of a file in UTF-8."""
    text: str = _read(path, kind, error, why, fix, most, lambda data: data.decode("utf-8", errors))
    return text


def read_json(
    path: Path, kind: str, error: type[HybridparError], fix: str = "", *, why: str = "", most: int = MOST_BYTES
) -> Any:
    """What a JSON file holds. Errors are those of `read_text`."""
    return _read(path, kind, error, why, fix, most, lambda data: parse_json(data.decode()))


def read_toml(path: Path, kind: str, error: type[HybridparError], fix: str = "", *, why: str = "") -> dict[str, Any]:
    """What a TOML file holds. Errors are those of `read_text`."""
    value: dict[str, Any] = _read(path, kind, error, why, fix, 1 << 20, lambda data: parse_toml(data.decode()))
    return value


def _read(
    path: Path,
    kind: str,
    error: type[HybridparError],
    why: str,
    fix: str,
    most: int,
    parse: Callable[[bytes], Any],
) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise Unreadable(f"it has more than {most:,} bytes")
        return parse(data)
    except (OSError, ValueError) as cause:  # Unreadable among them, and a path with a NUL
        reason = cause.strerror if isinstance(cause, OSError) else None
        if isinstance(cause, UnicodeDecodeError):
            reason = "it is not text in UTF-8"
        raise error(f"cannot read {kind} {shortened(path)}: {reason or cause}", why, fix) from cause


# ------------------------------------------------------------------------------------------------------------- texts


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON: {error.msg}, line {error.lineno}") from error
    except UnicodeDecodeError as error:
        raise Unreadable("it is not text in UTF-8") from error
    except ValueError as error:  # of int()
        raise Unreadable("an integer in it has too many digits") from error
    except RecursionError as error:
        raise Unreadable(_TOO_DEEP) from error
    _check_plain(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML text says."""
    if max(map(len, text.splitlines()), default=0) > _MOST_LINE:
        raise Unreadable(f"a line has more than {_MOST_LINE:,} characters")
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Unreadable(f"it is not TOML: {shortened(error)}") from error
    except ValueError as error:
        raise Unreadable("a number or a date in it cannot be") from error
    except RecursionError as error:
        raise Unreadable(_TOO_DEEP) from error
    _check_plain(value)
    return value


_TOO_DEEP = f"it is nested more than {MOST_DEPTH} deep"


def _check_plain(value: object) -> None:
    """Check the depth, integers and texts of what a parser returned, in which nothing is in two places."""
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for item in level:
            kind = type(item)  # parsers make no subclasses, and files of metrics have millions of values
            if kind is str:
                if not item.isascii():
                    _check_text(item)
            elif kind is dict:
                inner += item.keys()
                inner += item.values()
            elif kind is list:
                inner += item
            elif kind is int and not -_INTEGERS < item < _INTEGERS:
                raise Unreadable("an integer in it has too many digits")
        if not inner:
            return
        level = inner
    raise Unreadable(_TOO_DEEP)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a pair of surrogates, which can be neither printed nor written
        raise Unreadable("a text in it is no Unicode") from error


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Where and what is the first thing that pydantic found wrong, both short."""
    count = error.error_count()
    if count > _MOST_PROBLEMS:  # listing them takes long, too
        return "", f"{count:,} values in it are not what they should be"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return shortened(where), shortened(first["msg"].removeprefix("Value error, "))


# --------------------------------------------------------------------------------------------------- files of torch


def read_torch(path: Path) -> dict[str, Any]:
    """The dictionary in a file of `torch.save`, read with `weights_only`; its tensors are pages of the file.

    A `Namespace` is let through: checkpoints of timm and of torchvision's references hold their options in one.
    """
    import torch

    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise Unreadable("it is no regular file")
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Unreadable:
        raise
    except pickle.UnpicklingError as error:
        raise Unreadable("it is damaged, or holds more than tensors and plain values") from error
    except Exception as error:  # torch and its pickle raise nearly anything for a damaged file
        reason = str(error).strip().partition("\n")[0]
        raise Unreadable(shortened(reason) if reason else type(error).__name__) from error
    if not isinstance(loaded, dict):
        raise Unreadable(f"it holds a {type(loaded).__name__} where a dictionary was written")
    return loaded
