"""Index arithmetic of convolutions, computed before anything is compiled, and the base class of schedules for CPUs.

The forward pass and the input gradient are treated alike: each output element is a sum of some input elements, each
times a tap of the filter. Only their places differ. In the forward pass they are out·stride + tap·dilation − padding,
in the input gradient (out + padding − tap·dilation) / stride where that is a whole number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridpar.codegen.tir_writer import HELPERS, Writer
from hybridpar.tvm_kernels.schedules import FAR, out_of_bounds
from hybridpar.tvm_kernels.shapes import ITEM, ConvShape, Direction, KernelKey

if TYPE_CHECKING:
    from hybridpar.tvm_kernels.machine import Machine

#: Arguments of every function of a kernel for CPUs: addresses of the first and second operand, of the bias (0 for
#: none), of the result and of scratch memory; then the range of units of work that a call computes.
ARGUMENTS = ("first", "second", "third", "out", "scratch", "begin", "end")

#: Channels that are one step of the range of `prepare`.
PREPARED = 16

#: Multiply-adds of vectors that may be written out for a tile; compiling takes about a millisecond for each.
MOST_WRITTEN_OUT = 600

#: Rows or columns of a tile.
MOST_IN_TILE = 64

#: Bytes of a strip that stay in a core's second cache until its tiles are computed.
_NEAR = 512 << 10

#: Bytes of a cache line.
LINE = 64

#: (tap, input element) for each tap that an output element uses.
Taps = tuple[tuple[int, int], ...]


# ----------------------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True, kw_only=True)
class CpuTile:
    """The parameters that schedules for CPUs have in common.

    Attributes:
        lanes: Channels that are computed side by side.
        tile_columns: Columns of a tile.
        strip: Output rows that are done before the next ones.
        sweep: 1 if the rows of a strip are read in order first.
    """

    lanes: int
    tile_columns: int
    strip: int
    sweep: int = 0

    def check(self, key: KernelKey) -> str | None:
        """Why these parameters make no kernel."""
        if self.lanes not in (1, 2, 4, 8, 16, 32, 64) or self.lanes > key.shape.channels:
            return f"lanes={self.lanes} is no power of two, or more than {key.shape.channels}"
        if self.sweep not in (0, 1):
            return "sweep is 0 or 1"
        return out_of_bounds(self, tile_columns=MOST_IN_TILE, strip=1 << 20)


def lanes_to_try(key: KernelKey, machine: Machine) -> list[int]:
    """One vector of the CPU, two, and a cache line; of bfloat16 lines alone where channels are whole ones."""
    channels, line = key.shape.channels, LINE // ITEM[key.dtype]
    wanted = sorted({machine.lanes, 2 * machine.lanes, line})
    if key.dtype == "bfloat16" and channels % line == 0:
        wanted = [line]
    return [lanes for lanes in wanted if lanes <= channels] or [1 << (channels.bit_length() - 1)]


def sweeps_to_try(key: KernelKey, height: int, strip: int) -> list[dict[str, int]]:
    """Reading a strip in order first may be of use where it comes from memory and stays in the second cache."""
    is_swept = key.least_bytes > FAR and key.least_bytes / key.shape.batch / height * strip <= _NEAR
    return [{}, {"sweep": 1}] if is_swept else [{}]


# ------------------------------------------------------------------------------------------------------------- indices


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
        """The taps of an output element, those that meet the padding included."""
        if not self.transposed:
            first = out * self.stride - self.padding
            return tuple((tap, first + tap * self.dilation) for tap in range(self.taps))
        places = ((tap, out + self.padding - tap * self.dilation) for tap in range(self.taps))
        return tuple((tap, place // self.stride) for tap, place in places if place % self.stride == 0)

    def bounded(self, out: int) -> Taps:
        """The taps of an output element that meet the input."""
        return tuple((tap, place) for tap, place in self.unbounded(out) if 0 <= place < self.size)

    def end(self, out: Any, t: Any) -> Any:
        """The input element behind the last one that the output elements before `out` use."""
        if self.transposed:
            last = t.floordiv(out - 1 + self.padding, t.int64(self.stride))
        else:
            last = (out - 1) * self.stride - self.padding + (self.taps - 1) * self.dilation
        return t.max(t.min(last + 1, t.int64(self.size)), t.int64(0))

    def shift(self, tile: int) -> int:
        """Input elements from the start of one tile to the start of the next."""
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
    """The rows or columns of a convolution; those of the weight gradient are those of the forward pass."""
    image = (shape.height, shape.width)[which]
    result = (shape.out_height, shape.out_width)[which]
    transposed = direction is Direction.INPUT_GRADIENT
    out, size = (image, result) if transposed else (result, image)
    own = (shape.kernel[which], shape.stride[which], shape.padding[which], shape.dilation[which])
    return Axis(out, size, *own, transposed)


@functools.lru_cache(1024)
def spans(along: Axis, tile: int) -> tuple[Span, ...]:
    """Divide an axis into tiles, the last one narrower where it must be; whole runs without a border are one span."""
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
    """The longest run of whole tiles that do not touch the padding."""
    inner = [
        one
        for one in spans(along, tile)
        if one.width == tile and all(taps == along.unbounded(one.start + index) for index, taps in enumerate(one.taps))
    ]
    return max(inner, key=lambda one: one.count, default=None)


@functools.lru_cache(4096)
def by_input(taps: tuple[Taps, ...]) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """Groups taps by the input element that they read."""
    uses: dict[int, list[tuple[int, int]]] = {}
    for out, own in enumerate(taps):
        for tap, place in own:
            uses.setdefault(place, []).append((out, tap))
    return tuple((place, tuple(own)) for place, own in sorted(uses.items()))


def _helpers(lanes: int, stored: str, in_halves: bool) -> str:
    """Further functions in LLVM IR: a load that no compiler leaves out; a store past the caches, aligned by its size;
    vectors of bfloat16 to float32 and back, `in_halves` with the even channels before the odd ones while they are
    float32, which takes half as many instructions.
    """
    floats, words, bfloats = (f"<{lanes} x {kind}>" if lanes > 1 else kind for kind in ("float", "i16", "bfloat"))
    pairs, some = f"<{lanes // 2} x i32>", f"<{lanes // 2} x float>"
    widened = f"""
  %narrow = bitcast {words} %words to {bfloats}
  %wide = fpext {bfloats} %narrow to {floats}"""
    as_words, join = f"bitcast {words} %rounded to {words}", ""
    if in_halves:
        halves, in_turn = (
            f"<{lanes} x i32> <{', '.join(f'i32 {index}' for index in order)}>"
            for order in (range(lanes), [index // 2 + index % 2 * (lanes // 2) for index in range(lanes)])
        )
        widened = f"""
  %pairs = bitcast {words} %words to {pairs}
  %low = shl {pairs} %pairs, splat (i32 16)
  %high = and {pairs} %pairs, splat (i32 -65536)
  %even = bitcast {pairs} %low to {some}
  %odd = bitcast {pairs} %high to {some}
  %wide = call {floats} @hp_join({some} %even, {some} %odd)"""
        as_words = f"shufflevector {words} %rounded, {words} poison, {in_turn}"
        join = f"""
