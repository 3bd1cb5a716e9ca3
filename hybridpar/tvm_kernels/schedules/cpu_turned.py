"""All directions for contiguous images whose channels are transposed first, with SIMD over channels.

So some channels of a strip are turned in the scratch, until their pixels lie as in channels_last, and computed by the
tiles of `cpu_gather` and `cpu_weight`: SIMD over channels, with just the taps that meet the image. Results are turned
back. Both ways it is square blocks of vectors in registers.

Work is cut into parts (of images and blocks of channels), each with padded tiles of its own in the scratch, which
threads share out; for the weight gradient parts and groups are those of `cpu_weight`. Arguments of all functions:
addresses (first, second, third, out, scratch), then the range (begin, end), as the schedules for channels_last have
them.
"""

from __future__ import annotations

from typing import Any

from hybridpar.codegen.tir_writer import Writer
from hybridpar.tvm_kernels.schedules.cpu_gather import Gather
from hybridpar.tvm_kernels.schedules.cpu_weight import Weight
from hybridpar.tvm_kernels.schedules.geometry import Axis, functions_of, share
from hybridpar.tvm_kernels.schedules.planes import reach, turned_tile, whole_lines
from hybridpar.tvm_kernels.schedules.turning import turn_in, turn_out, turns
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: No pass that turns schedules into loops is needed.
WRITTEN_OUT = True


def define(w: Writer, shape: str, direction: str, parameters: dict[str, int]) -> dict[str, Any]:
    """The functions of one kernel: `prepare` and `blocks`, or `blocks` and `merge` of the weight gradient.

    Args:
        w: Writes them.
        shape: As `ConvShape.text`.
        direction: Which of the three.
        parameters: lanes, tile_rows, tile_columns, strip, unroll and parts; of the weight gradient those of
            `cpu_weight`.
    """
    if Direction(direction) is Direction.WEIGHT_GRADIENT:
        summed = _TurnedWeight(w, ConvShape.parse(shape), **parameters)
        return functions_of(w, {"blocks": summed.blocks_of_parts, "merge": summed.merge})
    gathered = _TurnedGather(w, ConvShape.parse(shape), Direction(direction), **parameters)
    return functions_of(w, {"prepare": gathered.prepare, "blocks": gathered.blocks})


class _Strips:
    """Which rows strips of an axis gather from.

    Args:
        along: The axis.
        strip: Output rows of a strip.
    """

    def __init__(self, along: Axis, strip: int) -> None:
        self.along, self.reach = along, reach(along, min(strip, along.out))

    def rows(self, w: Writer, top: Any) -> tuple[Any, Any]:
        """Image rows for the strip whose first output row is `top`: from, to."""
        t, along = w.t, self.along
        moved = t.floordiv(top, t.int64(along.stride)) if along.transposed else top * along.stride
        low = w.keep(t.min(t.max(moved + self.reach.start, t.int64(0)), t.int64(along.size)))
        return low, w.keep(t.max(low, t.min(moved + self.reach.stop, t.int64(along.size))))


