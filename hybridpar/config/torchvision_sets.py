"""torchvision's classification data sets that are known by a table alone. Nothing here imports torch.

`hybridpar/data/torchvision_sets.py` loads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hybridpar.config.data import data_set_kind

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
_FILES = ("folder", "csv", "webdataset", "hf/NAME", "caltech101")


def is_of_any_size(data: str) -> bool:
    """Whether a data set consists of image files of any size, and not of images of one small size.

    Args:
        data: The data set as the user names it.
    """
    made = TORCHVISION_SETS.get(data)
    return data_set_kind(data) in _FILES or (made is not None and made.size == USUAL_SIZE)
