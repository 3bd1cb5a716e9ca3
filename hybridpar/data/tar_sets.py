"""Images in tar files, in the layout of the package webdataset: `--data webdataset`.

The tar files are read here and not by that package. It reads a shard from its beginning to its end, and gives whole
shards to workers: how far it was is then a matter of every process, and the images of a step depend on how many there
are. Here the place of every member is looked up once and kept beside the shard, after which any sample can be read
alone. So shards go through the same samplers as any other data set: each image once per epoch over any number of
workers and loader processes, fewer shards than workers, and the same steps after a resumption. The price is that reads
are scattered: shards belong on a disk that is fast at it, or in memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from PIL import Image
from torch import Tensor

from hybridpar.config import DataConfig
from hybridpar.data.decode import open_image
from hybridpar.data.file_sets import DEFAULT_SIZE
from hybridpar.data.labels import LabelledPart, number_labels
from hybridpar.data.memory_sets import four_of_five
from hybridpar.data.sampling import IntArray
from hybridpar.data.sources import DATA_SETS, DecodedImages, Decoding, ImageData, decoding
from hybridpar.errors import DataError

_log = logging.getLogger(__name__)

#: Ends of names of members that are images, and that are labels, best first.
_IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "bmp", "tif", "tiff", "gif")
_LABELS = ("cls", "json", "txt")

#: Version of the files that keep where members are.
_FORMAT = 1

_RULE = 'Shards are tar files whose members belong together by name: KEY.jpg and KEY.cls, .json (its "label") or .txt.'


@dataclass(frozen=True)
class Shard:
    """Where the images of a tar file are.

    Attributes:
        path: The tar file.
        names: Member of each image.
        offsets: First byte of each, shape (samples,).
        sizes: Bytes of each, shape (samples,).
        labels: Label of each; several are joined by a line feed.
        several: Whether images may have several labels.
    """

    path: Path
    names: list[str]
    offsets: IntArray
    sizes: IntArray
    labels: list[str]
    several: bool


class TarImages(DecodedImages):
    """Images that lie in tar files.

    Args:
        shards: The tar files.
        chosen: Which of all their samples, in order.
        labels: As of `DecodedImages`.
        **use: As of `DecodedImages`.
    """

    def __init__(self, shards: Sequence[Shard], chosen: IntArray, labels: Tensor, **use: Unpack[Decoding]) -> None:
        super().__init__(labels, **use)
        self.paths = [shard.path for shard in shards]
        self.shards = np.concatenate([np.full(len(shard.names), at) for at, shard in enumerate(shards)])[chosen]
        self.offsets = np.concatenate([shard.offsets for shard in shards])[chosen]
        self.sizes = np.concatenate([shard.sizes for shard in shards])[chosen]
        # An array and no list: see `FileImages`.
        self.names = np.array([os.fsencode(name) for shard in shards for name in shard.names])[chosen]

    def open(self, index: int) -> Image.Image:
        try:
            with open(self.paths[self.shards[index]], "rb", buffering=0) as file:
                file.seek(self.offsets[index])
                content = file.read(int(self.sizes[index]))
        except OSError as error:
            raise DataError(f"cannot read the image {self.name(index)}: {error.strerror or error}") from error
        return open_image(content, self.name(index))

    def name(self, index: int) -> str:
        return f"{self.paths[self.shards[index]]}/{os.fsdecode(bytes(self.names[index]))}"


@DATA_SETS.register(
    "webdataset", "your own images in tar shards: --data-root 'DIR/train-{000..009}.tar', or a directory"
)
def _webdataset(config: DataConfig) -> ImageData:
    """`--data-root` is a tar file, a pattern of them with {000..009} or *, or a directory of train*.tar and test*.tar.

    For a pattern, the shards for testing are those whose names have `test` or `val` in the place of `train`. Without
    any, 80 % of the images of each class are for training, always the same ones. Labels are numbers or words; the file
    `classes.txt` beside the shards, a name per line, gives numbers their names.
    """
    train_paths, test_paths = find_shards(config.data_root)
    strict = config.bad_images == "error"
    with ThreadPoolExecutor(max_workers=4) as pool:
        train, test = (
            [*pool.map(lambda path: read_shard(path, strict=strict), paths)] for paths in (train_paths, test_paths)
        )
    for shards, paths in ((train, train_paths), (test, test_paths)):
        if paths and not any(shard.names for shard in shards):
            raise DataError(f"there are no labelled images in {paths[0]}", _RULE)
    listed = _listed_classes([*train, *test], train_paths[0].parent)
    numbers = None if listed is None else [str(number) for number in range(len(listed))]
    names, targets, tested = number_labels(_part(train), _part(test), numbers)
    names = names if listed is None else listed
    size = config.image_size or DEFAULT_SIZE
    use = decoding(config, size)
    if test:
        sources = [
            TarImages(shards, np.arange(len(labels)), labels, **use)
            for shards, labels in ((train, targets), (test, tested))
        ]
    else:
        sources = [TarImages(train, chosen, targets[chosen], **use) for chosen in four_of_five(targets)]
    return ImageData(
        name="webdataset",
        class_names=names,
        sample_shape=(3, size, size),
        train=sources[0],
        test=sources[1],
    )


def find_shards(root: Path) -> tuple[list[Path], list[Path]]:
    """The shards for training and for testing.

    Args:
        root: As of `--data-root`.

    Returns:
        Both, in the order of their names; none for testing where there are none.

    Raises:
        DataError: There are no shards, or some of {000..009} are missing.
    """
    if root.is_dir():
        every = sorted(root.resolve().glob("*.tar"))
        test = [path for path in every if path.name.startswith("test")]
        test = test or [path for path in every if path.name.startswith("val")]
        train = [path for path in every if path.name.startswith("train")]
        train = train or [path for path in every if not path.name.startswith(("test", "val"))]
    else:
        train = _matching(str(root))
        if missing := [path for path in train if not path.is_file()]:
            raise DataError(
                f"{len(missing)} of {len(train)} shards are missing, such as {missing[0]}", _RULE, "Check --data-root."
            )
        test = []
        for other in ("test", "val"):
            if "train" in root.name and not test:
                pattern = re.sub(r"\{[^}]*\}", "*", root.name.replace("train", other))
                test = sorted(path for path in root.parent.resolve().glob(pattern) if path not in train)
    if not train:
        raise DataError(f"there are no shards in {root}", _RULE, "Check --data-root.")
    return train, test


def _matching(pattern: str) -> list[Path]:
    """The files of a pattern with {000..009} or {a,b}, or with * and ?."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        path = Path(pattern).absolute()
        return sorted(path.parent.glob(path.name)) if re.search("[*?]", path.name) else [path]
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if ends is not None:
        width = len(ends[1]) if ends[1].startswith("0") else 0
        parts = [f"{number:0{width}d}" for number in range(int(ends[1]), int(ends[2]) + 1)]
    else:
        parts = found[1].split(",")
    start, end = pattern[: found.start()], pattern[found.end() :]
    return [path for part in parts for path in _matching(start + part + end)]