class _TurnedGather(Gather):
    """Writes forward or input gradient."""

    def __init__(
        self,
        w: Writer,
        shape: ConvShape,
        direction: Direction,
        lanes: int,
        tile_rows: int,
        tile_columns: int,
        strip: int,
        unroll: int,
        parts: int,
    ) -> None:
        super().__init__(w, shape, direction, lanes, tile_rows, tile_columns, strip, 0, unroll)
        self.pixel, self.parts = lanes, parts
        self.strips = _Strips(self.vertical, strip)
        #: Floats of one padded tile for input and one for output; padded tiles lie behind the weights.
        self.inside, self.padded = turned_tile(self.vertical, self.horizontal, strip, lanes)
        self.first_padded = whole_lines((self.taps + 1) * shape.channels)

    def blocks(self, first: Any, out: Any, scratch: Any, begin: Any, end: Any, **_: Any) -> None:
        """Compute parts of all images and blocks of channels."""
        w, t, shape = self.w, self.t, self.shape
        planes, results, self.weights = (w.view(one, "float32") for one in (first, out, scratch))
        self.input = self.output = self.weights
        count = -(-shape.channels // self.lanes)
        total = shape.batch * count
        strips = -(-self.vertical.out // self.strip)
        sizes = (self.vertical.size * self.horizontal.size, self.vertical.out * self.horizontal.out)
        with t.attr(0, "pragma_import_llvm", w.tvm.ir.StringImm(turns(self.lanes))):
            with t.serial(begin, end) as part:
                self.own = w.keep(self.first_padded + part * self.padded)
                low, high = share(w, part, total, self.parts)
                with t.serial(low, high) as item:
                    image = w.keep(t.floordiv(item, t.int64(count)))
                    start = (item - image * count) * self.lanes
                    channel = w.keep(t.min(start, t.int64(shape.channels - self.lanes)))
                    plane = w.keep(image * shape.channels + channel)
                    with t.serial(t.int64(0), t.int64(strips)) as index:
                        self.top = w.keep(index * self.strip)
                        bottom = w.keep(t.min(self.top + self.strip, t.int64(self.vertical.out)))
                        self.first, last = self.strips.rows(w, self.top)
                        pixels = (w.keep(row * self.horizontal.size) for row in (self.first, last))
                        turn_in(w, planes, plane, sizes[0], pixels, self.input, self.own, self.lanes)
                        for row in self._tile_rows(self.top, bottom):
                            for span, moved in self._tile_columns():
                                self._tile(image, row, bottom, span, moved, channel)
                        pixels = (w.keep(row * self.horizontal.out) for row in (self.top, bottom))
                        turn_out(w, self.output, self.own + self.inside, self.lanes, results, plane, sizes[1], pixels)

    def _input_at(self, image: Any, row: Any, column: Any, channel: Any) -> Any:
        return self.own + ((row - self.first) * self.horizontal.size + column) * self.pixel

    def _output_at(self, image: Any, row: Any, column: Any, channel: Any) -> Any:
        return self.own + self.inside + ((row - self.top) * self.horizontal.out + column) * self.pixel


class _TurnedWeight(Weight):
    """Writes the weight gradient."""

    def __init__(self, w: Writer, shape: ConvShape, **parameters: int) -> None:
        super().__init__(w, shape, **parameters)
        self.pixel = self.lanes
        self.strips = _Strips(self.rows_axis, self.strip)
        self.inside, self.padded = turned_tile(self.rows_axis, self.columns_axis, self.strip, self.lanes)
        self.first_padded = whole_lines(self.parts * self.taps * self.pitch)

    def blocks_of_parts(self, first: Any, second: Any, scratch: Any, begin: Any, end: Any, **others: Any) -> None:
        """Make the sums of parts; the range counts groups of channels within parts."""
        w = self.w
        self.planes, self.gradients = w.view(first, "float32"), w.view(second, "float32")
        with w.t.attr(0, "pragma_import_llvm", w.tvm.ir.StringImm(turns(self.lanes))):
            self.rows(scratch, scratch, scratch, begin, end)

    def _strip(self, image: Any, top: Any, bottom: Any, block: Any, own: Any, item: Any) -> None:
        w, shape = self.w, self.shape
        self.own = w.keep(self.first_padded + item * self.padded)
        self.top = top
        self.first, last = self.strips.rows(w, top)
        plane = w.keep(image * shape.channels + self._channel(block))
        pixels = (w.keep(row * shape.width) for row in (self.first, last))
        turn_in(w, self.planes, plane, shape.height * shape.width, pixels, self.sums, self.own, self.lanes)
        pixels = (w.keep(row * shape.out_width) for row in (top, bottom))
        size = shape.out_height * shape.out_width
        turn_in(w, self.gradients, plane, size, pixels, self.sums, self.own + self.inside, self.lanes)
        super()._strip(image, top, bottom, block, own, item)

    def _input_at(self, image: Any, row: Any, channel: Any) -> Any:
        return self.own + (row - self.first) * (self.shape.width * self.pixel)

    def _gradient_at(self, image: Any, row: Any, channel: Any) -> Any:
        return self.own + self.inside + (row - self.top) * (self.shape.out_width * self.pixel)
