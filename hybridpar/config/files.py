"""Configuration files: options of a training run in TOML, in tables named after the groups of `train --help`.

    model = "resnet18"

    [model-and-data]
    batch-size = 128

    [optimisation]
    lr = 0.1

Options that are typed win over the file, and the file over the preset. Values have the types of `TrainConfig`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hybridpar.config.train import GROUPS, TrainConfig
from hybridpar.errors import UsageError, nearest

#: Presets that ship with the package.
PRESETS = Path(__file__).parent / "presets"

#: Options on where a run writes, which a run that is repeated must not take over.
_OF_ONE_RUN = ("run_dir", "resume", "overwrite", "debug")

#: Options whose values are paths that are relative to the file.
_PATHS = ("plan", "resume_from", "timeline")


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Where options come from that are not typed; see `read_sources`."""

    preset: str | None = None
    """Take the options of a preset; `list` prints the names of all and ends."""
    config: Path | None = None
    """Take the options of a TOML file, such as config.toml of a run. What is typed wins over it."""


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
        file, label = (preset_file(value), f"the preset {value}") if option == "--preset" else (Path(value), value)
        values[option] |= read_settings(file, label)
    return {**values["--preset"], **values["--config"]}, rest


def read_settings(path: Path, label: str) -> dict[str, Any]:
    """The options that a configuration file sets, and the `model`, by name; `label` names the file in messages."""
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UsageError(f"cannot read the configuration {label}: {reason}", "It is a TOML file of options.") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"cannot read the configuration {label}: {error}",
            "It is a TOML file of options.",
            "A string needs quotes, and true and false are written small.",
        ) from error
    lines = text.splitlines()
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    for table, key, value in _entries(tables, label):
        name = key.replace("-", "_")
        position = f"{label}, line {_line_of(lines, key, table)}"
        _require_known(name, key, table, position)
        if name in values:
            raise UsageError(f"{key} is set twice, in {where[name]} and in {position}", "An option has one value.")
        if name in _PATHS and value not in ("auto", "none"):
            value = str(path.parent / str(value))
        values[name], where[name] = _typed(name, value, position), position
    return values


def preset_names() -> dict[str, str]:
    """The presets that ship with the package."""
    files = sorted(PRESETS.glob("*.toml"))
    return {file.stem: file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for file in files}


def preset_file(name: str) -> Path:
    """The file of a preset."""
    names = preset_names()
    if name not in names:
        raise UsageError(
            f"unknown preset {name!r}",
            nearest(name, list(names)),
            "`hybridpar train --preset list` shows all of them.",
        )
    return PRESETS / f"{name}.toml"


def config_text(config: TrainConfig, model: str, named: Collection[str] = (), plan: str | None = None) -> str:
    """The complete configuration of a run as a TOML file.

    Options that were neither named nor changed are comments: the planner decides on those that are left open, also when
    the run is repeated.
    """
    out = ["# Options of this run; those behind # have their defaults, or are decided by the plan.", ""]
    out.append(f"model = {_toml(model)}")
    for title, bases in GROUPS.items():
        out += ["", f"[{table_name(title)}]"]
        for field in (field for base in bases for field in dataclasses.fields(base)):
            value = getattr(config, field.name)
            if field.name in _PATHS and value not in (None, "auto", "none"):
                value = os.path.abspath(value)  # a file is read relative to its folder
            if field.name == "plan" and plan is not None:
                out.append(f"plan = {_toml(plan)}  # as it was found; auto: search again")
                continue
            active = (field.name in named or value != field.default) and field.name not in _OF_ONE_RUN
            key = field.name.replace("_", "-")
            if value is None:
                out.append(f"# {key}")
            else:
                out.append(f"{'' if active else '# '}{key} = {_toml(value)}")
    return "\n".join(out) + "\n"


def table_name(title: str) -> str:
    """The table of a configuration file that holds the options of a group."""
    return title.lower().replace(" ", "-")


def _entries(tables: Mapping[str, Any], label: str) -> Iterable[tuple[str | None, str, Any]]:
    """Table, key and value of all entries; the table is None where an entry is in none."""
    names = [table_name(title) for title in GROUPS]
    for key, value in tables.items():
        if not isinstance(value, dict):
            yield None, key, value
            continue
        if key not in names:
            raise UsageError(
                f"{label} has an unknown table [{key}]", nearest(key, names), f"Tables: {', '.join(names)}."
            )
        for inner, setting in value.items():
            yield key, inner, setting


def _require_known(name: str, key: str, table: str | None, position: str) -> None:
    """Refuse a key that is no option, or is in another group's table."""
    titles = {
        field.name: title for title, bases in GROUPS.items() for base in bases for field in dataclasses.fields(base)
    }
    if name == "model" and table is None:
        return
    if name not in titles:
        keys = [option.replace("_", "-") for option in titles]
        inside = [option.replace("_", "-") for option, title in titles.items() if table in (None, table_name(title))]
        raise UsageError(
            f"{position}: unknown option {key!r}",
            nearest(key, keys),
            f"Options{'' if table is None else f' of [{table}]'}: {', '.join(inside)}.",
        )
    if table is not None and table != (right := table_name(titles[name])):
        raise UsageError(
            f"{position}: {key} is in [{table}]", f"It is an option of [{right}].", f"Move it to [{right}]."
        )


def _line_of(lines: Sequence[str], key: str, table: str | None) -> int:
    """Number of the line that sets a key, from 1."""
    at: str | None = None
    for number, line in enumerate(lines, 1):
        if header := re.match(r"\s*\[\s*[\"']?([^\"'\]]+?)[\"']?\s*\]", line):
            at = header[1]
        elif re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line) and at == table:
            return number
    return 1


@functools.cache
def _types() -> dict[str, Any]:
    return get_type_hints(TrainConfig, include_extras=True) | {"model": str}


def _typed(name: str, value: Any, position: str) -> Any:
    """A value of TOML as the type of an option has it."""
    from pydantic import TypeAdapter, ValidationError

    default = next((field.default for field in dataclasses.fields(TrainConfig) if field.name == name), None)
    if value == "none" and default is None and name != "model":  # as on the command line
        return None
    try:
        return TypeAdapter(_types()[name]).validate_python(value)
    except ValidationError:
        raise UsageError(
            f"{position}: {name.replace('_', '-')} cannot be {_toml(value)}",
            f"Its default is {_toml(default)}." if default is not None else "It is unset by default.",
            "`hybridpar train --help-all` says what it takes.",
        ) from None


def _toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "a table"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\t", "\\t") + '"'
