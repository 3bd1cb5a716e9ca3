"""`hybridpar presets`: lists the options that ship with the package as configuration files, or prints one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from hybridpar.commands import register_command
from hybridpar.config.files import preset_file, preset_names


@dataclass(frozen=True, kw_only=True)
class Presets:
    """List the presets for `hybridpar train --preset NAME`, or print one of them as a configuration file."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None
    """Print this preset; redirect it into a file to change it."""


@register_command("presets", "List the presets of `hybridpar train --preset`, or print one of them.", Presets)
def run_presets(options: Presets, command_line: Sequence[str]) -> int:
    """Print the presets.

    Args:
        options: The options.
        command_line: The whole command line.

    Returns:
        0.

    Raises:
        UsageError: There is no such preset.
    """
    if options.name is not None:
        print(preset_file(options.name).read_text(encoding="utf-8"), end="")
        return 0
    names = preset_names()
    for name, description in names.items():
        print(f"{name:{max(map(len, names))}}  {description}")
    return 0
