"""Options and their values as other trainers write them, and what they are called here.

python -m hybridpar.config.foreign > docs/names.md
"""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hybridpar.errors import UsageError

#: Options whose values are a name, and keys behind a colon. Behind other values the keys follow a comma.
_NAMED = ("--augment", "--data", "--loss", "--lr-schedule", "--optimizer")


@functools.cache
def tables() -> dict[str, Any]:
    """By who calls them so, the `names` of options, and the `values` of our options; and what to write instead."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class _Answer(NamedTuple):
    """What to write for an option.

    Attributes:
        wrong: What others write; empty where it is right here.
        is_typed: Whether the value stands in the command line.
        option: What to write; empty where the option is to be left out.
        value: What to write behind it.
        remark: What else to say.
    """

    wrong: str
    is_typed: bool
    option: str
    value: str
    remark: str


def check_foreign(words: Sequence[str], options: type) -> None:
    """Refuse options by other trainers' names, or with their values, and say what to write for all of them."""
    # Of several values, what is typed counts, and not what a name alone stands for.
    answers = sorted(_answers(words, options), key=lambda answer: answer.is_typed)
    line, wrong = [], [answer for answer in answers if answer.wrong]
    for option in dict.fromkeys(answer.option for answer in wrong if answer.option):
        values = [answer.value for answer in answers if answer.option == option]
        for value in values if option == "--model-arg" else [_merged(option, values)]:
            line += [option, value] if value else [option]
    if wrong:
        what = f"there is no {', no '.join(answer.wrong for answer in wrong)}"
        fixes = [f"{answer.wrong}: {answer.remark}." for answer in wrong if answer.remark]
        fixes = [f"Write {shlex.join(line)}", *fixes] if line else fixes
        raise UsageError(what, "Other trainers call it so; docs/names.md lists such names.", "\n".join(fixes))


def _answers(words: Sequence[str], options: type) -> Iterator[_Answer]:
    """The options of a command line, by the names and with the values that they have here."""
    ours = {f"--{field.name.replace('_', '-')}" for field in fields(options)} - {"--model"}  # which has no flag
    names = {name: text for rows in tables()["names"].values() for key, text in rows.items() for name in key.split()}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        behind = [value] if equals else list(takewhile(lambda text: not text.startswith("-"), words[index + 1 :]))
        text, typed = names.get(flag, ""), f"{name} {behind[0]}" if behind else f"{name} without a value"
        if flag in ours and (behind or not text.startswith(f"{flag} ")):  # else others write it without a value
            text = f"{flag} VALUE" if behind else flag
        if text:
            option, value, remark = _translated(text, behind)
            wrong = name if flag not in ours else typed if (option, value) != (flag, "".join(behind[:1])) else ""
            yield _Answer(wrong, "VALUE" in text, option, value, remark)


def _translated(text: str, behind: Sequence[str]) -> tuple[str, str, str]:
    """Option, value and remark of a row of the table, with the words behind the name."""
    numbers = "/".join(takewhile(lambda word: re.fullmatch(r"[\d.e-]+", word), behind))
    row, _, remark = text.removesuffix(")").partition("(")
    option, _, value = row.strip().partition(" ")
    first = behind[0] if behind else "VALUE"
    value, remark = value.replace("VALUES", numbers or first).replace("VALUE", first), remark.replace("VALUE", first)
    for patterns, instead in tables()["values"].get(option, {}).items():
        for pattern in patterns.split():
            if match := re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), value):
                row = instead if instead.startswith("--") else f"{option} {instead}"
                return _translated(row.replace("*", "".join(match.groups()[:1])), [value])
    return option, value, remark


def _merged(option: str, values: Sequence[str]) -> str:
    """Several values of an option as one: of two names, or two values of a key, the last one counts."""
    parts = [re.fullmatch(r"(?:([^=]*)[:,])?(\w+=.*)|(.*)", value) for value in values]
    heads = [part[3] for part in parts if part and part[3]] or [part[1] for part in parts if part and part[1]]
    keys = {pair.partition("=")[0]: pair for part in parts if part and part[2] for pair in part[2].split(",")}
    between = ":" if option in _NAMED and heads and ":" not in heads[-1] else ","
    return between.join(filter(None, ["".join(heads[-1:]), ",".join(keys.values())]))


def page() -> str:
    """The page of the documentation that lists all names and values."""
    lines = [tables()["page"].rstrip()]
    for title, rows in [*tables()["names"].items(), *tables()["values"].items()]:
        lines += ["", f"## {title}", "", "| there | here |", "|---|---|"]
        # Without those that are to be left out.
        lines += [f"| `{key.replace(' ', '`, `')}` | {text} |" for key, text in rows.items() if text[0] != "("]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
