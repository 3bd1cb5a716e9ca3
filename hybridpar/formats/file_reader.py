"""Reads files that may be damaged or hostile; texts in bounded time and memory.

JSON, TOML and files of `torch.save`. Whatever is wrong with a file is told as one short error of the class that the
caller names; nothing in a file is ever run. Limits are far above what this package writes: bytes of a file, digits of
an integer in JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import pickle
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.errors import HybridparError, first_line, shortened

if TYPE_CHECKING:
    from pydantic import ValidationError

#: Bytes of a file that is read as a whole, unless a reader says otherwise.
MOST_BYTES = 64 << 20

#: Digits of an integer in JSON: those of 64 bits have fewer.
_MOST_DIGITS = 21

#: Mistakes in a file of which the first is named.
_MOST_PROBLEMS = 10_000

#: Characters of a line of TOML: the parser's time grows with the square of a key's parts.
_MOST_LINE = 4_000


class Unreadable(ValueError):
    """What is wrong with a text or a file, in a few words."""


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says."""
    try:
        value = json.loads(text, parse_int=_integer)
        json.dumps(value, ensure_ascii=False).encode()  # not with half of a pair of surrogates, which cannot be printed
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is not JSON: {shortened(error)}") from error
    return value


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError("an integer in it has too many digits")
    return int(text)


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML text says."""
    if max(map(len, text.splitlines()), default=0) > _MOST_LINE:
        raise Unreadable(f"a line has more than {_MOST_LINE:,} characters")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is not TOML: {shortened(error)}") from error


def read_text(
    path: Path,
    kind: str,
    error: type[HybridparError],
    fix: str = "",
    *,
    why: str = "",
    most: int = MOST_BYTES,
    errors: str = "strict",
    parse: Callable[[str], Any] = str,
) -> Any:
    """The text of a file in UTF-8, or what it says."""
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise Unreadable(f"it has more than {most:,} bytes")
        return parse(data.decode(errors=errors))
    except (OSError, ValueError) as cause:  # Unreadable among them, and a path with a NUL
        reason = cause.strerror if isinstance(cause, OSError) else None
        if isinstance(cause, UnicodeDecodeError):
            reason = "it is not text in UTF-8"
        raise error(f"cannot read {kind} {shortened(path)}: {reason or cause}", why, fix) from cause


#: What a JSON file holds.
read_json = functools.partial(read_text, parse=parse_json)
#: What a TOML file holds.
read_toml = functools.partial(read_text, parse=parse_toml, most=1 << 20)


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Where and what is the first thing that pydantic found wrong, both short."""
    count = error.error_count()
    if count > _MOST_PROBLEMS:  # listing them takes long, too
        return "", f"{count:,} values in it are not what they should be"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return shortened(where), shortened(first["msg"].removeprefix("Value error, "))


def read_torch(path: Path) -> dict[str, Any]:
    """The dictionary in a file of `torch.save`, read with `weights_only`; its tensors are pages of the file.

    A `Namespace` is let through: checkpoints of timm and of torchvision's references hold their options in one.
    """
    import torch

    if path.exists() and not path.is_file():
        raise Unreadable("it is no regular file")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise Unreadable("it is damaged, or holds more than tensors and plain values") from error
    except Exception as error:  # torch and its pickle raise nearly anything for a damaged file
        raise Unreadable(shortened(first_line(error))) from error
    if not isinstance(loaded, dict):
        raise Unreadable(f"it holds a {type(loaded).__name__} where a dictionary was written")
    return loaded