def read_shard(path: Path, *, strict: bool = False) -> Shard:
    """Look up where the images of a tar file are, or read that from the file `.NAME.index` beside it.

    Args:
        path: The tar file.
        strict: Refuse a tar file that ends too early; else its whole members are used.

    Raises:
        DataError: It is no tar file, is compressed, or cannot be read.
    """
    index = path.with_name(f".{path.name}.index")
    try:
        facts = path.stat()
        key = [_FORMAT, facts.st_size, facts.st_mtime_ns]
        if (known := _kept(path, index, key)) is not None:
            return known
        found, whole = _look_up(path)
    except (OSError, tarfile.TarError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        packed = path.name.endswith(("gz", "bz2", "xz", "tgz")) or "gzip" in reason
        raise DataError(
            f"cannot read the shard {path}: {reason}", _RULE, "Unpack it with gunzip first." if packed else ""
        ) from error
    if not whole:
        what = f"the shard {path} ends too early, after {len(found.names)} images"
        if strict:
            raise DataError(what, _RULE, "Replace it.")
        _log.warning("warning: %s; those are used", what)
        return found
    _keep(found, index, key)
    return found


def _look_up(path: Path) -> tuple[Shard, bool]:
    """Go through a tar file; whether it is whole."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, tuple[int, str, bool]] = {}
    whole = True
    size = path.stat().st_size
    with tarfile.open(path, "r:") as tar, open(path, "rb") as file:
        while True:
            try:
                member = tar.next()
            except tarfile.ReadError:
                whole = False
                break
            if member is None:
                break
            if not member.isfile():
                continue
            if member.offset_data + member.size > size:
                whole = False
                break
            folder, _, name = member.name.rpartition("/")
            stem, _, end = name.partition(".")
            key, end = f"{folder}/{stem}", end.lower()
            if end in _IMAGES:
                images.setdefault(key, member)
            elif end in _LABELS and (key not in labels or _LABELS.index(end) < labels[key][0]):
                file.seek(member.offset_data)
                found = _label(end, file.read(member.size), f"{path}/{member.name}")
                if found is not None:
                    labels[key] = (_LABELS.index(end), *found)
    keys = [key for key in images if key in labels]
    shard = Shard(
        path,
        [images[key].name for key in keys],
        np.array([images[key].offset_data for key in keys], dtype=np.int64),
        np.array([images[key].size for key in keys], dtype=np.int64),
        [labels[key][1] for key in keys],
        any(labels[key][2] for key in keys),
    )
    return shard, whole


def _label(end: str, content: bytes, name: str) -> tuple[str, bool] | None:
    """The label that a member holds, and whether it is a list of them; None where it holds none."""
    try:
        text = content.decode().strip()
        if end != "json":
            return text, False
        value: Any = json.loads(text)
    except ValueError as error:
        raise DataError(f"cannot read the label {name}: {error}", _RULE) from error
    if isinstance(value, dict):
        value = next((value[key] for key in ("label", "labels", "class", "cls") if key in value), None)
    if isinstance(value, list):
        return "\n".join(str(one) for one in value), True
    return None if value is None else (str(value), False)


def _part(shards: Sequence[Shard]) -> LabelledPart:
    return LabelledPart(
        [[one for one in label.split("\n") if one] for shard in shards for label in shard.labels],
        [f"{shard.path}/{name}" for shard in shards for name in shard.names],
        any(shard.several for shard in shards),
    )


def _listed_classes(shards: Sequence[Shard], folder: Path) -> tuple[str, ...] | None:
    """Names of the classes, where labels are numbers and the file classes.txt names them."""
    try:
        listed = (folder / "classes.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    labels = {one for shard in shards for label in shard.labels for one in label.split("\n")}
    return tuple(name.strip() for name in listed) if all(label.isdigit() for label in labels if label) else None


def _kept(path: Path, index: Path, key: list[int]) -> Shard | None:
    try:
        kept = json.loads(index.read_bytes())
        if kept["key"] != key:
            return None
        offsets, sizes = (np.array(kept[name], dtype=np.int64) for name in ("offsets", "sizes"))
        return Shard(path, kept["names"], offsets, sizes, kept["labels"], kept["several"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or damaged: it is written again


def _keep(shard: Shard, index: Path, key: list[int]) -> None:
    kept = {
        "key": key,
        "names": shard.names,
        "offsets": shard.offsets.tolist(),
        "sizes": shard.sizes.tolist(),
        "labels": shard.labels,
        "several": shard.several,
    }
    own = index.with_name(f"{index.name}.{os.getpid()}")
    try:
        own.write_text(json.dumps(kept))
        os.replace(own, index)
    except OSError:  # a directory that cannot be written is read anew by every run
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
