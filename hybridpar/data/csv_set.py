"""Images that a table lists: `--data csv`."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from hybridpar.config import DataConfig
from hybridpar.data.file_sets import DEFAULT_SIZE
from hybridpar.data.labels import LabelledPart, number_labels
from hybridpar.data.memory_sets import four_of_five
from hybridpar.data.sources import DATA_SETS, FileImages, ImageData, decoding
from hybridpar.errors import DataError

#: Columns that are no classes. Of those with a second name, either may be used.
_PATH, _LABEL, _SPLIT = ("path", "image"), ("label", "labels"), ("split",)
_RULE = "The first line names the columns: path, label and maybe split; or path, maybe split, and a column per class."


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
    rows = _Rows()
    if root.is_dir():
        tables = [(root / "train.csv", "train")]
        if not tables[0][0].is_file():
            raise DataError(f"there is no file train.csv in {root}", _RULE, "Name it, or one table, with --data-root.")
        tables += [(root / name, "test") for name in ("test.csv", "val.csv") if (root / name).is_file()][:1]
        for file, split in tables:
            rows.read(file, split)
        root = root
    else:
        rows.read(root, "")
        root = root.parent
    splits = set(rows.splits)
    used = "test" if "test" in splits else "val"
    parts = [[at for at, split in enumerate(rows.splits) if split in chosen] for chosen in (("train", ""), (used,))]
    if not parts[0]:
        raise DataError(f"{config.data_root} lists no training images", _RULE, "Check the column split.")
    train = rows.part(parts[0])
    names, targets, tested = number_labels(train, rows.part(parts[1]), rows.classes or None)
    if not parts[1]:
        first, second = four_of_five(targets)
        parts = [[parts[0][at] for at in first], [parts[0][at] for at in second]]
        targets, tested = targets[first], targets[second]
        if not parts[1]:
            raise DataError(
                f"{config.data_root} lists no test images", fix="Add some, with `test` in the column split."
            )
    size = config.image_size or DEFAULT_SIZE
    use = decoding(config, size)
    sources = [
        FileImages(root, [rows.paths[at] for at in part], labels, **use)
        for part, labels in zip(parts, (targets, tested), strict=True)
    ]
    return ImageData(
        name="csv",
        class_names=names,
        sample_shape=(3, size, size),
        train=sources[0],
        test=sources[1],
    )


class _Rows:
    """Rows of one table, or of two."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.labels: list[list[str]] = []
        self.splits: list[str] = []
        self.places: list[str] = []
        self.classes: list[str] = []
        self.several = False

    def part(self, rows: list[int]) -> LabelledPart:
        """Some of the rows."""
        return LabelledPart([self.labels[at] for at in rows], [self.places[at] for at in rows], self.several)

    def read(self, file: Path, split: str) -> None:
        """Add the rows of a table; `split` is that of rows which do not say."""
        try:
            with open(file, newline="", encoding="utf-8-sig") as opened:
                reader = csv.DictReader(opened)
                columns = [name.strip() for name in reader.fieldnames or ()]
                reader.fieldnames = columns
                self._read(file, split, reader, columns)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"cannot read the table {file}: {reason}", _RULE, "Check --data-root.") from error

    def _read(self, file: Path, split: str, reader: csv.DictReader[str], columns: list[str]) -> None:
        path, label, given = (
            next((name for name in columns if name.lower() in known), None) for known in (_PATH, _LABEL, _SPLIT)
        )
        classes = [name for name in columns if name not in (path, given)] if label is None else []
        if path is None or (label is None and not classes):
            missing = "path" if path is None else "label"
            raise DataError(f"{file} has no column {missing!r}; it has {', '.join(columns) or 'none'}", _RULE)
        if self.paths and classes != self.classes:
            raise DataError(f"{file} has other columns than the table before", _RULE, "Use the same in both.")
        self.classes = classes
        self.several = self.several or bool(classes)
        for row in reader:
            place = f"line {reader.line_num} of {file.name}"
            if not (row[path] or "").strip():
                raise DataError(f"{place} has no path", _RULE, "Give it one, or remove the line.")
            if label is None:
                found = [name for name in classes if _is_one(row[name], place, name)]
            else:
                text = (row[label] or "").strip()
                found = [part.strip() for part in re.split("[;|]", text) if part.strip()]
                self.several = self.several or bool(re.search("[;|]", text))
            part = ((row[given] or "").strip().lower() if given is not None else "") or split
            part = {"valid": "val", "validation": "val", "training": "train"}.get(part, part)
            if part not in ("train", "test", "val", ""):
                raise DataError(f"{place} has the split {part!r}", "It must be train, test or val.")
            self.paths.append((row[path] or "").strip())
            self.labels.append(found)
            self.splits.append(part)
            self.places.append(place)


def _is_one(value: str | None, place: str, column: str) -> bool:
    text = (value or "").strip()
    if text not in ("0", "1", "0.0", "1.0", ""):
        raise DataError(f"{place} has {text!r} in the column {column!r}", "A column of a class holds 0 or 1.")
    return text.startswith("1")
