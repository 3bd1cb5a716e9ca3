"""What kernels compute: shapes of depthwise convolutions and of norms, and the keys by which records are found."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hybridpar.errors import UsageError, shortened

_TEXT = re.compile("{n}x{n}x{n}x{n} k{n}x{n} s{n}x{n} p{n}x{n} d{n}x{n}".replace("{n}", r"(\d{1,6})"))
#: Bytes of one element.
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Parameters of a schedule, by name.
Parameters = Mapping[str, int]


class ShapeError(UsageError):
    """A text that names no shape, or a shape that cannot be."""


class Direction(StrEnum):
    """What is computed."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"


class Layout(StrEnum):
    """How the activations lie in memory."""

    CHANNELS_LAST = "channels_last"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True, order=True)
class ConvShape:
    """A depthwise convolution with channel multiplier 1, as torch numbers it; pairs are (vertical, horizontal).

    Attributes:
        batch: Images.
        channels: Of the input, and as many of the output.
        height: Rows of the input.
        width: Columns of the input.
        kernel: Taps.
        stride: Input elements from one output element to the next.
        padding: Zeros on either side of the input.
        dilation: Input elements from one tap to the next.
    """

    batch: int
    channels: int
    height: int
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def __post_init__(self) -> None:
        sizes = (self.batch, self.channels, self.height, self.width, *self.kernel, *self.stride, *self.dilation)
        if min(sizes) < 1 or min(self.padding) < 0:
            raise ShapeError(f"a size of {self.text} is too small", "all are at least 1, padding at least 0", "mend it")
        if self.out_height < 1 or self.out_width < 1:
            raise ShapeError(
                f"{self.text} has no output",
                "the kernel does not fit into the padded image",
                "enlarge image or padding",
            )

    @property
    def out_height(self) -> int:
        """Rows of the output."""
        return self._out(0, self.height)

    @property
    def out_width(self) -> int:
        """Columns of the output."""
        return self._out(1, self.width)

    @property
    def least_bytes(self) -> int:
        """Bytes of both images and the weights in float32: a direction reads two of the three and writes the third."""
        pixels = self.height * self.width + self.out_height * self.out_width
        return ITEM["float32"] * self.channels * (self.batch * pixels + self.kernel[0] * self.kernel[1])

    @property
    def text(self) -> str:
        """As `parse` reads it: "8x96x56x56 k3x3 s1x1 p1x1 d1x1"."""
        image = f"{self.batch}x{self.channels}x{self.height}x{self.width}"
        pairs = {"k": self.kernel, "s": self.stride, "p": self.padding, "d": self.dilation}
        return " ".join([image, *(f"{letter}{rows}x{columns}" for letter, (rows, columns) in pairs.items())])

    @classmethod
    def parse(cls, text: str) -> ConvShape:
        """Read a shape from the text that `text` writes.

        Args:
            text: What to read.

        Returns:
            The shape.

        Raises:
            ShapeError: It is written otherwise, or cannot be.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ShapeError(
                f"'{shortened(text)}' is not a shape",
                "one looks like 8x96x56x56 k3x3 s1x1 p1x1 d1x1",
                "write it like that",
            )
        batch, channels, height, width, *pairs = map(int, match.groups())
        kernel, stride, padding, dilation = zip(pairs[::2], pairs[1::2], strict=True)
        return cls(batch, channels, height, width, kernel, stride, padding, dilation)

    def distance(self, other: ConvShape) -> float:
        """How far this is from another convolution, for kernels; those of other batches do as well.

        Args:
            other: A shape of the same class.

        Returns:
            0 for the same one but for the batch, else in doublings; those of taps, strides and dilations count more.
        """

        def sizes(shape: ConvShape) -> list[tuple[int, float]]:
            taps = [(size, 4.0) for size in (*shape.kernel, *shape.stride, *shape.dilation)]
            return [*taps, (shape.out_height, 1.0), (shape.out_width, 1.0), (shape.channels, 0.5)]

        pairs = zip(sizes(self), sizes(other), strict=True)
        return sum(weight * abs(math.log2(size / its)) for (size, weight), (its, _) in pairs)

    def _out(self, axis: int, size: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (size + 2 * self.padding[axis] - reach) // self.stride[axis] + 1


@dataclass(frozen=True, order=True)
class KernelKey:
    """What a kernel computes, and where: what a record must agree in to be of use.

    Attributes:
        direction: What is computed.
        shape: Of the operands.
        layout: Of activations.
        threads: Threads that compute it.
        device: Fingerprint of the device.
        dtype: Of all tensors.
    """

    direction: Direction
    shape: ConvShape
    layout: Layout
    threads: int
    device: str
    dtype: str = "float32"

    @property
    def least_bytes(self) -> int:
        """Bytes that have to be read and written."""
        return self.shape.least_bytes * ITEM[self.dtype] // ITEM["float32"]

    @property
    def text(self) -> str:
        """In words, for messages."""
        return f"{self.direction} {self.shape.text} {self.layout}, {self.threads} thread(s)"


@dataclass(frozen=True, order=True)
class NormShape:
    """A BatchNorm and the activation behind it.

    Attributes:
        rows: Pixels of all images, N * H * W.
        channels: C.
        act: The activation.
    """

    rows: int
    channels: int
    act: str
