"""Data sets and loaders that give the same images in the same steps for any number of workers.

`load_dataset` finds a data set by name, `TrainBatches` and `TestBatches` give each worker its share, and `cut_epoch`
says how an epoch is cut. Files, from the ground up: `sampling` (who sees what, when), `augment` (whole batches in
memory), `decode` (image files), `sources` (images in memory or in files), `downloads` and
`labels` (for the next), `memory_sets`, `photos`, `file_sets`, `map_sets`, `torchvision_sets`, `csv_set` and
`hub_sets` (the data sets by name), `loader` (the batches of a worker).
"""

from hybridpar.data import (  # noqa: F401 (each enters its sets into DATA_SETS)
    csv_set,
    file_sets,
    hub_sets,
    memory_sets,
    photos,
    torchvision_sets,
)
from hybridpar.data.loader import Batch, TestBatches, TrainBatches
from hybridpar.data.sampling import cut_epoch, divide
from hybridpar.data.sources import (
    DATA_SETS,
    DecodedImages,
    ImageData,
    ImageFiles,
    ImageSet,
    ImageSource,
    MemoryImages,
    describe_data,
    load_dataset,
)

__all__ = [
    "DATA_SETS",
    "Batch",
    "DecodedImages",
    "ImageData",
    "ImageFiles",
    "ImageSet",
    "ImageSource",
    "MemoryImages",
    "TestBatches",
    "TrainBatches",
    "cut_epoch",
    "describe_data",
    "divide",
    "load_dataset",
]
