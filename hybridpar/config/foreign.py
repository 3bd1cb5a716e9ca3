"""Options by the names that other trainers give them, and what they are called here.

python -m hybridpar.config.foreign > docs/names.md
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hybridpar.errors import UsageError, shortened


@functools.cache
def foreign_names() -> dict[str, dict[str, str]]:
    """By who calls them so: the names, and what to write instead, with VALUE for what stands behind the name."""
    return {who: rows for who, rows in _file().items() if isinstance(rows, dict)}


@functools.cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def check_foreign(words: Sequence[str], options: type) -> None:
    """Refuse an option by another trainer's name, and say what to write."""
    ours = {field.name.replace("_", "-") for field in fields(options)} - {"model"}  # which has no flag
    names = {
        name: (who, text) for who, rows in foreign_names().items() for key, text in rows.items() for name in key.split()
    }
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name not in names or name[2:] in ours:
            continue
        who, text = names[name]
        value = value if equals else "" if following.startswith("-") else following
        instead = text.replace("VALUE", shortened(value)) if value else text
        why, _, reason = instead.partition("nothing: ")
        fix = f"Leave it out: {reason}." if reason else f"Write {why}."
        raise UsageError(f"there is no option {name}", f"It is a name of {who}.", fix)


def page() -> str:
    """The page of the documentation that lists all names."""
    lines = [_file()["page"].rstrip()]
    for who, rows in foreign_names().items():
        lines += ["", f"## {who}", "", "| there | here |", "|---|---|"]
        lines += [f"| {', '.join(f'`{name}`' for name in key.split())} | {text} |" for key, text in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
