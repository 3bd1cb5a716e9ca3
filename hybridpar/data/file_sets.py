"""Image files: in a folder for each class, in a table, or named by a user."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torchvision.datasets.folder import IMG_EXTENSIONS

from hybridpar.config import DataConfig, TrainConfig
from hybridpar.data.augment import MODES, eval_transform
from hybridpar.data.images import ImageFiles, ImageSource
from hybridpar.data.sources import ImageData, ImageFacts, image_data, number_labels, reading
from hybridpar.errors import DataError, check, shortened

_LAYOUT = "A folder data set is laid out as train/CLASS/IMAGE and test/CLASS/IMAGE, or as CLASS/IMAGE."
_COLUMNS = "Its first line names the columns: path, label, and maybe split, which is train, test or val."


def load_folder(config: DataConfig) -> ImageData:
    """The layout of torchvision's ImageFolder, without hidden files and directories.

    Where there are both test/ and val/, test/ is used. Without any of the three the folders are the classes, and 80 %
    of the images of each are for training, always the same ones.
    """
    root, ignored = config.data_root.resolve(), list[str]()
    roots = [root / "train", root / ("test" if (root / "test").is_dir() else "val")]
    if any(path.is_dir() for path in roots):
        ignored = sorted(f"{path.name}/" for path in root.iterdir() if path.is_dir() and path not in roots)
    else:
        roots = [root]
    names, files = list[str](), list[ImageFiles]()
    for directory in roots:
        _, folders, _ = next(os.walk(directory, onerror=_refuse))
        images = {name: image_files(directory / name) for name in sorted(folders) if name[0] != "."}
        names = names or [*images]
        if strange := images.keys() - {*names}:
            problem = f"{directory} has classes that {roots[0]} has not: {_listed(strange)}"
            raise DataError(problem, _LAYOUT, "Rename or remove them, or add training images of these classes.")
        numbers = {name: number for number, name in enumerate(names)}
        paths = [(f"{name}{os.sep}{path}", numbers[name]) for name, inside in images.items() for path in inside]
        empty = {name for name, inside in images.items() if not inside}
        too_high = roots == [root] and all(path.count(os.sep) > 1 for path, _ in paths)
        if empty or too_high or not paths:
            raise DataError(
                f"no images in folders of {directory}: {_listed(empty or images.keys()) or 'it has none'}",
                f"{_LAYOUT} An image ends in {', '.join(IMG_EXTENSIONS)}.",
                "Add images, remove the folders, or name another directory with --data-root.",
            )
        files.append(ImageFiles(directory, *zip(*paths, strict=True)))
    return image_data(config, files, names=names, ignored=ignored)


def _listed(names: Iterable[str]) -> str:
    return shortened(", ".join(sorted(names)))


def image_files(directory: Path) -> list[str]:
    """The image files in and below a directory, by folder and name; what is hidden is left out.

    Links to directories are followed, but not in circles.
    """
    images = []
    for folder, folders, files in os.walk(directory, onerror=_refuse, followlinks=True):
        folders[:] = [name for name in folders if name[0] != "." and not _leads_up(Path(folder, name))]
        below = "" if folder == str(directory) else os.path.relpath(folder, directory) + os.sep
        images += [below + name for name in files if name[0] != "." and name.lower().endswith(IMG_EXTENSIONS)]
    return sorted(images, key=os.path.split)


def _leads_up(path: Path) -> bool:
    """Whether something is a link to a directory above it."""
    return path.is_symlink() and path.resolve() in {parent.resolve() for parent in path.parents}


def _refuse(error: OSError) -> NoReturn:
    what = f"cannot read {error.filename}: {error.strerror or error}"
    raise DataError(what, _LAYOUT, "Check --data-root, and the rights of its files.") from error


def load_table(config: DataConfig) -> ImageData:
    """A table, or train.csv and test.csv in a directory, with columns `path`, `label` and maybe `split`.

    Paths are relative to the table's directory. Several labels of an image are joined by `;` or `|`. `split` is
    `train`, and `test` or `val`; where both are, `test` is used. Without test images, 80 % of the images of each class
    are for training, always the same ones.
    """
    root = config.data_root.resolve()
    folder = root if root.is_dir() else root.parent
    rows = _rows(root / "train.csv" if root.is_dir() else root, "train")
    for split in ("test", "val"):
        if root.is_dir() and (table := root / f"{split}.csv").is_file():
            rows += _rows(table, split)
    parts = {split: [row for row in rows if row["split"] == split] for split in ("train", "test", "val")}
    if not parts["train"]:
        raise DataError(f"{config.data_root} lists no training images", _COLUMNS, "Check the column split.")
    unused = [f"{len(parts['val']):,} images of the split val"] if parts["test"] and parts["val"] else []
    used = [parts["train"], *filter(None, [parts["test"] or parts["val"]])]
    words = [[[*filter(None, map(str.strip, re.split("[;|]", row["label"])))] for row in part] for part in used]
    files = [ImageFiles(folder, [row["path"] for row in part]) for part in used]
    lines = [[row["line"] for row in part] for part in used]
    names = number_labels(files, words, rows_of=[part.__getitem__ for part in lines])
    return image_data(config, files, names=names, ignored=unused)


def _rows(table: Path, split: str) -> list[dict[str, str]]:
    """The lines of a table, of which those that name no split are of this one."""
    rows = []
    with (
        reading(f"the table {table}", _COLUMNS, "Check --data-root."),
        open(table, newline="", encoding="utf-8-sig") as file,
    ):
        for cells in (reader := csv.DictReader(file, skipinitialspace=True, restval="")):
            given = {key: cells[key].strip() for key in ("path", "label", "split") if cells.get(key)}
            row = {"label": "", "split": split, "line": f"line {reader.line_num} of {table.name}", **given}
            if "path" not in row or "label" not in cells or row["split"] not in ("train", "test", "val"):
                raise DataError(f"{row['line']} has {cells}", _COLUMNS, "Correct the table.")
            rows.append(row)
    return rows


def find_images(named: Sequence[Path]) -> list[Path]:
    """The image files that a user names; one that is not there is left to be refused as unreadable."""
    images: list[Path] = []
    for path in named:
        inside = [path / file for file in image_files(path)] if path.is_dir() else [path]
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
    source = ImageSource(listed, listed.labels, augment=prepare, prepare=prepare, channels=channels)
    return ImageData(**vars(facts), name="files", train=source, test=source)
