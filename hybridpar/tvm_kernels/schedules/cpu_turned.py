"""All directions for contiguous images, with SIMD over channels that are transposed first.

Some channels of a strip are transposed into scratch memory, where they lie as in channels_last, and computed by the
tiles of `cpu_gather` and `cpu_weight`, with just the taps that meet the image. Results are transposed back. Both is
done in registers, in square blocks of channels and pixels.

Work is cut into parts (of images and blocks of channels), each with padded tiles of its own in the scratch, which
threads share out; for the weight gradient parts and groups are those of `cpu_weight`. Arguments of all functions:
addresses (first, second, third, out, scratch), then the range (begin, end), as the schedules for channels_last have
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from hybridpar.codegen.tir_writer import Writer
from hybridpar.tvm_kernels.schedules.cpu_gather import Gather
from hybridpar.tvm_kernels.schedules.cpu_weight import Weight
from hybridpar.tvm_kernels.schedules.geometry import Axis, functions_of, share
from hybridpar.tvm_kernels.schedules.planes import mask_text, reach, turned_tile, whole_lines
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: No pass that turns schedules into loops is needed.
WRITTEN_OUT = True

#: Most channels, and pixels, of a block that is transposed in registers.
_MOST = 8


def define(w: Writer, shape: str, direction: str, parameters: dict[str, int]) -> dict[str, Any]:
    """The functions of one kernel: `prepare` and `blocks`, or `blocks` and `merge` of the weight gradient.

    Args:
        w: Writes them.
        shape: As `ConvShape.text`.
        direction: Which of the three.
        parameters: lanes, tile_rows, tile_columns, strip, unroll and parts; of the weight gradient those of
            `cpu_weight`.

    Returns:
        Functions of TIR by name.
    """
    if Direction(direction) is Direction.WEIGHT_GRADIENT:
        summed = _TurnedWeight(w, ConvShape.parse(shape), parameters)
        return functions_of(w, {"blocks": summed.blocks_of_parts, "merge": summed.merge})
    gathered = _TurnedGather(w, ConvShape.parse(shape), Direction(direction), parameters)
    return functions_of(w, {"prepare": gathered.prepare, "blocks": gathered.blocks})


class _Strips:
    """Which image rows strips of an axis use.

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

    def __init__(self, w: Writer, shape: ConvShape, direction: Direction, parameters: Mapping[str, int]) -> None:
        super().__init__(w, shape, direction, parameters)
        self.pixel, self.parts = self.lanes, parameters["parts"]
        self.strips = _Strips(self.vertical, self.strip)
        #: Floats of a tile for the input, and of one for input and output; tiles lie behind the weights.
        self.inside, self.padded = turned_tile(self.vertical, self.horizontal, self.strip, self.lanes)
        self.first_padded = whole_lines((self.taps + 1) * shape.channels)

    def blocks(self, first: Any, out: Any, scratch: Any, begin: Any, end: Any, **_: Any) -> None:
        """Compute parts of all images and blocks of channels."""
        w, t, shape = self.w, self.t, self.shape
        planes, results, self.weights = self._views(first, out, scratch)
        self.input = self.output = self.weights
        count = -(-shape.channels // self.lanes)
        total = shape.batch * count
        strips = -(-self.vertical.out // self.strip)
        sizes = (self.vertical.size * self.horizontal.size, self.vertical.out * self.horizontal.out)
        with t.attr(0, "pragma_import_llvm", w.tvm.ir.StringImm(_turns(self.lanes))):
            with t.serial(begin, end) as part:
                self.own = w.keep(self.first_padded + part * self.padded)
                low, high = share(w, part, total, self.parts)
                with t.serial(low, high) as item:
                    image = w.keep(t.floordiv(item, t.int64(count)))
                    channel = self._channel(item - image * count)
                    plane = w.keep(image * shape.channels + channel)
                    with t.serial(t.int64(0), t.int64(strips)) as index:
                        self.top = w.keep(index * self.strip)
                        bottom = w.keep(t.min(self.top + self.strip, t.int64(self.vertical.out)))
                        self.first, last = self.strips.rows(w, self.top)
                        pixels = (w.keep(row * self.horizontal.size) for row in (self.first, last))
                        _turn(w, planes, plane, sizes[0], self.input, self.own, pixels, self.lanes, back=False)
                        for row in self._tile_rows(self.top, bottom):
                            for span, moved in self._tile_columns():
                                self._tile(image, row, bottom, span, moved, channel)
                        pixels = (w.keep(row * self.horizontal.out) for row in (self.top, bottom))
                        to = self.own + self.inside
                        _turn(w, results, plane, sizes[1], self.output, to, pixels, self.lanes, back=True)

    def _input_at(self, image: Any, row: Any, column: Any, channel: Any) -> Any:
        return self.own + ((row - self.first) * self.horizontal.size + column) * self.pixel

    def _output_at(self, image: Any, row: Any, column: Any, channel: Any) -> Any:
        return self.own + self.inside + ((row - self.top) * self.horizontal.out + column) * self.pixel


class _TurnedWeight(Weight):
    """Writes the weight gradient."""

    def __init__(self, w: Writer, shape: ConvShape, parameters: Mapping[str, int]) -> None:
        super().__init__(w, shape, parameters)
        self.pixel = self.lanes
        self.strips = _Strips(self.vertical, self.strip)
        self.inside, self.padded = turned_tile(self.vertical, self.horizontal, self.strip, self.lanes)
        self.first_padded = whole_lines(self.parts * self.taps * self.pitch)

    def blocks_of_parts(self, first: Any, second: Any, scratch: Any, begin: Any, end: Any, **others: Any) -> None:
        """Make the sums of parts; the range counts groups of channels within parts."""
        w = self.w
        self.planes, self.gradients = self._views(first, second)
        with w.t.attr(0, "pragma_import_llvm", w.tvm.ir.StringImm(_turns(self.lanes))):
            self.rows(scratch, scratch, scratch, begin, end)

    def _strip(self, image: Any, top: Any, bottom: Any, block: Any, own: Any, item: Any) -> None:
        w, shape = self.w, self.shape
        self.own = w.keep(self.first_padded + item * self.padded)
        self.top = top
        self.first, last = self.strips.rows(w, top)
        plane = w.keep(image * shape.channels + self._channel(block))
        pixels = (w.keep(row * shape.width) for row in (self.first, last))
        size = shape.height * shape.width
        _turn(w, self.planes, plane, size, self.sums, self.own, pixels, self.lanes, back=False)
        pixels = (w.keep(row * shape.out_width) for row in (top, bottom))
        size = shape.out_height * shape.out_width
        _turn(w, self.gradients, plane, size, self.sums, self.own + self.inside, pixels, self.lanes, back=False)
        super()._strip(image, top, bottom, block, own, item)

    def _input_at(self, image: Any, row: Any, channel: Any) -> Any:
        return self.own + (row - self.first) * (self.shape.width * self.pixel)

    def _gradient_at(self, image: Any, row: Any, channel: Any) -> Any:
        return self.own + self.inside + (row - self.top) * (self.shape.out_width * self.pixel)


def _turn(
    w: Writer, planes: Any, plane: Any, size: int, tile: Any, start: Any, pixels: Iterable[Any], lanes: int, back: bool
) -> None:
    """Transpose some pixels of `lanes` planes into a tile in which the channels of a pixel lie side by side, or back.

    Square blocks are transposed in registers. The last block overlaps the one before; fewer pixels than a block has are
    copied one by one.

    Args:
        w: Writes it.
        planes: The images.
        plane: Index of the first plane.
        size: Pixels of a plane.
        tile: Memory of the tile.
        start: Index of the tile in it.
        pixels: First pixel, and the one behind the last.
        lanes: Number of planes.
        back: Whether to copy from the tile to the planes.
    """
    t, step = w.t, min(lanes, _MOST)
    first, last = pixels

    def sides(pixel: Any, lane: int) -> list[tuple[Any, Any, int]]:
        """Memory, index and distance of rows, of what is read and of what is written."""
        found = (planes, (plane + lane) * size + pixel, size), (tile, start + (pixel - first) * lanes + lane, lanes)
        return [*reversed(found)] if back else [*found]

    def blocks(pixel: Any) -> None:
        for group in range(0, lanes, step):
            addresses = ((t.address_of(one[at]), t.int64(pitch)) for one, at, pitch in sides(pixel, group))
            t.evaluate(w.call("void", f"hp_turn{step}", *itertools.chain(*addresses)))

    def singly() -> None:
        with t.serial(first, last) as pixel:
            for lane in range(lanes):
                (source, place, _), (to, there, _) = sides(pixel, lane)
                w.store(to, there, source[place])

    def together() -> None:
        with t.serial(t.int64(0), t.floordiv(last - first, t.int64(step))) as index:
            blocks(w.keep(first + index * step))
        rest = t.floormod(last - first, t.int64(step))
        w.when(rest > t.int64(0), lambda: blocks(w.keep(last - step)))

    if step == 1:
        singly()
    else:
        w.either(last - first < t.int64(step), singly, together)


def _turns(lanes: int) -> str:
    """A function in LLVM IR that transposes a block; addresses need no alignment.

    `hp_turn` reads rows that lie one pitch apart and writes their columns another pitch apart. Pairs of rows are
    interleaved, then pairs of pairs, then halves are exchanged: each step has one instruction a vector on x86.
    """
    count = min(lanes, _MOST)
    if count == 1:
        return ""
    kind = f"<{count} x float>"
    lines = []
    for row in range(count):
        lines += [
            f"%from_at{row} = mul i64 %pitch, {row}",
            f"%from{row} = getelementptr float, ptr %from, i64 %from_at{row}",
            f"%a{row} = load {kind}, ptr %from{row}, align 4",
        ]
    rows = [f"%a{row}" for row in range(count)]
    for step, (distance, lows, highs) in enumerate(_STEPS[count]):
        found = list(rows)
        for row in range(count):
            if not row & distance:
                for name, mask, place in (("low", lows, row), ("high", highs, row + distance)):
                    found[place] = f"%{name}{step}_{row}"
                    pair = f"{kind} {rows[row]}, {kind} {rows[row + distance]}"
                    lines.append(f"{found[place]} = shufflevector {pair}, {mask_text(mask)}")
        rows = found
    for place in range(count):
        lines += [
            f"%to_at{place} = mul i64 %to_pitch, {place}",
            f"%to{place} = getelementptr float, ptr %to, i64 %to_at{place}",
            f"store {kind} {rows[_ORDER[count][place]]}, ptr %to{place}, align 4",
        ]
    body = "\n  ".join(lines)
    return f"""
define linkonce_odr void @hp_turn{count}(ptr %from, i64 %pitch, ptr %to, i64 %to_pitch) alwaysinline nounwind {{
  {body}
  ret void
}}
"""


#: By rows of a block: (distance of the rows that are joined, lanes of the first result, lanes of the second), and then
#: in which row each column is found.
_STEPS: dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {
    2: [(1, (0, 2), (1, 3))],
    4: [(1, (0, 4, 1, 5), (2, 6, 3, 7)), (2, (0, 1, 4, 5), (2, 3, 6, 7))],
    8: [
        (1, (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)),
        (2, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
        (4, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
    ],
}
_ORDER = {2: (0, 1), 4: (0, 2, 1, 3), 8: (0, 2, 1, 3, 4, 6, 5, 7)}
