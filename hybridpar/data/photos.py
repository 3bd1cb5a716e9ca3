"""Crops of the photographs that come with scikit-image and scikit-learn: real images in colour, no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from hybridpar.config import DataConfig
from hybridpar.data.decode import read_image
from hybridpar.data.memory_sets import FIXED_SEED
from hybridpar.data.sampling import Draw, IntArray, bounded, counter_hash
from hybridpar.data.sources import DATA_SETS, ImageData, ImageSet, decoded_data
from hybridpar.errors import DataError

DEFAULT_SIZE = 96

#: Mean and standard deviation per channel of the training crops, of pixels in [0, 1].
STATISTICS = ((0.4681, 0.3989, 0.3706), (0.2733, 0.2298, 0.2374))

#: File of each photograph, by package and folder; all of them are in the wheels of scikit-image and scikit-learn.
PHOTOGRAPHS = {
    "astronaut": ("skimage/data", "astronaut.png"),
    "brick": ("skimage/data", "brick.png"),
    "cat": ("skimage/data", "chelsea.png"),
    "coffee": ("skimage/data", "coffee.png"),
    "coins": ("skimage/data", "coins.png"),
    "flower": ("sklearn/datasets/images", "flower.jpg"),
    "galaxies": ("skimage/data", "hubble_deep_field.jpg"),
    "grass": ("skimage/data", "grass.png"),
    "gravel": ("skimage/data", "gravel.png"),
    "moon": ("skimage/data", "moon.png"),
    "motorcycle": ("skimage/data", "motorcycle_left.png"),
    "photographer": ("skimage/data", "camera.png"),
    "retina": ("skimage/data", "retina.jpg"),
    "rocket": ("skimage/data", "rocket.jpg"),
    "temple": ("sklearn/datasets/images", "china.jpg"),
    "tissue": ("skimage/data", "ihc.png"),
}

#: A photograph is divided into this many rows and columns of cells; a crop lies in one cell.
ROWS, COLUMNS = 2, 3

#: Cells that test images are cut from, as (row, column); training images come from the other four.
TEST_CELLS = ((0, 1), (1, 2))

#: Crops of each cell.
TRAIN_CROPS, TEST_CROPS = 48, 32


@DATA_SETS.register(
    "photos", "3,072 + 1,024 crops of 16 photographs of scikit-image and scikit-learn, 96x96; no download"
)
def _photos(config: DataConfig) -> ImageData:
    """Each photograph is a class; which one does a crop come from?

    A photograph is divided into six cells. Training crops lie in four of them and test crops in the other two, so no
    pixel is in both parts. A crop is a square of half to all of its cell's shorter side, 65 to 470 pixels, and is
    resized. The crops are the same whatever --seed says.
    """
    photographs = [_photograph(*names) for names in PHOTOGRAPHS.values()]
    every = [(row, column) for row in range(ROWS) for column in range(COLUMNS)]
    train_cells = [cell for cell in every if cell not in TEST_CELLS]
    crops = [
        crops_of(photographs, train_cells, TRAIN_CROPS),
        crops_of(photographs, list(TEST_CELLS), TEST_CROPS),
    ]
    mean, std = STATISTICS
    parts = [PhotographCrops(photographs, chosen) for chosen in crops]
    return decoded_data(
        "photos",
        list(PHOTOGRAPHS),
        config,
        parts,
        size=DEFAULT_SIZE,
        mean=mean,
        std=std,
    )


class PhotographCrops(ImageSet):
    """Squares of photographs that are held in memory."""

    def __init__(self, photographs: list[Image.Image], crops: IntArray) -> None:
        super().__init__(torch.from_numpy(crops[:, 0].copy()))
        self.photographs = photographs
        self.crops = crops

    def open(self, index: int) -> Image.Image:
        photograph, left, top, side = (int(number) for number in self.crops[index])
        return self.photographs[photograph].crop((left, top, left + side, top + side))

    def name(self, index: int) -> str:
        return f"crop {index} of {list(PHOTOGRAPHS)[int(self.crops[index, 0])]}"


def crops_of(photographs: list[Image.Image], cells: list[tuple[int, int]], count: int) -> IntArray:
    """Choose squares of photographs, always the same."""
    crops = []
    for number, photograph in enumerate(photographs):
        wide, high = photograph.width // COLUMNS, photograph.height // ROWS
        shorter = min(wide, high)
        for row, column in cells:
            cell = (number * ROWS + row) * COLUMNS + column
            sides, lefts, tops = (
                counter_hash(FIXED_SEED, cell, draw, np.arange(count)) for draw in (Draw.SPLIT, Draw.COLUMN, Draw.ROW)
            )
            for crop in range(count):
                side = shorter - int(bounded(sides[crop : crop + 1], shorter - shorter // 2)[0])
                left = column * wide + int(bounded(lefts[crop : crop + 1], wide - side + 1)[0])
                top = row * high + int(bounded(tops[crop : crop + 1], high - side + 1)[0])
                crops.append((number, left, top, side))
    return np.array(crops, dtype=np.int64)


def _photograph(folder: str, file: str) -> Image.Image:
    package, _, below = folder.partition("/")
    installed = importlib.util.find_spec(package)
    for directory in installed.submodule_search_locations or () if installed is not None else ():
        # Importing the package takes a second in every worker.
        if (path := Path(directory, below, file)).is_file():
            return read_image(path)
    distribution = {"skimage": "scikit-image", "sklearn": "scikit-learn"}[package]
    state = "is not installed" if installed is None else f"has no {below}/{file}"
    raise DataError(
        f"the data set photos comes with {distribution}, which {state}",
        fix="Install it: pip install 'hybridpar[demo]'",
    )
