"""Configuration files: options of a training run in TOML, in tables named after the groups of `train --help`.

    model = "resnet18"

    [model-and-data]
    batch-size = 128

    [optimisation]
    lr = 0.1

Tables may be left out. Options that are typed win over the file, and the file over the preset. Values have the types of
`TrainConfig`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from hybridpar.config.train import GROUPS, TrainConfig
from hybridpar.errors import UsageError, check, nearest, shortened
from hybridpar.formats.file_reader import read_toml
from hybridpar.spec import Options, defaults_of, fields_of, validated

#: Presets that ship with the package.
PRESETS = Path(__file__).parent / "presets"

#: Options on where a run writes, which a run that is repeated must not take over.
_OF_ONE_RUN = ("run_dir", "resume", "debug")

#: Options whose values are paths that are relative to the file.
_PATHS = ("plan", "resume_from", "timeline")


class FileOptions(Options):
    """Where options come from that are not typed; see `read_sources`.

    Attributes:
        preset: Take the options of a preset; `list` prints the names of all and ends.
        config: Take the options of a TOML file, such as config.toml of a run. What is typed wins over it.
    """

    preset: str | None = None
    config: Path | None = None


def read_sources(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The values in the presets and files that a command line names, and its other words."""
    values: dict[str, dict[str, Any]] = {"--preset": {}, "--config": {}}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        option, equals, value = word.partition("=")
        if option not in values:
            rest.append(word)
            continue
        if not equals and (value := next(left, "")) == "":
            raise UsageError(f"{option} without a value", "It takes a name.")
        if (option, value) == ("--preset", "list"):
            names = preset_names()
            for name, description in names.items():
                print(f"{name:{max(map(len, names))}}  {description}")
            raise SystemExit(0)
        values[option] |= read_settings(preset_file(value) if option == "--preset" else Path(value))
    return {**values["--preset"], **values["--config"]}, rest


def read_settings(path: Path) -> dict[str, Any]:
    """The options that a configuration file sets, and the `model`, by name."""
    types_of, defaults, file = {**fields_of(TrainConfig), "model": str}, defaults_of(TrainConfig), shortened(path)
    tables = {option.name: title for title, options in _tables().items() for option in options} | {"model": ""}
    values: dict[str, Any] = {}
    for table, key, value in _entries(path):
        name = key.replace("-", "_")
        if name not in tables:
            near = nearest(key, [option.replace("_", "-") for option in tables])
            fix = "`hybridpar train --help-all` shows all of them."
            raise UsageError(f"{file}: unknown option {shortened(repr(key))}", near, fix)
        why = f"It is an option of [{tables[name]}]." if tables[name] else "It stands above all tables."
        check(table in ("", tables[name]), f"{file}: {key} in [{table}]", why, "Move it there.")
        check(name not in values, f"{file} sets {key} twice", "An option has one value.")
        if name in _PATHS and isinstance(value, str) and value not in ("auto", "none"):
            value = str(path.parent / value)
        if value == "none" and defaults.get(name, "") is None:  # as on the command line
            values[name] = None
        else:
            what = f"{file}: {key} cannot be {shortened(_toml(value))}"
            fix = "`hybridpar train --help-all` says what it takes."
            values[name] = validated(what, types_of[name], value, fix, toml=True)
    return values


def _tables() -> dict[str, list[Field[Any]]]:
    """The options that each table of a configuration file holds."""
    return {
        title.lower().replace(" ", "-"): [option for base in bases for option in fields(base)]
        for title, bases in GROUPS.items()
    }


def _entries(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Table, key and value of all entries of a file; those above all tables have none."""
    fix = "A string needs quotes, and true and false are written small."
    for key, value in read_toml(
        path, "the configuration", UsageError, fix, why="It is a TOML file of options."
    ).items():
        if not isinstance(value, dict):
            yield "", key, value
        elif key in (names := _tables()):
            yield from ((key, *entry) for entry in value.items())
        else:
            what = f"{shortened(path)} has an unknown table [{shortened(key)}]"
            raise UsageError(what, nearest(key, names), f"Tables: {', '.join(names)}.")


def preset_names() -> dict[str, str]:
    """The presets that ship with the package."""
    files = sorted(PRESETS.glob("*.toml"))
    return {file.stem: file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for file in files}


def preset_file(name: str) -> Path:
    """The file of a preset."""
    if name not in (names := preset_names()):
        fix = "`hybridpar train --preset list` shows all of them."
        raise UsageError(f"unknown preset {name!r}", nearest(name, names), fix)
    return PRESETS / f"{name}.toml"


def config_text(config: TrainConfig, model: str, named: Collection[str] = (), plan: str | None = None) -> str:
    """The complete configuration of a run as a TOML file.

    Options that were neither named nor changed are comments: the planner decides on those that are left open, also when
    the run is repeated.
    """
    out = ["# Options of this run; those behind # have their defaults, or are decided by the plan.", ""]
    out.append(f"model = {_toml(model)}")
    for table, options in _tables().items():
        out += ["", f"[{table}]"]
        for name in (option.name for option in options):
            value = getattr(config, name)
            if name in _PATHS and value not in (None, "auto", "none"):
                value = os.path.abspath(value)  # a file is read relative to its folder
            line = name.replace("_", "-") + ("" if value is None else f" = {_toml(value)}")
            active = name in {*named, *config.changed} and name not in _OF_ONE_RUN and value is not None
            if name == "plan" and plan is not None:
                line, active = f"plan = {_toml(plan)}  # as it was found; auto: search again", True
            out.append(line if active else f"# {line}")
    return "\n".join(out) + "\n"


def _toml(value: object) -> str:
    """A value as TOML writes it, which is as JSON does."""
    return json.dumps(value, ensure_ascii=False, default=str)
