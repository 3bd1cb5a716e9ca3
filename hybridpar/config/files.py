"""Configuration files: options of a training run in TOML.

    model = "resnet18"

    [model-and-data]
    batch-size = 128

    [optimisation]
    lr = 0.1

Tables are for the reader: a run writes its options in those that are named after the groups of `train --help`. Options
that are typed win over the file, and the file over the preset. Values have the types of `TrainConfig`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
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
    defaults, file = defaults_of(TrainConfig), shortened(path)
    types_of = {"model": str, **fields_of(TrainConfig)}
    del types_of["given"]  # no option
    values: dict[str, Any] = {}
    for key, value in _entries(path):
        name = key.replace("-", "_")
        if name not in types_of:
            near = nearest(key, [option.replace("_", "-") for option in types_of])
            fix = "`hybridpar train --help-all` shows all of them."
            raise UsageError(f"{file}: unknown option {shortened(repr(key))}", near, fix)
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


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Key and value of all entries of a file, in whatever table they stand."""
    fix = "A string needs quotes, and true and false are written small."
    content = read_toml(path, "the configuration", UsageError, fix, why="It is a TOML file of options.")
    for key, value in content.items():
        yield from value.items() if isinstance(value, dict) else [(key, value)]


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
    for title, bases in GROUPS.items():
        out += ["", f"[{title.lower().replace(' ', '-')}]"]
        for name in (option.name for base in bases for option in fields(base)):
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
