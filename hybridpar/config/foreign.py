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
def foreign_names() -> dict[str, dict[str, str]]:
    """By who calls them so: the names, and what to write instead, with VALUE for what stands behind the name."""
    return {who: rows for who, rows in _file().items() if isinstance(rows, dict) and who != "values"}


def foreign_values() -> dict[str, dict[str, str]]:
    """By the name of an option here: values that others write behind it, and what to write instead."""
    return dict(_file()["values"])


@functools.cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class _Answer(NamedTuple):
    """What to write for a name or a value of another trainer.

    Attributes:
        wrong: What was typed; empty where it is right.
        who: Who calls it so.
        text: The row of the table.
        option: What to write; empty where the name is to be left out.
        value: What to write behind it.
        remark: What else to say; why it is left out.
    """

    wrong: str
    who: str
    text: str
    option: str
    value: str
    remark: str


def check_foreign(words: Sequence[str], options: type) -> None:
    """Refuse options by other trainers' names, or with their values, and say what to write for all of them."""
    answers = list(_answers(words, options))
    wrong = [answer for answer in answers if answer.wrong]
    if not wrong:
        return
    answers.sort(
        key=lambda answer: "VALUE" in answer.text
    )  # what is typed counts, and not what a name alone stands for
    line: list[str] = []
    for option in dict.fromkeys(answer.option for answer in wrong if answer.option):
        values = [answer.value for answer in answers if answer.option == option]
        for value in values if option == "--model-arg" else [_merged(option, values)]:
            line += [option, value] if value else [option]
    owners = dict.fromkeys(who for answer in wrong for who in re.split(", | and ", answer.who) if who)
    lines = [f"Write {shlex.join(line)}"] if line else []
    lines += [f"{answer.wrong}: {answer.remark}." for answer in wrong if answer.option and answer.remark]
    lines += [f"Leave out {answer.wrong}: {answer.remark}." for answer in wrong if not answer.option]
    raise UsageError(
        f"there is no {', no '.join(answer.wrong for answer in wrong)}",
        f"That is how {', '.join(owners) or 'other trainers'} call it.",
        "\n".join(lines),
    )


def _answers(words: Sequence[str], options: type) -> Iterator[_Answer]:
    """The options of a command line, by the names and with the values that they have here."""
    ours = {f"--{field.name.replace('_', '-')}" for field in fields(options)} - {"--model"}  # which has no flag
    names = {
        name: (who, text) for who, rows in foreign_names().items() for key, text in rows.items() for name in key.split()
    }
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        behind = [value] if equals else list(takewhile(lambda text: not text.startswith("-"), words[index + 1 :]))
        who, text = names.get(flag, ("", ""))
        if flag in ours and (behind or not text.startswith(f"{flag} ")):  # else others write it without a value
            who, text = "", f"{flag} VALUE" if behind else flag
        if text:
            answer = _translated(text, behind)
            is_right = not who and answer[:2] == (flag, "".join(behind[:1]))
            as_typed = name if flag not in ours else f"{name} {behind[0]}" if behind else f"{name} without a value"
            yield _Answer("" if is_right else as_typed, who, text, *answer)


def _translated(text: str, behind: Sequence[str]) -> tuple[str, str, str]:
    """Option, value and remark of a row of the table, with the words behind the name."""
    numbers = "/".join(takewhile(lambda word: re.fullmatch(r"[\d.e-]+", word), behind))
    text = text.replace("VALUES", numbers or "VALUES").replace("VALUE", behind[0]) if behind else text
    if text.startswith("nothing: "):
        return "", "", text.removeprefix("nothing: ")
    text, _, remark = text.removesuffix(")").partition(" (")
    option, _, value = text.partition(" ")
    for patterns, instead in foreign_values().get(option, {}).items():
        for pattern in patterns.split():
            if match := re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), value):
                instead = instead.replace("VALUE", value).replace("*", "".join(match.groups()[:1]))
                return _translated(instead if instead.startswith("--") else f"{option} {instead}", ())
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
    lines, values = [_file()["page"].rstrip()], {f"Values of `{key}`": rows for key, rows in foreign_values().items()}
    for title, rows in {**foreign_names(), **values}.items():
        lines += ["", f"## {title}", "", "| there | here |", "|---|---|"]
        lines += [f"| {', '.join(f'`{name}`' for name in key.split())} | {text} |" for key, text in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
