"""Options by the names that other trainers give them, and what they are called here.

python -m hybridpar.config.foreign > docs/names.md
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from hybridpar.errors import UsageError, shortened


@functools.cache
def foreign_names() -> dict[str, dict[str, str]]:
    """By who calls them so: the names, and what to write instead, with VALUE for what stands behind the name."""
    names: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return names


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
    lines = [
        "# Names of options in other trainers",
        "",
        "Where a name on the left is typed, the command line answers with what stands on the right. VALUE is what was",
        "typed behind the name. All options: `hybridpar train --help-all`.",
        "",
        "## Same words, another meaning",
        "",
        "- `--batch-size` counts the whole batch, over all workers.",
        "- Training processes are `--nproc`; loader processes, per worker, are `--loader-workers`.",
        "- The warm-up and the cool-down lie within `--epochs`. timm adds the cool-down to them, and with",
        "  `--warmup-prefix` the warm-up.",
        "- The milestones of `multistep` are those of torch's MultiStepLR. timm lowers the rate one epoch earlier.",
    ]
    for who, rows in foreign_names().items():
        lines += ["", f"## {who}", "", "| there | here |", "|---|---|"]
        lines += [f"| {', '.join(f'`{name}`' for name in key.split())} | {text} |" for key, text in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
