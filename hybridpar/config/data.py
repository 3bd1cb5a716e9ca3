"""Options of a run: model, data, batches and augmentation; and torchvision's data sets, known by a table alone.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from hybridpar.errors import UsageError
from hybridpar.spec import Rule, read_fields


def unless(said: str, otherwise: str) -> Any:
    """The help of an option that is on, and is given as `--no-NAME`."""
    return tyro.conf.arg(help=said, help_behavior_hint=f"(default: {otherwise})")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Model and data: what is trained, on which images, in batches of which size."""

    data: str = "digits"
    """Data set: digits, photos, cifar10, cifar100, caltech101, folder, csv, hf/NAME, another of torchvision in lower
    case (mnist, food101, imagenet, ...), or patterns in noise: `synthetic:samples=1024,classes=10`."""
    data_root: Path = Path("data")
    """Directory of the data set's files; for `folder` it holds train/ and test/ (or val/), for `csv` it may be the
    table, and for `hf/webdataset` it holds tar shards."""
    download: bool = False
    """Let torchvision download the data set into --data-root."""
    batch_size: int | Literal["auto"] = 64
    """Samples per step; `auto`: the smallest as fast as any."""
    loader_workers: int | None = None
    """Loader processes per worker; default: 0 for data held in memory, else 2."""
    image_size: int | None = None
    """Side of square images; default: of the weights or model, else of the data."""
    test_image_size: int | None = None
    """Side of the images in testing, in pixels; default: --image-size."""
    mean: tuple[float, float, float] | None = None
    """Mean of each channel of pixels in [0, 1], taken off; default: as of --image-size."""
    std: tuple[float, float, float] | None = None
    """Standard deviation of each channel, divided by; default: as of --image-size."""
    bad_images: Literal["skip", "error"] = "skip"
    """What an image that cannot be read does: named in the log, another takes its place in training and it is left out
    of the test (skip); or the run ends (error)."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """First layers of a ResNet: 7x7 stride 2 with pooling, or 3x3 stride 1 for small images."""

    @property
    def samples_per_step(self) -> int:
        """`batch_size` as a number.

        Raises:
            UsageError: It is `auto`, which only `hybridpar train` and `plan` replace by a number.
        """
        if self.batch_size == "auto":
            raise UsageError(
                "batch_size is auto",
                "`hybridpar train` chooses a batch; a script makes its own.",
                "Give a number, such as batch_size=64.",
            )
        return self.batch_size


def data_set_kind(name: str) -> str:
    """The registered name of a data set."""
    if name.partition(":")[0] == "synthetic":
        return "synthetic"
    return "hf/NAME" if name == "hf" or name.startswith("hf/") else name


_AT_LEAST_2 = Rule("at least 2", lambda number: number >= 2)


@dataclass(frozen=True)
class Synthetic:
    """`synthetic:samples=1024,classes=10`: patterns in noise.

    Attributes:
        samples: Of training; there are a quarter as many for testing.
        classes: Patterns.
    """

    samples: Annotated[int, _AT_LEAST_2] = 1024
    classes: Annotated[int, _AT_LEAST_2] = 10

    @classmethod
    def read(cls, data: str) -> Synthetic:
        """What `--data` says."""
        return read_fields(f"--data {data}", data.partition(":")[2], cls)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model: what is handed to its builder, the weights that it starts from, and what stays as it is."""

    model_arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Argument of the model's builder or factory, as key=value; may be repeated. A value is read as TOML or Python."""
    drop_rate: float | None = None
    """Dropout before the last layer; default: that of the model."""
    drop_path_rate: float | None = None
    """Stochastic depth; default: that of the model."""
    weights: str | None = None
    """Start from published weights (`default`, or a name of torchvision's or timm's), hf-hub:OWNER/NAME, a .pt or
    .safetensors file, or a checkpoint; the head is new where classes differ."""
    freeze: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Do not train what this pattern names, modules or parameters, as layer[12] or *.bias; may be repeated."""


Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation: how training images are changed at random, and how they are mixed."""

    augment: str = "none"
    """Policy: ra:N,M (RandAugment), ta (TrivialAugment), aa (AutoAugment), augmix, or one of timm as timm/SPEC."""
    hflip: float | None = None
    """Probability of mirroring an image left to right; default: 0.5, and 0 for digits and synthetic."""
    vflip: float = 0.0
    """Probability of mirroring an image upside down."""
    color_jitter: float = 0.0
    """How far brightness, contrast and saturation are changed at most, as a part of them."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Least and largest part of an image's area that a random crop takes; of images from files."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and largest aspect ratio of a random crop; of images from files."""
    random_erasing: float = 0.0
    """Probability of erasing a rectangle of an image."""
    erase_mode: Literal["const", "rand", "pixel"] = "const"
    """What a rectangle is erased to, in timm's words: the mean colour (const), a random colour (rand), or noise that is
    drawn for each pixel (pixel)."""
    interpolation: Interpolation | None = None
    """How images from files are resized; default: as of --image-size, else bilinear."""
    train_interpolation: Interpolation | Literal["random"] | None = None
    """The same in training; `random`: bilinear or bicubic; default: --interpolation."""
    crop_ratio: float | None = None
    """Side of the square that is tested over the shorter side of the resized image; of images from files; default: as
    of --image-size, else 0.875."""
    repeats: int = 1
    """Copies of a sample in a batch, each augmented by itself; an epoch then has that many times fewer samples."""
    mixup: float = 0.0
    """Alpha of mixup: pairs of images are blended; 0: off."""
    cutmix: float = 0.0
    """Alpha of cutmix: a rectangle is taken from the other image of the pair; 0: off."""
    mix_prob: float = 1.0
    """Probability that a batch is mixed."""
    mix_switch: float = 0.5
    """Probability of cutmix where both are on."""
    mix_off_epoch: int = 0
    """Do not mix from this epoch on; 0: always mix."""

    @property
    def mixes(self) -> bool:
        """Whether batches may be mixed, so that samples have neighbours and targets are soft."""
        return self.mixup > 0 or self.cutmix > 0


