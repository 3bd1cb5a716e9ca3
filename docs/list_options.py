"""Lists the options of `TrainConfig` with all that may stand inside them, and the codecs, for docs/reference.md.

    python docs/list_options.py      prints both lists

`site_hooks.py` puts them into the page when the site is built. Texts and defaults are those of the dataclasses, as in
`hybridpar train --help-all`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import MISSING, fields
from typing import Any

from hybridpar.commands import option_texts
from hybridpar.config.train import GROUPS, TrainConfig
from hybridpar.spec import Spec, choices_of, defaults_of, unnamed_of

#: What every codec has; listed behind all of them.
EVERY_CODEC = ("feedback", "decay", "warmup", "cast")


def options_list() -> str:
    """All options in the groups of `--help`; behind these the keys that are written inside some of them."""
    texts, lines = option_texts(TrainConfig), []
    for title, kinds in GROUPS.items():
        rows = [
            (f"`{option.name}`", as_text(option.default), texts[option.name])
            for kind in kinds
            for option in fields(kind)
        ]
        lines += [f"### {title}", "", *table(("option", "default", ""), rows), ""]
    for option, kind in specs():
        choices = choices_of(kind) or {"": kind}
        shared = set.intersection(*(set(defaults_of(choice)) for choice in choices.values()))
        lines += [f"### Inside `{option}`", ""]
        lines += [f"- `{syntax(name, choice, shared if name else ())}`" for name, choice in choices.items()]
        if shared and "" not in choices:
            lines.append(f"- each of them also with `{keys_text(kind, shared)}`")
        lines.append("")
        rows = [(f"`{key}`", text) for choice in choices.values() for key, text in keys(choice)]
        lines += [*table(("key", ""), dict.fromkeys(rows)), ""]
    return "\n".join(lines)


def codecs_list() -> str:
    """All codecs as they are written, with their defaults, and what their keys are."""
    from hybridpar.compress import CODECS, Codec

    every, lines = dict(keys(Codec)), []
    for name, text in CODECS.describe().items():
        codec = CODECS.get(name)
        lines += [f"- `{syntax(name, codec, EVERY_CODEC)}`: {text}."]
        lines += [f"    - `{key}`: {text}" for key, text in keys(codec) if key not in EVERY_CODEC]
    return "\n".join([*lines, "- with each of them:", *(f"    - `{key}`: {every[key]}" for key in EVERY_CODEC)])


def specs() -> Iterator[tuple[str, type]]:
    """The options whose text stands for a dataclass, and that dataclass, or the base of several."""
    for kinds in GROUPS.values():
        for owner in kinds:
            yield from ((spec.option, spec.kind) for spec in vars(owner).values() if isinstance(spec, Spec))


def syntax(name: str, kind: type, left_out: Collection[str] = ()) -> str:
    """A choice with all of its keys at their defaults, as users write it."""
    keys = keys_text(kind, {key.name for key in fields(kind)} - set(left_out))
    return ":".join(filter(None, (name, ",".join(filter(None, (*unnamed_of(kind).values(), keys))))))


def keys_text(kind: type, names: Collection[str]) -> str:
    """These keys of a choice at their defaults."""
    keys = [key for key in fields(kind) if key.name in names and key.name not in unnamed_of(kind)]
    return ",".join(f"{key.name}={'...' if key.default is MISSING else as_text(key.default, 'auto')}" for key in keys)


def keys(kind: type) -> list[tuple[str, str]]:
    """Each key of a choice as it is written, with its text."""
    unnamed, texts = unnamed_of(kind), option_texts(kind)
    return [(unnamed.get(key.name, key.name), texts[key.name]) for key in fields(kind)]


def as_text(value: Any, none: str = "") -> str:
    """A default as users write it."""
    if value is None or value == ():
        return none
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return "/".join(map(as_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    cells = [[cell.replace("|", r"\|") for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]


if __name__ == "__main__":
    print(options_list(), codecs_list(), sep="\n")
