"""Map-style data sets of (image, label): torchvision's, those of the package `datasets`, and a user's own.

`hybridpar.config.data` has a line for each of torchvision's. Sets of arrays lie in memory. Where torchvision lets its
callers open the files, they are decoded as those of any other set; the other sets are read image by image.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from torchvision.datasets import ImageFolder

from hybridpar.config import DataConfig
from hybridpar.config.data import TORCHVISION_SETS, HubOptions, data_name, samples_of
from hybridpar.data.augment import open_image
from hybridpar.data.images import ImageFiles
from hybridpar.data.sources import IMAGENET, ImageData, image_data, labels_of, listed_names, number_labels, reading
from hybridpar.errors import DataError, HybridparError, UsageError, check, not_installed, user_error
from hybridpar.registry import find_factory
from hybridpar.spec import with_options

#: Images that mean and standard deviation of a set of arrays are taken from: of the training part, where it has one.
_MEASURED = 2_000

#: Those that are published.
_STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}

#: Names of the part that is tested on, best first.
_TEST_PARTS = ("test", "validation", "val", "valid")

#: Kinds of files in --data-root, and how their names end.
_FILES = {"webdataset": "tar", "parquet": "parquet"}

#: Columns that are taken for the label where several have classes, best first.
_LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "cls", "json.label", "json.labels", "txt")


def load_torchvision(config: DataConfig) -> ImageData:
    """A set of the table, by the name of its row."""
    name = data_name(config.data)
    row = TORCHVISION_SETS[name]
    kind = getattr(torchvision.datasets, row.cls)
    # With `str` to open them, items are (path, label).
    by_path = issubclass(kind, ImageFolder) or "loader" in inspect.signature(kind).parameters
    options = {"loader": str} if by_path else {}
    asked = [{**arguments, **options} for arguments in (row.train, row.test) if arguments is not None]
    parts = [_open(name, kind, arguments, config) for arguments in asked]
    names, statistics = listed_names(parts[0]), IMAGENET
    if by_path:
        # torchvision lists some folders in the order of the file system, which differs between machines.
        items = [sorted(part[index] for index in range(len(part))) for part in parts]
        if name == "clevr":  # labels are counts
            names = [f"{count} objects" for count in range(3, 11)]
            items = [[(path, count - 3) for path, count in files] for files in items]
        parts = [ImageFiles(Path("/"), *zip(*files, strict=True)) for files in items]
    elif isinstance(getattr(parts[0], "data", None), (np.ndarray, Tensor)):
        # Of QMNIST: the class, and more on each digit.
        labels = [part.targets[:, 0] if name == "qmnist" else labels_of(part) for part in parts]
        parts = [TensorDataset(_pixels(part.data), numbers) for part, numbers in zip(parts, labels, strict=True)]
        std, mean = torch.std_mean(parts[0].tensors[0][:_MEASURED] / 255, dim=(0, 2, 3), correction=0)
        statistics = _STATISTICS.get(name, (tuple(mean.tolist()), tuple(std.clamp_min(0.01).tolist())))
    named: dict[str, Any] = {"names": names, "statistics": statistics}
    return image_data(config, parts, size=row.size, flip=row.flip, per_class=row.per_class, **named)


def _open(name: str, kind: Any, arguments: dict[str, Any], config: DataConfig) -> Any:
    """One part of a data set, downloaded where that is wanted."""
    root, download = config.data_root.resolve(), config.data_options.download
    can_download = "download" in inspect.signature(kind).parameters
    again = "Run again with --data NAME:download, or name" if can_download else "Name"
    fix = f"{again} the directory of the files of torchvision.datasets.{kind.__name__} with --data-root."
    if download and not can_download:
        raise DataError(f"torchvision cannot download {name}", fix=f"Leave out `download`. {fix}")
    if can_download:
        arguments = {**arguments, "download": download}
    with reading(f"{name} from {root}", "", fix, lock=root / f".{name}.lock" if download else None):
        if not root.is_dir():  # torchvision would make it
            raise FileNotFoundError("there is no such directory")
        part = kind(root, **arguments)
        if not len(part):
            raise ValueError("it has no images")
        return part


def _pixels(data: Any) -> Tensor:
    """Images of an array, uint8 of shape (samples, 1 or 3, height, width)."""
    pixels = torch.as_tensor(data)
    if pixels.ndim == 3:
        return pixels[:, None]
    return pixels if pixels.shape[1] == 3 else pixels.permute(0, 3, 1, 2).contiguous()


class HubRows(Dataset[tuple[Image.Image, Tensor]]):
    """Rows of a data set of the `datasets` library as (image, label)."""

    labels: Tensor

    def __init__(self, rows: Any, column: str, part: str) -> None:
        self.rows = rows.select_columns([column])
        self.rows = self.rows.cast_column(column, type(rows.features[column])(decode=False))
        self.column, self.part = column, part

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Image.Image, Tensor]:
        cell = self.rows[index][self.column]
        if cell is None:
            raise ValueError("the row has no image")
        content = cell.get("bytes")
        return open_image(Path(cell["path"]) if content is None else content), self.labels[index]

    def name(self, index: int) -> str:
        """What a row is called in messages."""
        return f"row {index} of {self.part}"


def load_hub(config: DataConfig) -> ImageData:
    """NAME as `datasets.load_dataset` takes it, with a configuration behind a colon: `hf/org/name:config`.

    Where --data-root holds what `save_to_disk` wrote, that is read; else the hub's cache, and with `download` the hub
    itself. `hf/webdataset` reads the tar shards in --data-root, train*.tar and test*.tar, and `hf/parquet` such files.
    The column of images is found by its type, that of labels by its type or as `label`. Without a test part, 80 % of
    the images of each class are for training, always the same ones.
    """
    name = data_name(config.data).removeprefix("hf/")
    check(name not in ("", "hf"), f"--data {config.data}", "The name of the data set follows: hf/NAME.")
    read = _read_hub(name, config)
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

    rows = [HubRows(read[part], image, part) for part in used]
    labels = [[words(cell) for cell in read[part].select_columns([label])[:][label]] for part in used]
    names = number_labels(rows, labels, listed)
    ignored = [f"{len(rows):,} rows of the part {part}" for part, rows in read.items() if part not in used]
    return image_data(config, rows, names=names, ignored=ignored)


def _read_hub(name: str, config: DataConfig) -> dict[str, Any]:
    """The parts of a data set."""
    try:
        import datasets
    except ImportError as error:
        what = f"the data set {config.data} is read with the package datasets"
        if isinstance(error, ModuleNotFoundError) and error.name == "datasets":
            raise not_installed(what, "hf") from error
        fix = "Install it again: pip install --force-reinstall 'hybridpar[hf]'"
        raise UsageError(f"{what}, which cannot be imported: {error}", fix=fix) from error
    root, options = config.data_root.resolve(), config.data_options
    assert isinstance(options, HubOptions)
    rule = "It must be in the cache of the package datasets, or in --data-root as save_to_disk wrote it."
    fix = f"Run again with --data {with_options(config.data, download='on')}, or name a copy with --data-root."
    if name in _FILES:
        rule = f"It is read from the files train*.{_FILES[name]} and test*.{_FILES[name]} in --data-root."
        fix = "Check these files, or name another directory."
    lock = root / f".{name.replace('/', '--')}.lock" if options.download else None
    with reading(f"{config.data} (--data-root {root})", rule, fix, lock=lock):
        if any((root / file).is_file() for file in ("dataset_dict.json", "state.json")):
            read = datasets.load_from_disk(str(root))
        elif name in _FILES:
            read = datasets.load_dataset(name, data_dir=str(root)).flatten()
        else:
            from huggingface_hub import constants  # which `datasets` needs

            before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, not options.download
            try:
                read = datasets.load_dataset(name, options.configuration)
            finally:
                constants.HF_HUB_OFFLINE = before
    return dict(read) if isinstance(read, dict) else {"train": read}


def load_users(config: DataConfig) -> ImageData:
    """What a factory returns: a training and a test set, or one set of which four of five images are for training.

    It is called with `root=`, the value of --data-root, where it takes that.
    """
    name = samples_of(config.data)
    factory = find_factory(name, "data set")
    takes_root = "root" in inspect.signature(factory).parameters
    try:
        result = factory(root=config.data_root) if takes_root else factory()
        parts = list(result) if isinstance(result, (tuple, list)) else [result]
        map_style = all(hasattr(part, needed) for part in parts for needed in ("__getitem__", "__len__"))
        rule = "A factory returns one or two map-style data sets, whose items are (image, label)."
        fix = "Return (training set, test set) from it."
        check(map_style and len(parts) in (1, 2), f"{name} returned no data sets", rule, fix)
        return image_data(config, parts)
    except HybridparError:
        raise
    except Exception as error:
        raise user_error(f"the factory {name} failed", error) from error
