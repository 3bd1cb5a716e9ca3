"""Describes the data of a run, with the files that cannot be used.

Images are read for this, for a few seconds at most: all of them where that is enough, else some that are spread over
the data set. What is found changes nothing in the training: the loader itself does without files it cannot read.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from hybridpar.data.sources import DecodedImages, FileImages, ImageData, ImageSource
from hybridpar.errors import DataError

#: Seconds for which the files of each part are read at the start.
LOOK_SECONDS = 2.0

#: Files that are read at once, and that are named where they cannot be.
_AT_ONCE, _NAMED = 64, 3


def describe_data(data: ImageData, *, seconds: float = LOOK_SECONDS) -> str:
    """One line on a data set: samples, classes, size of the images, what was ignored and what cannot be read.

    Args:
        data: The data set.
        seconds: How long files of each part are read.

    Raises:
        DataError: Not one of the training images, or of the test images, that were tried can be read; or one cannot,
            and the run is to end there.
    """
    channels, height, width = data.sample_shape
    size = f"{height}x{width}" + ("" if channels == 3 else f", {channels} channel{'' if channels == 1 else 's'}")
    images = f"{len(data.train):,} training and {len(data.test):,} test images"
    parts = [f"{data.name}, {images}, {data.classes:,} class{'' if data.classes == 1 else 'es'}, {size}"]
    if data.ignored:
        parts.append(f"ignored: {', '.join(data.ignored)}")
    parts += [text for name in ("test", "training") if (text := _damage(data, name, seconds))]
    return "; ".join(parts)


def _damage(data: ImageData, name: str, seconds: float) -> str:
    """What to say of the files of a part that cannot be read; empty where all that were tried can."""
    source: ImageSource = data.test if name == "test" else data.train
    if not isinstance(source, DecodedImages):
        return ""
    problems, tried = _look(source, seconds)
    if not problems:
        return ""
    if source.strict:
        raise next(iter(problems.values()))
    if len(problems) == tried:
        first = next(iter(problems.values()))
        raise DataError(f"no {name} image can be read; {tried:,} were tried, and {first.what}", first.why, first.fix)
    whole = "" if tried == len(source) else " that were tried"
    places = sorted(problems)
    folder = f"{source.root}{os.sep}" if isinstance(source, FileImages) else ""
    named = ", ".join(source.name(place).removeprefix(folder) for place in places[:_NAMED])
    more = ", ..." if len(places) > _NAMED else ""
    use = "left out" if name == "test" else "replaced by other images"
    return f"{len(problems):,} of {tried:,} {name} images{whole} cannot be read and will be {use}: {named}{more}"


def _look(source: DecodedImages, seconds: float) -> tuple[dict[int, DataError], int]:
    """Read files in an order that is spread over the data set.

    Returns:
        What is wrong with those that cannot be read, by index; and the number of files that were tried.
    """
    stride = max(1, len(source) // 1000)
    order = [index for first in range(stride) for index in range(first, len(source), stride)]
    problems: dict[int, DataError] = {}
    tried, end = 0, time.monotonic() + seconds

    def check(index: int) -> tuple[int, DataError | None]:
        try:
            source.check(index)
        except DataError as error:
            return index, error
        return index, None

    with ThreadPoolExecutor() as pool:
        while tried < len(order) and (tried == 0 or time.monotonic() < end):
            batch = order[tried : tried + _AT_ONCE]
            problems |= {index: error for index, error in pool.map(check, batch) if error is not None}
            tried += len(batch)
    return problems, tried
