"""Data sets and loaders that give the same images in the same steps for any number of workers.

`load_dataset` finds a data set by name; `TrainBatches` and `TestBatches` give each worker its share. Files, from the
ground up: `sampling` (who sees what, when), `augment` (what becomes of an image), `images` (labelled images by index),
`sources` (what a data set is and how it is made), `memory_sets`, `file_sets` and `library_sets` (the data sets by name,
imported when they are asked for), `loader` (the batches of a worker), `mix` (mixup and cutmix).
"""

from hybridpar.data.images import ImageFiles, ImageSource, MemoryImages
from hybridpar.data.loader import Batch, TestBatches, TrainBatches
from hybridpar.data.sources import ImageData, describe_data, image_data, load_dataset

__all__ = [
    "Batch",
    "ImageData",
    "ImageFiles",
    "ImageSource",
    "MemoryImages",
    "TestBatches",
    "TrainBatches",
    "describe_data",
    "image_data",
    "load_dataset",
]
