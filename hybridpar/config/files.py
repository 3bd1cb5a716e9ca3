"""Configuration files: options of a training run in TOML, in tables named after the groups of `train --help`.

    model = "resnet18"

    [model-and-data]
    batch-size = 128

    [optimisation]
    lr = 0.1

A file is turned into the words of a command line, so that its values are read and checked like those that are typed.
Options that are typed win over `--set`, `--set` over the file, and the file over the preset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from hybridpar.config.train import GROUPS, TrainConfig
from hybridpar.errors import UsageError, nearest

#: Presets that ship with the package.
PRESETS = Path(__file__).parent / "presets"

#: Options on where a run writes, which a run that is repeated must not take over.
_OF_ONE_RUN = ("run_dir", "resume", "overwrite", "debug")

#: Options of the command line that name files and settings.
_SOURCES = ("--preset", "--config", "--set")


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Where options come from that are not typed; `expand` replaces these by what they stand for."""

    preset: str | None = None
    """Take the options of a preset; `list` prints the names of all and ends."""
    config: Path | None = None
    """Take the options of a TOML file, such as config.toml of a run. What is typed wins over it."""
    set: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Set an option as a TOML file would, such as lr=0.1."""


@dataclass(frozen=True)
class Setting:
    """The value of one option in a file, or behind `--set`.

    Attributes:
        name: Field of `TrainConfig`, or `model`.
        value: As TOML reads it.
        place: Where it stands, for messages.
    """

    name: str
    value: Any
    place: str

    def words(self) -> list[str]:
        """The option as it is typed on a command line."""
        if self.name == "model":
            return [str(self.value)]
        option, default = self.name.replace("_", "-"), _fields()[self.name].default
        if isinstance(default, bool) and isinstance(self.value, bool):
            return [] if self.value == default else [f"--{option}" if self.value else f"--no-{option}"]
        if isinstance(self.value, list) and "UseAppendAction" in str(_fields()[self.name].type):
            return [f"--{option}={one}" for one in self.value]
        if isinstance(self.value, list):
            return [f"--{option}", *map(str, self.value)]
        return [f"--{option}={self.value}"]


def expand(words: Sequence[str], parse: Callable[[list[str]], object]) -> list[str]:
    """Replace `--preset`, `--config` and `--set` on a command line by the options that they stand for."""
    given, own = _sources(words)
    if not given or {"--help", "-h", "--help-all"} & set(own):
        return list(words)
    if "list" in given.get("--preset", ()):
        names = preset_names()
        for name, description in names.items():
            print(f"{name:{max(map(len, names))}}  {description}")
        raise SystemExit(0)
    settings: dict[str, Setting] = {}
    for source in _SOURCES:
        for text in given.get(source, ()):
            settings |= {one.name: one for one in _read_source(source, text)}
    model = settings.pop("model", None)
    typed = {word.partition("=")[0][2:].removeprefix("no-").replace("-", "_") for word in own if word.startswith("--")}
    added = [one for name, one in settings.items() if name not in typed]
    for one in added:
        _check(one, parse)
    line = [*(word for one in added for word in one.words()), *own]
    # A word in front of all options is a model, also where another word is wrong and nothing can be parsed.
    named = bool(own) and not own[0].startswith("-")
    return line if model is None or named or _parses(parse, line) else [*model.words(), *line]


def read_settings(path: Path, label: str | None = None) -> list[Setting]:
    """Read a configuration file."""
    label = label or str(path)
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
    found: dict[str, Setting] = {}
    for table, key, value in _entries(tables, label):
        name = key.replace("-", "_")
        place = f"{label}, line {_line_of(lines, key, table)}"
        _require_known(name, key, table, place)
        if name in found:
            raise UsageError(f"{key} is set twice, in {found[name].place} and in {place}", "An option has one value.")
        if name in ("plan", "resume_from", "timeline") and value not in ("auto", "none"):
            value = str(path.parent / str(value))
        found[name] = Setting(name, value, place)
    return list(found.values())


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


def _fields() -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(TrainConfig)}


def _sources(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The presets, files and settings that a command line names, and its other words."""
    given: dict[str, list[str]] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        option, equals, value = word.partition("=")
        if option not in _SOURCES:
            rest.append(word)
            continue
        if not equals and (value := next(left, "")) == "":
            raise UsageError(f"{option} without a value", f"It takes {'KEY=VALUE' if option == '--set' else 'a name'}.")
        given.setdefault(option, []).append(value)
    return given, rest


def _read_source(source: str, text: str) -> list[Setting]:
    if source == "--preset":
        return read_settings(preset_file(text), f"the preset {text}")
    if source == "--config":
        return read_settings(Path(text))
    key, equals, value = text.partition("=")
    place = f"--set {text}"
    if not equals:
        raise UsageError(place, "It takes KEY=VALUE.", f"Write --set {key}=VALUE.")
    name = key.strip().replace("-", "_")
    _require_known(name, key.strip(), None, place)
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a string needs no quotes here
    return [Setting(name, parsed, place)]


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
        for inner, one in value.items():
            yield key, inner, one


def _require_known(name: str, key: str, table: str | None, place: str) -> None:
    """Refuse a key that is no option, or is in another group's table."""
    homes = {
        field.name: title for title, bases in GROUPS.items() for base in bases for field in dataclasses.fields(base)
    }
    if name == "model" and table is None:
        return
    if name not in homes:
        keys = [one.replace("_", "-") for one in homes]
        inside = [one.replace("_", "-") for one, title in homes.items() if table in (None, table_name(title))]
        raise UsageError(
            f"{place}: unknown option {key!r}",
            nearest(key, keys),
            f"Options{'' if table is None else f' of [{table}]'}: {', '.join(inside)}.",
        )
    if table is not None and table != (home := table_name(homes[name])):
        raise UsageError(f"{place}: {key} is in [{table}]", f"It is an option of [{home}].", f"Move it to [{home}].")


def _line_of(lines: Sequence[str], key: str, table: str | None) -> int:
    """Number of the line that sets a key, from 1."""
    at: str | None = None
    for number, line in enumerate(lines, 1):
        if header := re.match(r"\s*\[\s*[\"']?([^\"'\]]+?)[\"']?\s*\]", line):
            at = header[1]
        elif re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line) and at == table:
            return number
    return 1


def _check(setting: Setting, parse: Callable[[list[str]], object]) -> None:
    """Refuse a value that the command line would not take for its option."""
    if isinstance(setting.value, dict) or not _parses(parse, ["model", *setting.words()]):
        default = _fields()[setting.name].default
        raise UsageError(
            f"{setting.place}: {setting.name.replace('_', '-')} cannot be {_toml(setting.value)}",
            f"Its default is {_toml(default)}." if default is not None else "It is unset by default.",
            "`hybridpar train --help-all` says what it takes.",
        )


def _parses(parse: Callable[[list[str]], object], words: list[str]) -> bool:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            parse(words)
        except SystemExit:
            return False
    return True


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
