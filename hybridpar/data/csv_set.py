"""Images that a table lists: `--data csv`."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import NamedTuple

from hybridpar.config import DataConfig
from hybridpar.data.labels import LabelledPart, number_labels
from hybridpar.data.memory_sets import divided
from hybridpar.data.sources import DATA_SETS, ImageData, ImageFiles, decoded_data
from hybridpar.errors import DataError

_RULE = "The first line names the columns: path, label and maybe split; or path, maybe split, and a column per class."


class _Row(NamedTuple):
    """A line of a table.

    Attributes:
        path: The image, relative to the table.
        labels: Its classes.
        split: `train`, `test` or `val`.
        line: Where it stands, for messages.
    """

    path: str
    labels: list[str]
    split: str
    line: str


@DATA_SETS.register(
    "csv", "your own images in a table: --data-root FILE.csv, or a directory with train.csv and test.csv"
)
def _csv(config: DataConfig) -> ImageData:
    """Columns `path`, `label` and maybe `split`; paths are relative to the table's directory.

    Several labels of an image are joined by `;` or `|`. Without a column `label` every other column is a class and
    holds 0 or 1. `split` is `train`, and `test` or `val`; where both are, `test` is used. Without test images, 80 % of
    the images of each class are for training, always the same ones.
    """
    root = config.data_root.resolve()
    ignored: list[str] = []
    if root.is_dir():
        if not (root / "train.csv").is_file():
            raise DataError(f"there is no file train.csv in {root}", _RULE, "Name it, or one table, with --data-root.")
        rows, classes = _read(root / "train.csv", "train")
        tests = [name for name in ("test.csv", "val.csv") if (root / name).is_file()]
        rows += [row for name in tests[:1] for row in _read(root / name, "test")[0]]
        ignored += [f"the table {name}" for name in tests[1:]]
    else:
        rows, classes = _read(root, "train")
        root = root.parent
    tested = "test" if any(row.split == "test" for row in rows) else "val"
    parts = [[row for row in rows if row.split == split] for split in ("train", tested)]
    if not parts[0]:
        raise DataError(f"{config.data_root} lists no training images", _RULE, "Check the column split.")
    several = bool(classes) or any(len(row.labels) > 1 for row in rows)
    train, test = (LabelledPart([row.labels for row in part], [row.line for row in part], several) for part in parts)
    names, *targets = number_labels(train, test, classes or None)
    chosen = divided(targets if parts[1] else targets[:1])
    images = [ImageFiles(root, [parts[part][at].path for at in indices], numbers) for part, indices, numbers in chosen]
    if len(images[1]) == 0:
        raise DataError(f"{config.data_root} lists no test images", fix="Add some, with `test` in the column split.")
    if unused := sum(row.split not in ("train", tested) for row in rows):
        ignored.append(f"{unused:,} images of the split val")
    return decoded_data("csv", names, config, images, ignored=ignored)


def _read(file: Path, split: str) -> tuple[list[_Row], list[str]]:
    """The rows of a table, of which those that name no split are of this one; and its columns that are classes."""
    try:
        with open(file, newline="", encoding="utf-8-sig") as opened:
            reader = csv.reader(opened)
            header = [name.strip() for name in next(reader, [])]
            classes = [] if "label" in header else [name for name in header if name not in ("path", "split")]
            for column, there in (("path", "path" in header), ("label", "label" in header or classes)):
                if not there:
                    raise DataError(f"{file} has no column {column!r}; it has {', '.join(header) or 'none'}", _RULE)
            rows = [
                _row(dict(zip(header, map(str.strip, cells), strict=False)), classes, split, reader.line_num, file)
                for cells in reader
                if cells
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read the table {file}: {reason}", _RULE, "Check --data-root.") from error
    return rows, classes


def _row(cells: dict[str, str], classes: list[str], split: str, number: int, file: Path) -> _Row:
    line = f"line {number} of {file.name}"
    split = cells.get("split") or split
    if not cells.get("path"):
        raise DataError(f"{line} has no path", _RULE, "Give it one, or remove the line.")
    if split not in ("train", "test", "val"):
        raise DataError(f"{line} has the split {split!r}", "It must be train, test or val.")
    for name in classes:
        if cells.get(name, "") not in ("0", "1", "0.0", "1.0", ""):
            raise DataError(f"{line} has {cells[name]!r} in the column {name!r}", "A column of a class holds 0 or 1.")
    labels = [name for name in classes if cells.get(name, "").startswith("1")]
    labels += [label.strip() for label in re.split("[;|]", cells.get("label", "")) if label.strip()]
    return _Row(cells["path"], labels, split, line)
