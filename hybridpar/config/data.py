"""Options of a run: model, data, batches and augmentation; and torchvision's data sets, known by a table alone.

Nothing here imports torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import tyro
from annotated_types import Ge

from hybridpar.errors import UsageError, check, counted
from hybridpar.spec import (
    AT_LEAST_0,
    AT_LEAST_1,
    AT_MOST_1,
    BELOW_1,
    POSITIVE,
    Options,
    Spec,
    Unnamed,
    between,
    overlay,
    read_fields,
    split_name,
    with_options,
)

Interpolation = Literal["bilinear", "bicubic"]


class Images(Options):
    """`224,test=288,...`: the images that a model is fed.

    Attributes:
        size: Side of the square images, in pixels; None: of the data.
        test: Side in testing; None: as `size`.
        crop: Side of the square that is tested over the shorter side of the resized image, of images from files; None:
            0.875.
        mean: Mean of each channel of pixels in [0, 1], taken off; None: of the data.
        std: Standard deviation of each channel, divided by; None: of the data.
        interpolation: How images from files are resized; None: bilinear.
        train_interpolation: The same in training, of which `random` is one of the two; None: as `interpolation`.
        channels: Of the images: 1 is grey, 3 is RGB, and 4 is RGBA.
    """

    size: Annotated[int | None, Unnamed("PX"), Ge(8)] = None
    test: Annotated[int | None, Ge(8)] = None
    crop: Annotated[float | None, AT_MOST_1] = None
    mean: tuple[Annotated[float, between(0, 1)], ...] | None = None
    std: tuple[Annotated[float, POSITIVE], ...] | None = None
    interpolation: Interpolation | None = None
    train_interpolation: Literal["bilinear", "bicubic", "random"] | None = None
    channels: int = 3

    def __post_init__(self) -> None:
        check(self.channels in (1, 3, 4), f"--image-size: channels={self.channels}", "It must be 1, 3 or 4.")
        for key, values in (("mean", self.mean), ("std", self.std)):
            fits = values is None or len(values) == self.channels
            why = f"It needs one for each of {counted(self.channels, 'channel')}."
            check(fits, f"--image-size: {key} has {len(values or ())} numbers", why)


class Augmentation(Options, choice="none"):
    """`none`: no policy; and how training images are changed with and without one.

    Attributes:
        hflip: Probability of mirroring an image left to right; None: 0.5, and 0 for digits, letters and signs.
        vflip: Probability of mirroring an image upside down.
        color_jitter: How far brightness, contrast and saturation are changed at most, as a part of them.
        erase: Probability of erasing a rectangle of an image.
        erase_mode: What a rectangle is erased to, in timm's words: the mean colour (`const`), a random colour (`rand`),
            or noise that is drawn for each pixel (`pixel`).
        scale: Least and largest part of an image's area that a random crop takes, of images from files.
        ratio: Least and largest aspect ratio of a random crop, of images from files.
        repeats: Copies of a sample in a batch, each augmented by itself; an epoch then has that many times fewer
            samples.
    """

    hflip: Annotated[float | None, between(0, 1)] = None
    vflip: Annotated[float, between(0, 1)] = 0.0
    color_jitter: Annotated[float, between(0, 1)] = 0.0
    erase: Annotated[float, between(0, 1)] = 0.0
    erase_mode: Literal["const", "rand", "pixel"] = "const"
    scale: tuple[Annotated[float, AT_MOST_1], Annotated[float, AT_MOST_1]] = (0.08, 1.0)
    ratio: tuple[Annotated[float, POSITIVE], Annotated[float, POSITIVE]] = (3 / 4, 4 / 3)
    repeats: Annotated[int, AT_LEAST_1] = 1

    def __post_init__(self) -> None:
        for key, values in (("scale", self.scale), ("ratio", self.ratio)):
            what = f"--augment: {key}={values[0]:g}/{values[1]:g}"
            check(values[0] <= values[1], what, "It must be two numbers, the smaller one first.")


class RandAugment(Augmentation, choice="ra"):
    """`ra`: RandAugment.

    Attributes:
        n: Operations.
        m: Their magnitude.
    """

    n: Annotated[int, AT_LEAST_1] = 2
    m: Annotated[int, between(0, 30)] = 9


class TrivialAugment(Augmentation, choice="ta"):
    """`ta`: TrivialAugment."""


class AutoAugment(Augmentation, choice="aa"):
    """`aa`: AutoAugment.

    Attributes:
        set: The data set that the policy was learned on.
    """

    set: Literal["imagenet", "cifar10", "svhn"] = "imagenet"


class AugMix(Augmentation, choice="augmix"):
    """`augmix`: AugMix."""


class TimmAugment(Augmentation, choice="timm"):
    """`timm:SPEC`: a policy of timm.

    Attributes:
        spec: What timm's `--aa` takes.
    """

    spec: Annotated[str, Unnamed("SPEC")]


class Mixing(Options):
    """`mixup=0.2,cutmix=1,...`: how the images of a batch are mixed.

    Attributes:
        mixup: Alpha of mixup: pairs of images are blended; 0: off.
        cutmix: Alpha of cutmix: a rectangle is taken from the other image of the pair; 0: off.
        prob: Probability that a batch is mixed.
        switch: Probability of cutmix where both are on.
        off: Epoch from which on no batch is mixed; 0: always mix.
    """

    mixup: Annotated[float, AT_LEAST_0] = 0.0
    cutmix: Annotated[float, AT_LEAST_0] = 0.0
    prob: Annotated[float, between(0, 1)] = 1.0
    switch: Annotated[float, between(0, 1)] = 0.5
    off: Annotated[int, AT_LEAST_0] = 0

    @property
    def is_on(self) -> bool:
        """Whether batches may be mixed, so that samples have neighbours and targets are soft."""
        return self.mixup > 0 or self.cutmix > 0


class DropRates(Options):
    """`0.1,path=0.2`: dropout.

    Attributes:
        rate: Dropout before the last layer; None: that of the model.
        path: Stochastic depth; None: that of the model.
    """

    rate: Annotated[float | None, Unnamed("RATE"), BELOW_1] = None
    path: Annotated[float | None, BELOW_1] = None


class DataOptions(Options):
    """What every data set takes behind its name.

    Attributes:
        bad: What an image that cannot be read does: another takes its place in training, and it is left out of the test
            (`skip`); or the run ends (`error`).
        download: Fetch the data set into --data-root.
    """

    bad: Literal["skip", "error"] = "skip"
    download: bool = False


class HubOptions(DataOptions):
    """`hf/NAME:CONFIGURATION`: a data set of the Hugging Face hub.

    Attributes:
        configuration: Which of its configurations; None: the only one.
    """

    configuration: Annotated[str | None, Unnamed("CONFIGURATION")] = None


class UserOptions(DataOptions):
    """`package.module:factory`: data sets of a user's own.

    Attributes:
        factory: What makes them, in the module.
    """

    factory: Annotated[str, Unnamed("FACTORY")]


class Synthetic(DataOptions):
    """`synthetic:samples=1024,classes=10`: patterns in noise.

    Attributes:
        samples: Of training; there are a quarter as many for testing.
        classes: Patterns.
    """

    samples: Annotated[int, Ge(2)] = 1024
    classes: Annotated[int, Ge(2)] = 10


def data_name(data: str) -> str:
    """The name of a data set without its options."""
    return split_name(data)[0]


def data_set_kind(data: str) -> str:
    """The registered name of a data set."""
    name = data_name(data)
    if name == "hf" or name.startswith("hf/"):
        return "hf/NAME"
    is_named = name in TORCHVISION_SETS or name in OTHER_SETS
    is_factory = re.match(r"[\w.]+:(?!download\s*(,|$))[A-Za-z_]\w*\s*(,|$)", data.strip())
    return USERS if is_factory and not is_named else name


def samples_of(data: str) -> str:
    """What `data` says of the samples and their order: all but how their files are got and read."""
    return with_options(data, bad=None, download=None)


def images_over(below: int | str | None, above: int | str | None) -> str:
    """Two values of `--image-size` as one, in which the second wins."""
    lower, upper = ("" if text is None else str(text) for text in (below, above))
    return overlay(f"--image-size {above}", lower, upper, Images)


#: Side that images from files of any size are resized to where nothing says another, in pixels.
USUAL_SIZE = 224


class TorchvisionSet(NamedTuple):
    """How one data set of torchvision is loaded.

    Attributes:
        cls: Class in `torchvision.datasets`.
        train: Arguments of the class for the training part.
        test: The same for the test part; None where torchvision knows no parts: 4 of 5 images of each class are for
            training then, chosen once and for all.
        size: Side of the square images that come out, unless --image-size says another.
        flip: Whether a mirrored image is still one of its class.
        per_class: Images of each class that are for training where torchvision knows no parts; None: 4 of 5.
    """

    cls: str
    train: dict[str, Any]
    test: dict[str, Any] | None
    size: int = USUAL_SIZE
    flip: bool = True
    per_class: int | None = None


_TRAIN, _TEST, _VAL = {"split": "train"}, {"split": "test"}, {"split": "val"}
_SPLIT, _TRAINVAL = (_TRAIN, _TEST), ({"split": "trainval"}, _TEST)
_FLAG: tuple[dict[str, Any], dict[str, Any]] = {"train": True}, {"train": False}
_ONE_PART: tuple[dict[str, Any], None] = {}, None
_BALANCED, _SMALL = {"split": "balanced"}, {"small": True}


def _alike(
    classes: str, train: dict[str, Any], test: dict[str, Any] | None, size: int = USUAL_SIZE, *, flip: bool = True
) -> dict[str, TorchvisionSet]:
    """Data sets that are loaded in the same way, by the names of their classes in lower case."""
    return {cls.lower(): TorchvisionSet(cls, train, test, size, flip) for cls in classes.split()}


#: The data sets by the name users type: torchvision's own in lower case.
TORCHVISION_SETS = {
    **_alike("CIFAR10 CIFAR100 FashionMNIST", *_FLAG, 32),
    **_alike("MNIST KMNIST QMNIST USPS", *_FLAG, 32, flip=False),
    **_alike("EMNIST", _BALANCED | _FLAG[0], _BALANCED | _FLAG[1], 32, flip=False),
    **_alike("SEMEION", *_ONE_PART, 32, flip=False),
    **_alike("EuroSAT", *_ONE_PART, 64),
    **_alike("SUN397 Caltech256", *_ONE_PART),
    **_alike("LFWPeople", {"split": "10fold"}, None),
    # 30 training images per class: the usual protocol (Fei-Fei, Fergus and Perona 2004).
    "caltech101": TorchvisionSet("Caltech101", {}, None, per_class=30),
    **_alike("SVHN", *_SPLIT, 32, flip=False),
    **_alike("GTSRB", *_SPLIT, 48, flip=False),
    **_alike("FER2013", *_SPLIT, 48),
    **_alike("STL10 PCAM", *_SPLIT, 96),
    **_alike("CelebA", *_SPLIT, 128),
    **_alike("RenderedSST2", *_SPLIT, flip=False),
    **_alike("Food101 Flowers102 StanfordCars DTD Country211", *_SPLIT),
    **_alike("OxfordIIITPet FGVCAircraft", *_TRAINVAL),
    "clevr": TorchvisionSet("CLEVRClassification", _TRAIN, _VAL),
    **_alike("ImageNet Imagenette", _TRAIN, _VAL),
    **_alike("INaturalist", {"version": "2021_train"}, {"version": "2021_valid"}),
    **_alike("Places365", _SMALL | {"split": "train-standard"}, _SMALL | _VAL),
}

#: How data sets of a user's own are named.
USERS = "package.module:factory"

#: Data sets besides those of the table: of image files of any size, and of small images.
_FILES = ("folder", "csv", "hf/NAME", USERS)
#: Data sets besides those of torchvision, by the name users type.
OTHER_SETS = (*_FILES, "digits", "synthetic")


def is_of_any_size(data: str) -> bool:
    """Whether a data set consists of image files of any size, and not of images of one small size."""
    made = TORCHVISION_SETS.get(data_name(data))
    return data_set_kind(data) in _FILES or (made is not None and made.size == USUAL_SIZE)


class DataConfig(Options):
    """Data: images, batches, and how training images are changed at random.

    Attributes:
        data: Data set: digits, cifar10, cifar100, caltech101, folder, csv, hf/NAME, another of torchvision
            (mnist, ...), package.module:factory, or `synthetic:samples=1024`. `NAME:download` fetches it;
            `NAME:bad=error` ends the run at a bad image.
        data_root: Directory of the data set's files; of `csv` it may be the table.
        batch_size: Samples per step; `auto`: the smallest as fast as any.
        loader_workers: Loader processes per worker; default: 0 for data held in memory, else 2.
        image_size: Side of images in pixels; also `224,test=288,crop=0.95,channels=1`, ...; default: of the weights or
            model, else of the data.
        augment: Policy `ra:n=2,m=9`, `ta`, `aa`, `augmix` or `timm:SPEC`; also
            `hflip=0.5,color_jitter=0.4,erase=0.25,repeats=3`, ...
        mix: Mix the images of a batch: `mixup=0.2,cutmix=1,prob=1,switch=0.5,off=280`.
    """

    data: Annotated[str, tyro.conf.arg(metavar="NAME")] = "digits"
    data_root: Path = Path("data")
    batch_size: Annotated[int, AT_LEAST_1] | Literal["auto"] = 64
    loader_workers: Annotated[int | None, AT_LEAST_0] = None
    image_size: Annotated[int | str | None, tyro.conf.arg(metavar="PX")] = None
    augment: Annotated[str, tyro.conf.arg(metavar="POLICY")] = "none"
    mix: Annotated[str | None, tyro.conf.arg(metavar="KEY=...")] = None

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

    images = Spec("image_size", Images, absent=Images())
    augmentation = Spec("augment", Augmentation, usual="none")
    mixing = Spec("mix", Mixing, absent=Mixing())

    @property
    def data_options(self) -> DataOptions:
        """What `data` says behind the name of the data set."""
        kinds: dict[str, Any] = {"hf/NAME": HubOptions, "synthetic": Synthetic, USERS: UserOptions}
        kind = kinds.get(data_set_kind(self.data), DataOptions)
        return cast("DataOptions", read_fields(f"--data {self.data}", split_name(self.data)[1], kind))


class ModelConfig(Options):
    """Model: what is handed to its builder, the weights that it starts from, and what stays as it is.

    Attributes:
        model_arg: Argument of the model's builder or factory, as key=value; may be repeated. A value is read as
            Python. `stem=cifar` gives a ResNet first layers for small images.
        drop: Dropout before the last layer, and stochastic depth: `0.1,path=0.2`; default: those of the model.
        weights: Start from published weights (`default`, or a name of torchvision's or timm's), hf-hub:OWNER/NAME, a
            .pt or .safetensors file, or a checkpoint; the head is new where classes differ.
        freeze: Do not train what this pattern names, modules or parameters, as layer[12] or *.bias; may be repeated.
    """

    model_arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    drop: Annotated[float | str | None, tyro.conf.arg(metavar="RATE[,...]")] = None
    weights: str | None = None
    freeze: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()

    drop_rates = Spec("drop", DropRates, absent=DropRates())


def read_images(text: int | str | None) -> Images:
    """The images that a value of `--image-size` stands for."""
    return DataConfig(image_size=text).images