define linkonce_odr {floats} @hp_join({some} %first, {some} %second) alwaysinline nounwind {{
  %all = shufflevector {some} %first, {some} %second, {halves}
  ret {floats} %all
}}"""
    values = floats if stored == "float32" else words
    return f"""{HELPERS}{join}
define linkonce_odr i32 @hp_read(ptr %at) alwaysinline nounwind {{
  %value = load volatile i32, ptr %at, align 4
  ret i32 %value
}}
define linkonce_odr void @hp_past(ptr %to, {values} %values) alwaysinline nounwind {{
  store {values} %values, ptr %to, align {min(LINE, lanes * (4 if stored == "float32" else 2))}, !nontemporal !0
  ret void
}}
define linkonce_odr {floats} @hp_widen({words} %words) alwaysinline nounwind {{{widened}
  ret {floats} %wide
}}
define linkonce_odr {words} @hp_narrow({floats} %wide) alwaysinline nounwind {{
  %bfloats = fptrunc {floats} %wide to {bfloats}
  %rounded = bitcast {bfloats} %bfloats to {words}
  %words = {as_words}
  ret {words} %words
}}
"""


def share(w: Writer, number: Any, total: Any, parts: int) -> tuple[Any, Any]:
    """One share of a range that starts at 0 and is divided as evenly as possible."""
    low, high = (w.keep(w.t.floordiv((number + one) * total, w.t.int64(parts))) for one in (0, 1))
    return low, high


def pieces(w: Writer, size: int, step: int) -> Iterator[tuple[Any, int]]:
    """Divides a range into pieces: whole ones in a loop around what the caller writes next, then a shorter one."""
    whole, rest = divmod(size, step)
    if whole:
        with w.t.serial(w.t.int64(0), w.t.int64(whole)) as index:
            yield w.keep(index * step), step
    if rest:
        yield w.t.int64(whole * step), rest


class ConvWriter:
    """Base class of the schedules for CPUs: the sizes of a convolution, and vectors of `lanes` float32 values.

    Bfloat16 is made float32 as it is loaded, and rounded to nearest even as it is stored; there AVX512_BF16 makes
    numbers below the least normal one 0. All sums are float32.
    """

    def __init__(self, w: Writer, shape: ConvShape, direction: Direction, tile: CpuTile, dtype: str) -> None:
        self.w, self.t = w, w.t
        #: The type of tensors: bfloat16 is integers until it is computed with.
        self.stored = "float32" if dtype == "float32" else "uint16"
        self.shape, self.lanes, self.strip, self.sweep = shape, tile.lanes, tile.strip, tile.sweep
        #: Whether float32 vectors of bfloat16 tensors have the even channels first.
        self.in_halves = dtype == "bfloat16" and 2 * tile.lanes >= LINE and shape.channels % 2 == 0
        #: Elements from one pixel to the next.
        self.pixel = shape.channels
        self.vertical, self.horizontal = axis(shape, direction, 0), axis(shape, direction, 1)
        self.columns = spans(self.horizontal, tile.tile_columns)
        self.shift = self.horizontal.shift(tile.tile_columns)
        self.taps = shape.kernel[0] * shape.kernel[1]
        self.bias = direction is Direction.FORWARD

    def functions(self, **bodies: Callable[..., None]) -> dict[str, Any]:
        """The functions of a kernel, as `define` of a schedule returns them."""
        helpers = self.w.tvm.ir.StringImm(_helpers(self.lanes, self.stored, self.in_halves))

        def write(body: Callable[..., None], **arguments: Any) -> None:
            with self.t.attr(0, "pragma_import_llvm", helpers):
                body(**arguments)

        return {name: self.w.function(name, ARGUMENTS, partial(write, body)) for name, body in bodies.items()}

    def _at(self, start: Any) -> Any:
        """Indices of a vector that begins at `start`."""
        return start if self.lanes == 1 else self.t.ramp(start, 1, self.lanes)

    def _all(self, value: Any) -> Any:
        """A vector of equal values."""
        return value if self.lanes == 1 else self.t.broadcast(value, self.lanes)

    def _views(self, *addresses: Any) -> list[Any]:
        """The tensors at some addresses."""
        return [self.w.view(address, self.stored) for address in addresses]

    def _load(self, buffer: Any, start: Any) -> Any:
        """A vector of a tensor that begins at `start`, as float32."""
        value = buffer[self._at(start)]
        return value if self.stored == "float32" else self.w.call(self._vector("float32"), "hp_widen", value)

    def _narrow(self, value: Any) -> Any:
        """A vector of float32 as tensors have it."""
        return value if self.stored == "float32" else self.w.call(self._vector("uint16"), "hp_narrow", value)

    def _vector(self, dtype: str) -> str:
        return dtype if self.lanes == 1 else f"{dtype}x{self.lanes}"

    def _channel(self, block: Any) -> Any:
        """First channel of a block of lanes; the last block overlaps the one before where channels do not fill it."""
        start, last = block * self.lanes, self.shape.channels - self.lanes
        return self.w.keep(self.t.min(start, self.t.int64(last)) if self.shape.channels % self.lanes else start)

    def _sweep(self, buffer: Any, begin: Any, end: Any) -> None:
        """Read a value of each cache line in order, so that the CPU fetches ahead what is used in steps afterwards.

        Instructions that prefetch do not start that, loads do.
        """
        w, t = self.w, self.t
        step = LINE // (4 if self.stored == "float32" else 2)
        with t.serial(t.int64(0), t.floordiv(end - begin, t.int64(step))) as line:
            t.evaluate(w.call("int32", "hp_read", t.address_of(buffer[begin + line * step])))
