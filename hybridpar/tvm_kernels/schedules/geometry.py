"""Which taps of which output element lie inside of the image, known before anything is compiled.

Forward and input gradient are one thing here: each output element gathers some input elements, each times a tap. What
differs is where: in the forward direction at out·stride + tap·dilation − padding, in the input gradient at
(out + padding − tap·dilation) / stride where that is a whole number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridpar.codegen.tir_writer import Writer
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: What every function of a kernel takes: addresses, then a range.
ARGUMENTS = ("first", "second", "third", "out", "scratch", "begin", "end")

#: Channels that are one step of the range of `prepare`.
PREPARED = 16

#: (tap, input element) for each tap that an output element uses.
Taps = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Axis:
    """One axis, rows or columns, of what is gathered.

    Attributes:
        out: Elements to compute.
        size: Elements to gather from.
        taps: Taps of the kernel.
        stride: Of the convolution.
        padding: Of the convolution.
        dilation: Of the convolution.
        transposed: Whether this is the input gradient.
    """

    out: int
    size: int
    taps: int
    stride: int
    padding: int
    dilation: int
    transposed: bool

    def unbounded(self, out: int) -> Taps:
        """Taps of an output element if the input went on for ever."""
        if not self.transposed:
            first = out * self.stride - self.padding
            return tuple((tap, first + tap * self.dilation) for tap in range(self.taps))
        places = ((tap, out + self.padding - tap * self.dilation) for tap in range(self.taps))
        return tuple((tap, place // self.stride) for tap, place in places if place % self.stride == 0)

    def bounded(self, out: int) -> Taps:
        """Taps of an output element that meet the input."""
        return tuple((tap, place) for tap, place in self.unbounded(out) if 0 <= place < self.size)

    @property
    def whole(self) -> int:
        """Tiles of a multiple of so many elements all look alike."""
        return self.stride if self.transposed else 1

    def shift(self, tile: int) -> int:
        """How far the input moves from one tile to the next."""
        return tile // self.stride if self.transposed else tile * self.stride


@dataclass(frozen=True)
class Span:
    """Tiles side by side that look alike.

    Attributes:
        start: First output element of the first tile.
        count: Tiles.
        taps: Of each output element of the first tile.
    """

    start: int
    count: int
    taps: tuple[Taps, ...]

    @property
    def width(self) -> int:
        """Output elements of one tile."""
        return len(self.taps)


def axis(shape: ConvShape, direction: Direction, which: int) -> Axis:
    """Rows (0) or columns (1) of a forward convolution or an input gradient."""
    image = (shape.height, shape.width)[which]
    result = (shape.out_height, shape.out_width)[which]
    transposed = direction is Direction.INPUT_GRADIENT
    out, size = (image, result) if transposed else (result, image)
    own = (shape.kernel[which], shape.stride[which], shape.padding[which], shape.dilation[which])
    return Axis(out, size, *own, transposed)


@functools.lru_cache(1024)
def spans(along: Axis, tile: int) -> tuple[Span, ...]:
    """Divide an axis into tiles, the last one narrower where it must be; whole runs without a border are one span.

    Args:
        along: The axis.
        tile: Elements of a tile, a multiple of `along.whole`.
    """
    found: list[Span] = []
    previous = False
    for start in range(0, along.out, tile):
        places = range(start, min(start + tile, along.out))
        taps = tuple(along.bounded(out) for out in places)
        inner = len(taps) == tile and taps == tuple(along.unbounded(out) for out in places)
        if inner and previous:
            found[-1] = Span(found[-1].start, found[-1].count + 1, found[-1].taps)
        else:
            found.append(Span(start, 1, taps))
        previous = inner
    return tuple(found)


@functools.lru_cache(1024)
def interior(along: Axis, tile: int) -> Span | None:
    """The longest run of tiles without a border, or None."""
    inner = [
        one
        for one in spans(along, tile)
        if one.width == tile and all(taps == along.unbounded(one.start + index) for index, taps in enumerate(one.taps))
    ]
    return max(inner, key=lambda one: one.count, default=None)


@functools.lru_cache(4096)
def by_input(taps: tuple[Taps, ...]) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """Input elements in order, each with the (output element, tap) that it is used for."""
    uses: dict[int, list[tuple[int, int]]] = {}
    for out, own in enumerate(taps):
        for tap, place in own:
            uses.setdefault(place, []).append((out, tap))
    return tuple((place, tuple(own)) for place, own in sorted(uses.items()))


def functions_of(w: Writer, bodies: dict[str, Callable[..., None]]) -> dict[str, Any]:
    """What `define` returns for a CPU: functions of `ARGUMENTS` by name."""
    return {name: w.function(name, ARGUMENTS, (), body, helpers=False) for name, body in bodies.items()}


def share(w: Writer, number: Any, total: Any, parts: int) -> tuple[Any, Any]:
    """One of so many shares of a range that starts at 0, as equal as can be: from, to."""
    low, high = (w.keep(w.t.floordiv((number + one) * total, w.t.int64(parts))) for one in (0, 1))
    return low, high