#: Side that images from files of any size are resized to where nothing says another, in pixels.
USUAL_SIZE = 224


class TorchvisionSet(NamedTuple):
    """How one data set of torchvision is loaded.

    Attributes:
        cls: Class in `torchvision.datasets`.
        about: What is in it, for listings.
        train: Arguments of the class for the training part.
        test: The same for the test part; None where torchvision knows no parts: 4 of 5 images of each class are for
            training then, chosen once and for all.
        size: Side of the square images that come out, unless --image-size says another.
        flip: Whether a mirrored image is still one of its class.
        downloads: Whether torchvision can download it.
        needs: What is to be installed to read it, besides torchvision.
    """

    cls: str
    about: str
    train: dict[str, Any]
    test: dict[str, Any] | None
    size: int = USUAL_SIZE
    flip: bool = True
    downloads: bool = True
    needs: str = ""


_TRAIN, _TEST, _VAL = {"split": "train"}, {"split": "test"}, {"split": "val"}
_TRAINVAL = {"split": "trainval"}
_IS_TRAIN, _IS_TEST = {"train": True}, {"train": False}

#: The data sets by the name users type: torchvision's own in lower case.
TORCHVISION_SETS = {
    "mnist": TorchvisionSet("MNIST", "60,000 + 10,000 digits", _IS_TRAIN, _IS_TEST, 32, False),
    "fashionmnist": TorchvisionSet("FashionMNIST", "60,000 + 10,000 clothes, 10 classes", _IS_TRAIN, _IS_TEST, 32),
    "kmnist": TorchvisionSet("KMNIST", "60,000 + 10,000 hiragana, 10 classes", _IS_TRAIN, _IS_TEST, 32, False),
    "qmnist": TorchvisionSet("QMNIST", "60,000 + 60,000 digits", _IS_TRAIN, _IS_TEST, 32, False),
    "emnist": TorchvisionSet(
        "EMNIST",
        "112,800 + 18,800 digits and letters (balanced), 47 classes",
        {"split": "balanced", "train": True},
        {"split": "balanced", "train": False},
        32,
        False,
    ),
    "usps": TorchvisionSet("USPS", "7,291 + 2,007 digits", _IS_TRAIN, _IS_TEST, 32, False),
    "semeion": TorchvisionSet("SEMEION", "1,593 digits", {}, None, 32, False),
    "svhn": TorchvisionSet("SVHN", "73,257 + 26,032 house numbers", _TRAIN, _TEST, 32, False, needs="scipy"),
    "stl10": TorchvisionSet("STL10", "5,000 + 8,000 photographs, 10 classes", _TRAIN, _TEST, 96),
    "gtsrb": TorchvisionSet("GTSRB", "26,640 + 12,630 traffic signs, 43 classes", _TRAIN, _TEST, 48, False),
    "food101": TorchvisionSet("Food101", "75,750 + 25,250 dishes, 101 classes", _TRAIN, _TEST),
    "flowers102": TorchvisionSet("Flowers102", "1,020 + 6,149 flowers, 102 classes", _TRAIN, _TEST, needs="scipy"),
    "oxfordiiitpet": TorchvisionSet("OxfordIIITPet", "3,680 + 3,669 cats and dogs, 37 classes", _TRAINVAL, _TEST),
    "stanfordcars": TorchvisionSet(
        "StanfordCars", "8,144 + 8,041 cars, 196 classes", _TRAIN, _TEST, downloads=False, needs="scipy"
    ),
    "fgvcaircraft": TorchvisionSet("FGVCAircraft", "6,667 + 3,333 aircraft, 100 classes", _TRAINVAL, _TEST),
    "dtd": TorchvisionSet("DTD", "1,880 + 1,880 textures, 47 classes", _TRAIN, _TEST),
    "eurosat": TorchvisionSet("EuroSAT", "27,000 satellite images, 10 classes", {}, None, 64),
    "country211": TorchvisionSet("Country211", "31,650 + 21,100 photographs, 211 countries", _TRAIN, _TEST),
    "sun397": TorchvisionSet("SUN397", "108,754 scenes, 397 classes", {}, None),
    "caltech256": TorchvisionSet("Caltech256", "30,607 photographs, 257 classes", {}, None),
    "pcam": TorchvisionSet("PCAM", "262,144 + 32,768 tissue patches, 2 classes", _TRAIN, _TEST, 96, needs="h5py"),
    "renderedsst2": TorchvisionSet(
        "RenderedSST2", "6,920 + 1,821 written reviews, 2 classes", _TRAIN, _TEST, USUAL_SIZE, False
    ),
    "fer2013": TorchvisionSet("FER2013", "28,709 faces for training, 7 moods", _TRAIN, _TEST, 48, downloads=False),
    "clevr": TorchvisionSet("CLEVRClassification", "70,000 + 15,000 scenes by number of objects", _TRAIN, _VAL),
    "celeba": TorchvisionSet(
        "CelebA", "162,770 + 19,962 faces with 40 attributes each: several labels", _TRAIN, _TEST, 128, needs="gdown"
    ),
    "inaturalist": TorchvisionSet(
        "INaturalist",
        "iNaturalist 2021, 10,000 species",
        {"version": "2021_train"},
        {"version": "2021_valid"},
    ),
    "places365": TorchvisionSet(
        "Places365",
        "1,803,460 + 36,500 scenes, 365 classes; small images",
        {"split": "train-standard", "small": True},
        {"split": "val", "small": True},
    ),
    "lfwpeople": TorchvisionSet("LFWPeople", "13,233 faces of 5,749 people", {"split": "10fold"}, None),
    "imagenet": TorchvisionSet("ImageNet", "ILSVRC 2012, 1,000 classes", _TRAIN, _VAL, downloads=False, needs="scipy"),
    "imagenette": TorchvisionSet("Imagenette", "9,469 + 3,925 photographs, 10 classes of ImageNet", _TRAIN, _VAL),
}

#: Data sets of image files of any size, besides those of the table.
_FILES = ("folder", "csv", "hf/NAME", "caltech101")


def is_of_any_size(data: str) -> bool:
    """Whether a data set consists of image files of any size, and not of images of one small size."""
    made = TORCHVISION_SETS.get(data)
    return data_set_kind(data) in _FILES or (made is not None and made.size == USUAL_SIZE)
