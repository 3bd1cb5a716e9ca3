"""Image data sets of the package `datasets`: `--data hf/NAME`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from hybridpar.config import DataConfig
from hybridpar.config.data import HubOptions, data_name
from hybridpar.data.augment import open_image
from hybridpar.data.sources import DATA_SETS, ImageData, image_data, number_labels
from hybridpar.errors import DataError, check
from hybridpar.formats.cache import locked
from hybridpar.spec import with_options

#: Names of the part that is tested on, best first.
_TEST_PARTS = ("test", "validation", "val", "valid")

#: Kinds of files in --data-root, and how their names end.
_FILES = {"webdataset": "tar", "parquet": "parquet"}

#: Columns that are taken for the label where several have classes, best first.
_LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "cls", "json.label", "json.labels", "txt")


class HubRows(Dataset[tuple[Image.Image, Tensor]]):
    """Rows of a data set of the `datasets` library as (image, label)."""

    def __init__(self, rows: Any, column: str, labels: Tensor) -> None:
        self.rows = rows.select_columns([column])
        self.rows = self.rows.cast_column(column, type(rows.features[column])(decode=False))
        self.column = column
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, Tensor]:
        cell = self.rows[index][self.column]
        if cell is None:
            raise ValueError("the row has no image")
        content = cell.get("bytes")
        return open_image(Path(cell["path"]) if content is None else content), self.labels[index]

    def name(self, index: int) -> str:
        """What a row is called in messages."""
        return f"row {index} of {self.rows.split or 'the data set'}"


@DATA_SETS.register("hf/NAME", "an image data set of the Hugging Face hub, from its cache or a copy in --data-root")
def _hub(config: DataConfig) -> ImageData:
    """NAME as `datasets.load_dataset` takes it, with a configuration behind a colon: `hf/org/name:config`.

    Where --data-root holds what `save_to_disk` wrote, that is read; else the hub's cache, and with `download` the hub
    itself. `hf/webdataset` reads the tar shards in --data-root, train*.tar and test*.tar, and `hf/parquet` such files.
    The column of images is found by its type, that of labels by its type or as `label`. Without a test part, 80 % of
    the images of each class are for training, always the same ones.
    """
    name = data_name(config.data).removeprefix("hf/")
    check(name not in ("", "hf"), f"--data {config.data}", "The name of the data set follows: hf/NAME.")
    read = _read(name, config)
    if "train" not in read:
        raise DataError(f"{config.data} has no part train; it has {', '.join(read)}", "Training needs one.")
    used = ["train", *[part for part in _TEST_PARTS if part in read][:1]]
    features = read["train"].features
    image = next((column for column, kind in features.items() if type(kind).__name__ == "Image"), None)
    # Of a column of labels, or of lists of labels.
    inner = {column: getattr(kind, "feature", kind) for column, kind in features.items()}
    classes = {column: kind.names for column, kind in inner.items() if type(kind).__name__ == "ClassLabel"}
    label = next((column for column in (*_LABEL_COLUMNS, *classes) if column in (classes or features)), None)
    if image is None or label is None:
        raise DataError(f"hf/{name} has no columns of images and labels; it has {', '.join(features)}")
    listed = classes.get(label, [])

    def words(cell: Any) -> list[str]:
        values = [value for value in (cell if isinstance(cell, list) else [cell]) if value is not None]
        return [listed[value] if value in range(len(listed)) else str(value) for value in values]

    names, labels = number_labels(
        [[words(cell) for cell in read[part].select_columns([label])[:][label]] for part in used],
        lambda part, row: f"row {row} of {used[part]} of hf/{name}",
        listed,
    )
    rows = [HubRows(read[part], image, numbers) for part, numbers in zip(used, labels, strict=True)]
    ignored = [f"{len(rows):,} rows of the part {part}" for part, rows in read.items() if part not in used]
    return image_data(config, rows, names=names, ignored=ignored)


def _read(name: str, config: DataConfig) -> dict[str, Any]:
    """The parts of a data set."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"the data set {config.data} is read with the package datasets, which cannot be imported: {error}",
            fix="Install it: pip install 'hybridpar[hf]'",
        ) from error
    root, options = config.data_root.resolve(), config.data_options
    assert isinstance(options, HubOptions)
    rule = "It must be in the cache of the package datasets, or in --data-root as save_to_disk wrote it."
    fix = f"Run again with --data {with_options(config.data, download='on')}, or name a copy with --data-root."
    if name in _FILES:
        rule = f"It is read from the files train*.{_FILES[name]} and test*.{_FILES[name]} in --data-root."
        fix = "Check these files, or name another directory."
    try:
        if any((root / file).is_file() for file in ("dataset_dict.json", "state.json")):
            read = datasets.load_from_disk(str(root))
        elif name in _FILES:
            read = datasets.load_dataset(name, data_dir=str(root)).flatten()
        else:
            if options.download:
                root.mkdir(parents=True, exist_ok=True)
            with locked(root / f".{name.replace('/', '--')}.lock") if options.download else nullcontext():
                how = datasets.DownloadConfig(local_files_only=not options.download)
                read = datasets.load_dataset(name, options.configuration, download_config=how)
    except Exception as error:  # the library lets through whatever its back ends raise
        reason = error.__cause__ or error  # what is wrong with a file is the cause of an error that does not say it
        text = " ".join(str(reason).split()) or type(reason).__name__
        raise DataError(f"cannot load {config.data} (--data-root {root}): {text}", rule, fix) from error
    return dict(read) if isinstance(read, dict) else {"train": read}
