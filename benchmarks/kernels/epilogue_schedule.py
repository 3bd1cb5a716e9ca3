"""Why: a convolution that sums up its own results would save BatchNorm a pass over them; here is one, to be timed.

The forward schedule of channels_last, whose tiles also add what they write, less a shift, and its square to sums of
their strip. `merge` adds the sums of strips in order, in float64.
"""

from __future__ import annotations

from typing import Any

from hybridpar.kernel_writer import Writer
from hybridpar.tvm_kernels.schedules.cpu_gather import Gather
from hybridpar.tvm_kernels.schedules.geometry import functions_of
from hybridpar.tvm_kernels.shapes import ConvShape, Direction

#: No pass that turns schedules into loops is needed.
WRITTEN_OUT = True


def define(w: Writer, shape: str, parameters: dict[str, int]) -> dict[str, Any]:
    """`prepare` and `rows` as those of the plain kernel; `merge` gives 2 x C float64.

    Args:
        w: Writes them.
        shape: As `ConvShape.text`; its channels are a multiple of the lanes.
        parameters: As the plain kernel has them.
    """
    kernel = _Summed(w, ConvShape.parse(shape), Direction.FORWARD, **parameters)
    return functions_of(w, {"prepare": kernel.prepare, "rows": kernel.rows, "merge": kernel.merge})


class _Summed(Gather):
    """Writes one kernel. Behind the weights in scratch lie the shifts of all channels, then 2 x C sums per strip.

    The result's places come in the order in which they are stored: `_channel` is that of the tile at work.
    """

    def __init__(self, w: Writer, shape: ConvShape, direction: Direction, **parameters: int) -> None:
        super().__init__(w, shape, direction, **parameters)
        assert shape.channels % self.lanes == 0
        self.shifts = (self.taps + 1) * shape.channels
        self.sums = self.shifts + shape.channels

    def _strips(self, first: Any, out: Any, scratch: Any, begin: Any, end: Any) -> None:
        w, t, channels = self.w, self.t, self.shape.channels
        memory = w.view(scratch, "float32")
        strips = -(-self.vertical.out // self.strip)
        with t.serial(begin * (2 * channels), end * (2 * channels)) as place:
            w.store(memory, place + self.sums, t.float32(0))
        self._strips_of_image = strips
        super()._strips(first, out, scratch, begin, end)

    def _tile(self, image: Any, row: Any, bottom: Any, span: Any, moved: Any, channel: Any) -> None:
        w, t, channels = self.w, self.t, self.shape.channels
        strip = t.floordiv(row, t.int64(self.strip))
        own = w.keep((image * self._strips_of_image + strip) * (2 * channels) + self.sums + channel)
        self._own, self._shift = own, w.keep(self._load(self.weights, channel + self.shifts))
        super()._tile(image, row, bottom, span, moved, channel)

    def _whole(self, *where: Any) -> None:
        self._values: list[Any] = []
        super()._whole(*where)
        self._add()

    def _row(self, *where: Any) -> None:
        self._values = []
        super()._row(*where)
        self._add()

    def _store(self, start: Any, value: Any) -> None:
        value = self.w.keep(value)
        super()._store(start, value)
        self._values.append(value)

    def _add(self) -> None:
        w, channels = self.w, self.shape.channels
        total, square = (self._load(self.weights, self._own + row * channels) for row in (0, 1))
        for value in self._values:
            off = w.keep(value - self._shift)
            total, square = total + off, square + off * off
        total, square = w.keep(total), w.keep(square)
        w.store(self.weights, self._at(self._own), total)
        w.store(self.weights, self._at(self._own + channels), square)

    def merge(self, out: Any, scratch: Any, begin: Any, end: Any, **_: Any) -> None:
        """Add the sums of strips from begin to before end; `out` is 2 x C float64."""
        w, t, channels, lanes = self.w, self.t, self.shape.channels, self.lanes
        memory, result = w.view(scratch, "float32"), w.view(out, "float64")
        with t.serial(t.int64(0), t.int64(2 * channels // lanes)) as block:
            place = w.keep(block * lanes)
            total, whole = w.local(lanes, "float64"), t.ramp(t.int64(0), 1, lanes)
            w.store(total, whole, t.broadcast(t.float64(0), lanes))
            with t.serial(begin, end) as strip:
                more = memory[t.ramp(place + self.sums + strip * (2 * channels), 1, lanes)]
                w.store(total, whole, total[whole] + t.cast(more, f"float64x{lanes}"))
            w.store(result, t.ramp(place, 1, lanes), total[whole])
