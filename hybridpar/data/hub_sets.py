"""Image data sets of the Hugging Face hub: `--data hf/NAME`."""

from __future__ import annotations

import re
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from hybridpar.config import DataConfig
from hybridpar.config.data import HubOptions, data_name, samples_of
from hybridpar.data.decode import open_image
from hybridpar.data.downloads import one_download
from hybridpar.data.file_sets import some
from hybridpar.data.labels import LabelledPart, number_labels
from hybridpar.data.memory_sets import divided
from hybridpar.data.sources import DATA_SETS, ImageData, ImageSet, decoded_data
from hybridpar.errors import DataError, UsageError

#: Names of the part that is tested on, best first.
_TEST_PARTS = ("test", "validation", "val", "valid")

#: Kinds of files in --data-root: what they are, what they must hold, and how their names end.
_FILES = {
    "webdataset": (
        "tar shards",
        "Members of a tar file belong together by name: KEY.jpg, and KEY.cls, KEY.txt or KEY.json (its `label`).",
        "tar",
    ),
    "parquet": ("parquet files", "A table has a column of images and one of labels.", "parquet"),
}

#: Columns that are taken for the label where several have classes, best first.
_LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "cls", "json.label", "json.labels", "txt")


class HubImages(ImageSet):
    """Images of a data set of the `datasets` library."""

    def __init__(self, dataset: Any, column: str, labels: Tensor) -> None:
        super().__init__(labels)
        self.dataset = dataset
        self.column = column

    def open(self, index: int) -> Image.Image:
        cell = self.dataset[index][self.column]
        if cell is None:
            raise DataError(f"cannot read the image {self.name(index)}: it is missing")
        content = cell.get("bytes")
        return open_image(Path(cell["path"]) if content is None else content, self.name(index))

    def name(self, index: int) -> str:
        return f"row {index} of {self.dataset.split or 'the data set'}"


@DATA_SETS.register("hf/NAME", "an image data set of the Hugging Face hub, from its cache or a copy in --data-root")
def _hub(config: DataConfig) -> ImageData:
    """NAME as `datasets.load_dataset` takes it, with a configuration behind a colon: `hf/org/name:config`.

    Where --data-root holds what `save_to_disk` wrote, that is read; else the hub's cache, and with `download` the hub
    itself. `hf/webdataset` reads the tar shards in --data-root, train*.tar and test*.tar, and `hf/parquet` such files.
    The column of images is found by its type, that of labels by its type or as `label`. Without a test part, 80 % of
    the images of each class are for training, always the same ones.
    """
    name = data_name(config.data).removeprefix("hf/")
    if name in ("", "hf"):
        raise UsageError(f"--data {config.data}", "The name of the data set follows: hf/NAME.", "Use --data hf/NAME.")
    ignored: list[str] = []
    parts = _parts(name, config, ignored)
    train = parts[0]
    image = _image_column(train, name)
    label = _label_column(train, name)
    raw, cells = map(list, zip(*(_complete(part, image, label, ignored) for part in parts), strict=True))
    names, *targets = _numbered(train.features[label], cells, name)
    labelled = [HubImages(raw[part].select(indices), image, labels) for part, indices, labels in divided(targets)]
    return decoded_data(samples_of(config.data), names, config, labelled, ignored=ignored)


