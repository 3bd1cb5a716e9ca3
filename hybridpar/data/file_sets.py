"""Image files: in a folder for each class, in a table, or named by a user."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torchvision.datasets.folder import IMG_EXTENSIONS

from hybridpar.config import DataConfig, TrainConfig
from hybridpar.data.augment import MODES, eval_transform
from hybridpar.data.labels import number_labels, some
from hybridpar.data.sources import DATA_SETS, DecodedImages, ImageData, ImageFacts, ImageFiles, decoded_data
from hybridpar.errors import DataError, check

_LAYOUT = "A folder data set is laid out as train/CLASS/IMAGE and test/CLASS/IMAGE, or as CLASS/IMAGE."
_COLUMNS = "Its first line names the columns: path, label, and maybe split, which is train, test or val."


@DATA_SETS.register(
    "folder", "your own images: --data-root with train/CLASS/ and test/CLASS/ (or val/CLASS/), or CLASS/; 224x224"
)
def _folder(config: DataConfig) -> ImageData:
    """The layout of torchvision's ImageFolder, without hidden files and directories.

    Where there are both test/ and val/, test/ is used. Without any of the three the folders are the classes, and 80 %
    of the images of each are for training, always the same ones. What is not used is named.
    """
    root, ignored = config.data_root.resolve(), list[str]()
    roots = [root / "train", root / ("test" if (root / "test").is_dir() else "val")]
    if any(path.is_dir() for path in roots):
        ignored += [f"{path.name}/" for path in root.iterdir() if path.is_dir() and path not in roots]
    else:
        roots = [root]
    names, files = list[str](), list[ImageFiles]()
    for directory in roots:
        images, others = image_files(directory)
        ignored += [*others, *(path for path in images if os.sep not in path)]
        paths = sorted((path for path in images if os.sep in path), key=_class_of)  # then as torchvision has them
        folders = {path.name for path in directory.iterdir() if path.is_dir() and path.name[0] != "."}
        names = names or sorted(folders)
        strange, empty = folders - {*names}, folders - set(map(_class_of, paths))
        if strange:
            problem = f"{directory} has classes that {roots[0]} has not: {some(strange)}"
            raise DataError(problem, _LAYOUT, "Rename or remove them, or add training images of these classes.")
        too_high = roots == [root] and all(path.count(os.sep) > 1 for path in paths)
        if empty or too_high or not folders:
            raise DataError(
                f"no images in folders of {directory}: {some(empty or folders) or 'it has none'}",
                f"{_LAYOUT} An image ends in {', '.join(IMG_EXTENSIONS)}.",
                "Add images, remove the folders, or name another directory with --data-root.",
            )
        numbers = {name: number for number, name in enumerate(names)}
        files.append(ImageFiles(directory, paths, [numbers[_class_of(path)] for path in paths]))
    text = f"{len(ignored):,} other files and folders ({some(ignored)})"
    labels = [part.labels for part in files]
    return decoded_data("folder", names, config, files, labels, ignored=[text] if ignored else [])


def _class_of(path: str) -> str:
    return path.partition(os.sep)[0]


def image_files(directory: Path) -> tuple[list[str], list[str]]:
    """The image files in and below a directory, by folder and name, and what else there is: hidden things, other files.

    Links to directories are followed, but not in circles.
    """
    images, others = [], []
    for folder, folders, files in os.walk(directory, onerror=_refuse, followlinks=True):
        inside = [name for name in folders if name[0] != "." and not _leads_up(Path(folder, name))]
        usable = [name for name in files if name[0] != "." and name.lower().endswith(IMG_EXTENSIONS)]
        below = "" if folder == str(directory) else os.path.relpath(folder, directory) + os.sep
        images += [below + name for name in usable]
        others += [below + name for name in {*folders, *files} - {*inside, *usable}]
        folders[:] = inside
    return sorted(images, key=os.path.split), others


def _leads_up(path: Path) -> bool:
    """Whether something is a link to a directory above it."""
    return path.is_symlink() and path.resolve() in {parent.resolve() for parent in path.parents}


def _refuse(error: OSError) -> NoReturn:
    what = f"cannot read {error.filename}: {error.strerror or error}"
    raise DataError(what, _LAYOUT, "Check --data-root, and the rights of its files.") from error


@DATA_SETS.register(
    "csv", "your own images in a table: --data-root FILE.csv, or a directory with train.csv and test.csv"
)
def _csv(config: DataConfig) -> ImageData:
    """Columns `path`, `label` and maybe `split`; paths are relative to the table's directory.

    Several labels of an image are joined by `;` or `|`. `split` is `train`, and `test` or `val`; where both are, `test`
    is used. Without test images, 80 % of the images of each class are for training, always the same ones.
    """
    root = config.data_root.resolve()
    rows = _rows(root, "train") if not root.is_dir() else _rows(root / "train.csv", "train")
    for split in ("test", "val") if root.is_dir() else ():
        rows += _rows(root / f"{split}.csv", split) if (root / f"{split}.csv").is_file() else []
    counts = {split: sum(row["split"] == split for row in rows) for split in ("train", "test", "val")}
    if not counts["train"]:
        raise DataError(f"{config.data_root} lists no training images", _COLUMNS, "Check the column split.")
    used = ["train", *[split for split in ("test", "val") if counts[split]][:1]]
    parts = [[row for row in rows if row["split"] == split] for split in used]
    words = [
        [[word for word in map(str.strip, re.split("[;|]", row["label"])) if word] for row in part] for part in parts
    ]
    several = any(len(labels) > 1 for part in words for labels in part)
    names, labels = number_labels(words, lambda part, row: parts[part][row]["line"], several=several)
    folder = root if root.is_dir() else root.parent
    files = [ImageFiles(folder, [row["path"] for row in part], of) for part, of in zip(parts, labels, strict=True)]
    unused = [f"{counts['val']:,} images of the split val"] if counts["val"] and "val" not in used else []
    return decoded_data("csv", names, config, files, labels, ignored=unused)


def _rows(table: Path, split: str) -> list[dict[str, str]]:
    """The lines of a table, of which those that name no split are of this one."""
    rows = []
    try:
        with open(table, newline="", encoding="utf-8-sig") as file:
            for cells in (reader := csv.DictReader(file, skipinitialspace=True, restval="")):
                given = {key: cells[key].strip() for key in ("path", "label", "split") if cells.get(key)}
                row = {"label": "", "split": split, "line": f"line {reader.line_num} of {table.name}", **given}
                if "path" not in row or "label" not in cells or row["split"] not in ("train", "test", "val"):
                    raise DataError(f"{row['line']} has {cells}", _COLUMNS, "Correct the table.")
                rows.append(row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read the table {table}: {reason}", _COLUMNS, "Check --data-root.") from error
    return rows


def find_images(named: Sequence[Path]) -> list[Path]:
    """The image files that a user names; one that is not there is left to be refused as unreadable."""
    images: list[Path] = []
    for path in named:
        inside = [path / file for file in image_files(path)[0]] if path.is_dir() else [path]
        rule = f"The name of an image ends in {', '.join(IMG_EXTENSIONS)}."
        check(bool(inside), f"there is no image in {path}", rule, "Name a folder with such files, or the files.")
        images += inside
    return images


def named_images(files: Sequence[Path], facts: ImageFacts, config: TrainConfig) -> ImageData:
    """Image files as a data set whose labels are their places in the list."""
    channels, size, images = facts.sample_shape[0], facts.test_size, config.images
    rule, fix = "Image files are read in grey, RGB or RGBA.", "Call the model in a script of your own."
    check(channels in MODES, f"the model takes images of {channels} channels", rule, fix)
    prepare = eval_transform(size, replace(images, crop=1.0) if facts.whole else images)
    listed = ImageFiles(Path("/"), [os.path.abspath(file) for file in files], range(len(files)))
    source = DecodedImages(listed, augment=prepare, prepare=prepare, channels=channels)
    return ImageData(
        name="files",
        class_names=facts.class_names,
        sample_shape=facts.sample_shape,
        train=source,
        test=source,
        mean=facts.mean,
        std=facts.std,
        test_size=size,
    )
