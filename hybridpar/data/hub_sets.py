"""Image data sets of the package `datasets`: `--data hf/NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from hybridpar.config import DataConfig
from hybridpar.config.data import HubOptions, data_name, samples_of, with_download
from hybridpar.data.augment import open_image
from hybridpar.data.labels import number_labels
from hybridpar.data.sources import DATA_SETS, ImageData, decoded_data
from hybridpar.errors import DataError, UsageError
from hybridpar.formats.cache import locked

#: Names of the part that is tested on, best first.
_TEST_PARTS = ("test", "validation", "val", "valid")

#: Kinds of files in --data-root: how their names end, and what they must hold.
_FILES = {
    "webdataset": ("tar", "Members of a tar file belong together by name: KEY.jpg, and KEY.cls, KEY.txt or KEY.json."),
    "parquet": ("parquet", "A table has a column of images and one of labels."),
}

#: Columns that are taken for the label where several have classes, best first.
_LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "cls", "json.label", "json.labels", "txt")


class HubRows(Dataset[tuple[Image.Image, Tensor]]):
    """Rows of a data set of the `datasets` library as (image, label)."""

    def __init__(self, rows: Any, column: str, labels: Tensor) -> None:
        self.rows = rows
        self.column = column
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, Tensor]:
        cell = self.rows[index][self.column]
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
    if name in ("", "hf"):
        raise UsageError(f"--data {config.data}", "The name of the data set follows: hf/NAME.", "Use --data hf/NAME.")
    read = _read(name, config)
    used = ["train", *[part for part in _TEST_PARTS if part in read][:1]]
    ignored = [f"{len(rows):,} rows of the part {part}" for part, rows in read.items() if part not in used]
    features = read["train"].features
    image = next((column for column, kind in features.items() if type(kind).__name__ == "Image"), None)
    with_classes = [column for column, kind in features.items() if _classes(kind) is not None]
    label = next((column for column in _LABEL_COLUMNS if column in (with_classes or features)), None)
    label = label or next(iter(with_classes), None)
    if image is None or label is None:
        raise DataError(f"hf/{name} has no columns of images and labels; it has {', '.join(features)}")
    complete = [_complete(read[part], image, label, ignored) for part in used]
    classes = _classes(features[label])
    first = next(iter(complete[0][1]), None)
    several = isinstance(first, (list, tuple))

    def words(cell: Any) -> list[str]:
        values = [value for value in (cell if several else [cell]) if value is not None]
        known = range(len(classes.names)) if classes is not None else ()
        return [str(classes.names[value]) if value in known else str(value) for value in values]

    names, labels = number_labels(
        [[words(cell) for cell in cells] for _, cells in complete],
        lambda part, row: f"row {row} of {used[part]} of hf/{name}",
        several=several,
        names=map(str, classes.names) if classes is not None else (),
    )
    rows = [HubRows(images, image, numbers) for (images, _), numbers in zip(complete, labels, strict=True)]
    return decoded_data(samples_of(config.data), names, config, rows, labels, ignored=ignored)


def _read(name: str, config: DataConfig) -> dict[str, Any]:
    """The parts of a data set."""
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
    rule = "It must be in the cache of the package datasets, or in --data-root as save_to_disk wrote it."
    fix = f"Run again with --data {with_download(config.data)}, or name a copy with --data-root."
    try:
        if any((root / file).is_file() for file in ("dataset_dict.json", "state.json")):
            read = datasets.load_from_disk(str(root))
        elif name in _FILES:
            end, rule = _FILES[name]
            fix = f"Name the directory that holds train*.{end} and test*.{end} with --data-root."
            read = datasets.load_dataset(name, data_dir=str(root)).flatten()
        elif options.download:
            root.mkdir(parents=True, exist_ok=True)
            with locked(root / f".{name.replace('/', '--')}.lock"):
                read = datasets.load_dataset(name, options.configuration)
        else:
            cached = datasets.DownloadConfig(local_files_only=True)
            read = datasets.load_dataset(name, options.configuration, download_config=cached)
    except Exception as error:  # the library lets through whatever its back ends raise
        reason = error.__cause__ or error  # what is wrong with a file is the cause of an error that does not say it
        text = " ".join(str(reason).split()) or type(reason).__name__
        where = f" from {root}" if name in _FILES else ""
        raise DataError(f"cannot load {config.data}{where}: {text}", rule, fix) from error
    parts = dict(read) if isinstance(read, dict) else {"train": read}
    if "train" not in parts:
        raise DataError(f"{config.data} has no part train; it has {', '.join(parts)}", "Training needs one.")
    return parts


def _classes(feature: Any) -> Any:
    """The classes of a column of labels, or of lists of labels; None where it is another."""
    inner = getattr(feature, "feature", feature)
    return inner if type(inner).__name__ == "ClassLabel" else None


def _complete(part: Any, image: str, label: str, ignored: list[str]) -> tuple[Any, list[Any]]:
    """Images, not decoded, and labels of the rows that have both; says what is left out."""
    import datasets

    images = part.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    cells = part.select_columns([label])[:][label]
    pictured = images.with_format("arrow")[:].column(image).is_valid().to_pylist()
    rows = [row for row, cell in enumerate(cells) if pictured[row] and cell is not None]
    if len(rows) == len(cells):
        return images, cells
    ignored.append(f"{len(cells) - len(rows):,} of {len(cells):,} rows of {part.split} without image or label")
    return images.select(rows), [cells[row] for row in rows]