def _parts(name: str, config: DataConfig, ignored: list[str]) -> list[Any]:
    """The training part, and the test part where there is one; says which are left out."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"the data set {config.data} is read with the package datasets, which cannot be imported: {error}",
            fix="Install it: pip install 'hybridpar[hf]'",
        ) from error
    root = config.data_root.resolve()
    options = config.data_options
    assert isinstance(options, HubOptions)
    try:
        if any((root / file).is_file() for file in ("dataset_dict.json", "state.json")):
            read = datasets.load_from_disk(str(root))
        elif name in _FILES:
            read = _files(name, root)
        elif options.download:
            with one_download(name.replace("/", "--"), root):
                read = datasets.load_dataset(name, options.configuration)
        else:
            read = datasets.load_dataset(
                name, options.configuration, download_config=datasets.DownloadConfig(local_files_only=True)
            )
    except DataError:
        raise
    except Exception as error:  # the library lets through whatever its back ends raise
        raise DataError(
            f"cannot load {config.data}: {' '.join(str(error).split()) or type(error).__name__}",
            "It must be in the cache of the package datasets, or in --data-root as save_to_disk wrote it.",
            f"Run again with --data {samples_of(config.data)},download, or name a copy with --data-root.",
        ) from error
    if not isinstance(read, dict):
        return [read]
    if "train" not in read:
        raise DataError(f"{config.data} has no part train; it has {', '.join(read)}", "Training needs one.")
    used = ["train", *[part for part in _TEST_PARTS if part in read][:1]]
    ignored += [f"{len(rows):,} rows of the part {part}" for part, rows in read.items() if part not in used]
    return [read[part] for part in used]


def _files(kind: str, root: Path) -> Any:
    """The parts in files of one kind."""
    import datasets

    try:
        return datasets.load_dataset(kind, data_dir=str(root)).flatten()
    except Exception as error:
        reason = error.__cause__ or error  # what is wrong with a file is the cause of an error that does not say it
        what, rule, end = _FILES[kind]
        raise DataError(
            f"cannot load the {what} in {root}: {' '.join(str(reason).split()) or type(reason).__name__}",
            rule,
            f"Name the directory that holds train*.{end} and test*.{end} with --data-root.",
        ) from error


def _image_column(part: Any, name: str) -> str:
    for column, feature in part.features.items():
        if type(feature).__name__ == "Image":
            return str(column)
    raise DataError(f"hf/{name} has no column of images; it has {', '.join(part.features)}")


def _label_column(part: Any, name: str) -> str:
    with_classes = [column for column, feature in part.features.items() if _classes(feature) is not None]
    for column in _LABEL_COLUMNS:
        if column in with_classes or (column in part.features and not with_classes):
            return column
    if with_classes:
        return str(with_classes[0])
    raise DataError(f"hf/{name} has no column of labels; it has {', '.join(part.features)}", "One must be `label`.")


def _classes(feature: Any) -> Any:
    """The classes of a column of labels, or of lists of labels; None where it is another."""
    inner = getattr(feature, "feature", feature)
    return inner if type(inner).__name__ == "ClassLabel" else None


def _numbered(feature: Any, cells: list[list[Any]], name: str) -> tuple[Any, ...]:
    classes = _classes(feature)
    several = bool(cells[0]) and isinstance(cells[0][0], (list, tuple))
    names = [str(word) for word in classes.names] if classes is not None else None

    def words(cell: Any) -> list[str]:
        values = cell if several else [cell]
        if names is not None:
            return [names[value] if value is not None and 0 <= value < len(names) else str(value) for value in values]
        return [str(value) for value in values if value is not None]

    def part(which: str, column: list[Any]) -> LabelledPart:
        sources = [f"row {row} of {which} of hf/{name}" for row in range(len(column))]
        return LabelledPart([words(cell) for cell in column], sources, several)

    numbered = number_labels(part("train", cells[0]), part("test", cells[1] if len(cells) > 1 else []), names)
    return numbered if len(cells) > 1 else numbered[:2]


def _complete(part: Any, image: str, label: str, ignored: list[str]) -> tuple[Any, list[Any]]:
    """Images, not decoded, and labels of the rows that have both; says what is left out."""
    import datasets

    images = part.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    cells = part.select_columns([label])[:][label]
    pictured = images.with_format("arrow")[:].column(image).is_valid().to_pylist()
    rows = [row for row, cell in enumerate(cells) if pictured[row] and cell is not None]
    if len(rows) == len(cells):
        return images, cells
    for kind, count in (("image", pictured.count(False)), ("label", cells.count(None))):
        if count:
            ignored.append(f"{count:,} of {len(cells):,} rows of {part.split} without {kind}")
    if "__url__" in part.column_names:
        names = _members(part.select(sorted({*range(len(cells))} - {*rows})))
        ignored.append(f"{len(names):,} files in tar shards, in these rows ({some(names)})")
    return images.select(rows), [cells[row] for row in rows]


def _members(rows: Any) -> list[str]:
    """The names of the files that are in some rows of tar shards: a row is what has one name before the first dot."""
    keys: dict[str, set[str]] = {}
    for shard, key in zip(rows["__url__"], rows["__key__"], strict=True):
        keys.setdefault(shard, set()).add(key)
    names = []
    for shard, left_out in keys.items():
        with suppress(OSError, tarfile.TarError), tarfile.open(shard) as tar:  # datasets may have it in its cache alone
            names += [name for name in tar.getnames() if re.sub(r"\.[^/]*$", "", name) in left_out]
    return names
