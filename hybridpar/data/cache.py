"""Decoded images kept in memory (`--cache-images`), for data sets of files that are read more than once.

Decoding is most of the work on a JPEG file. What is kept are the pixels as they were decoded, before anything random is
done to them, in each size that was decoded: images come out the same with and without. The memory is shared with the
loader processes, which are forked, so that each of them finds what the others decoded, epoch after epoch.
"""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from hybridpar.data.decode import SCALES, draft_size
from hybridpar.errors import DataError
from hybridpar.machine.process import free_memory

#: What part of the free memory is used at most, by all workers of the machine.
PART = 0.5

Pixels = npt.NDArray[np.uint8]

#: Columns of the table: width, height, whether the image can be decoded at a fraction of its size, and where its pixels
#: are in each size, counted from 1; 0 for what is not known yet.
_WIDTH, _HEIGHT, _DRAFTS, _PLACES = 0, 1, 2, 3


def memory_for_images(workers: int) -> int:
    """Bytes that a worker may fill with decoded images.

    Args:
        workers: Workers of this machine, each of which fills as much.

    Returns:
        Its share of half of what is free now.
    """
    return int(free_memory() * PART / workers)


class ImageCache:
    """Pixels of images by sample and size, in memory that is shared with processes forked later.

    A process that is not forked finds it empty and keeps nothing.

    Args:
        samples: Number of images.
        limit: Bytes of pixels that are kept at most. They are taken from the system as they are filled.
    """

    def __init__(self, samples: int, limit: int) -> None:
        self.samples = samples
        self.limit = limit
        columns = _PLACES + 1 + len(SCALES)
        self._pixels: Pixels = _shared(limit).view(np.uint8)[:limit]
        self._table: npt.NDArray[np.int64] = _shared(8 * columns * samples + 8).view(np.int64)
        self._used, self._table = self._table[:1], self._table[1 : 1 + columns * samples].reshape(samples, columns)
        self._lock = multiprocessing.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageCache, (self.samples, 0)

    @property
    def used(self) -> int:
        """Bytes of pixels that are kept now."""
        return int(self._used[0])

    def open(self, index: int, file: Callable[[int], Image.Image]) -> Image.Image:
        """An image whose pixels are taken from here, or from its file and then kept while there is room.

        Args:
            index: The sample.
            file: What opens it, as `hybridpar.data.decode.open_image` does.

        Returns:
            An image in RGB that behaves as the opened one.

        Raises:
            DataError: It is not known yet, and cannot be read.
        """
        return _CachedImage(self, index, file)

    def facts(self, index: int) -> tuple[tuple[int, int], bool] | None:
        """What is known of an image.

        Args:
            index: The sample.

        Returns:
            Its width and height, and whether it can be decoded at a fraction of them; None for one that is new.
        """
        with self._lock:
            width, height, drafts = self._table[index, :_PLACES].tolist()
        return ((width, height), bool(drafts)) if width else None

    def note(self, index: int, size: tuple[int, int], drafts: bool) -> None:
        """Keep what is known of an image.

        Args:
            index: The sample.
            size: Its width and height.
            drafts: Whether it can be decoded at a fraction of them.
        """
        with self._lock:
            self._table[index, :_PLACES] = (*size, drafts) if self.limit else 0

    def get(self, index: int, divisor: int, size: tuple[int, int]) -> Pixels | None:
        """The pixels of an image.

        Args:
            index: The sample.
            divisor: What part of its size it is wanted at.
            size: Width and height at that size.

        Returns:
            Shape (height, width, 3); None where they are not kept.
        """
        with self._lock:
            place = int(self._table[index, _column(divisor)])
        if not place:
            return None
        return self._pixels[place - 1 : place - 1 + 3 * size[0] * size[1]].reshape(size[1], size[0], 3)

    def put(self, index: int, divisor: int, pixels: Pixels) -> None:
        """Keep the pixels of an image, if there is room.

        Args:
            index: The sample.
            divisor: What part of its size they are decoded at.
            pixels: Shape (height, width, 3).
        """
        with self._lock:
            start, column = int(self._used[0]), _column(divisor)
            if self._table[index, column] or start + pixels.size > self.limit:
                return
            self._used[0] = start + pixels.size
            self._pixels[start : start + pixels.size] = pixels.reshape(-1)
            self._table[index, column] = start + 1


class _CachedImage(Image.Image):
    """An image that looks up its pixels when they are first used, and can be decoded at a fraction of its size before.

    Args:
        cache: Where they may be.
        index: The sample.
        file: What opens it.
    """

    def __init__(self, cache: ImageCache, index: int, file: Callable[[int], Image.Image]) -> None:
        super().__init__()
        self._cache, self._index, self._open = cache, index, file
        self._file: Image.Image | None = None
        self._divisor = 1
        known = cache.facts(index)
        if known is None:
            self._file = file(index)
            known = self._file.size, self._file.format == "JPEG" and bool(getattr(self._file, "tile", ()))
            cache.note(index, *known)
        self._whole, self._drafts = known
        self._size = self._whole
        self._mode = "RGB"

    def draft(self, mode: str | None, size: tuple[int, int] | None) -> None:
        """Have it decoded at a fraction of its size, as Pillow's images of JPEG files do."""
        if self._drafts and self._im is None and self._divisor == 1 and size is not None:
            scale = min(self._whole[0] // size[0], self._whole[1] // size[1])
            self._divisor = next((divisor for divisor in SCALES if divisor <= scale), 1)
            self._size = draft_size(self._whole, self._divisor)

    def load(self) -> Any:
        if self._im is None:
            self._im = Image.fromarray(self._pixels()).im
        return super().load()

    def crop(self, box: tuple[float, float, float, float] | None = None) -> Image.Image:
        """A part of the image, without a copy of the rest."""
        if box is None or self._im is not None or not _inside(box, self._size):
            return super().crop(box)
        left, top, right, bottom = (round(edge) for edge in box)
        return Image.fromarray(self._pixels()[top:bottom, left:right])

    def _pixels(self) -> Pixels:
        found = self._cache.get(self._index, self._divisor, self._size)
        if found is None:
            image = self._open(self._index) if self._file is None else self._file
            self._file = None
            if self._divisor > 1:
                # Pillow divides by the largest fraction that is not smaller than what is asked for.
                image.draft(None, (self._whole[0] // self._divisor, self._whole[1] // self._divisor))
            found = np.asarray(image)
            self._cache.put(self._index, self._divisor, found)
        return found


def _shared(size: int) -> npt.NDArray[np.uint8]:
    """Zeros that forked processes share; memory is taken when it is written to. Freed with the last view."""
    try:
        return np.frombuffer(mmap.mmap(-1, max(1, size)), dtype=np.uint8)
    except (OSError, OverflowError) as error:  # where memory must not be promised twice
        raise DataError(
            f"the system gives no {size / 1e9:.1f} GB of memory for decoded images: {error}",
            fix="Leave out --cache-images.",
        ) from error


def _column(divisor: int) -> int:
    return _PLACES + (0 if divisor == 1 else 1 + SCALES.index(divisor))


def _inside(box: tuple[float, float, float, float], size: tuple[int, int]) -> bool:
    return 0 <= box[0] <= box[2] <= size[0] and 0 <= box[1] <= box[3] <= size[1]
