"""Transposes blocks of pixels and channels in registers.

Blocks of as many channels as pixels are turned in registers. The last block of pixels reaches back; where there are
fewer pixels than that they go one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hybridpar.codegen.tir_writer import Writer

_MOST = 8


def side(lanes: int) -> int:
    """Channels, and pixels, of a block."""
    return min(lanes, _MOST)


def turn_in(
    w: Writer, planes: Any, plane: Any, size: int, pixels: Iterable[Any], to: Any, start: Any, lanes: int
) -> None:
    """Put pixels of some planes into a padded tile, where a pixel's channels lie side by side.

    Args:
        w: Writes it.
        planes: The images.
        plane: The first plane.
        size: Pixels of a plane.
        pixels: From which pixel to which.
        to: Memory of the padded tile.
        start: Index of the padded tile in it.
        lanes: Planes.
    """
    first, last = pixels

    def block(pixel: Any, group: int) -> None:
        source = planes[(plane + group) * size + pixel]
        there = to[start + (pixel - first) * lanes + group]
        _turn(w, source, size, there, lanes, lanes)

    def one(pixel: Any, lane: int) -> None:
        w.store(to, start + (pixel - first) * lanes + lane, planes[(plane + lane) * size + pixel])

    _blocks(w, first, last, lanes, block, one)


def turn_out(
    w: Writer, padded: Any, start: Any, lanes: int, planes: Any, plane: Any, size: int, pixels: Iterable[Any]
) -> None:
    """The way back from a padded tile to planes; arguments as `turn_in` has them."""
    first, last = pixels

    def block(pixel: Any, group: int) -> None:
        source = padded[start + (pixel - first) * lanes + group]
        _turn(w, source, lanes, planes[(plane + group) * size + pixel], size, lanes)

    def one(pixel: Any, lane: int) -> None:
        w.store(planes, (plane + lane) * size + pixel, padded[start + (pixel - first) * lanes + lane])

    _blocks(w, first, last, lanes, block, one)


def _turn(w: Writer, source: Any, pitch: int, to: Any, to_pitch: int, lanes: int) -> None:
    t = w.t
    addresses = (t.address_of(source), t.int64(pitch), t.address_of(to), t.int64(to_pitch))
    t.evaluate(w.call("void", f"hp_turn{side(lanes)}", *addresses))


def _blocks(w: Writer, first: Any, last: Any, lanes: int, block: Any, one: Any) -> None:
    """Loops over blocks of pixels from first to before last."""
    t, step = w.t, side(lanes)

    def blocks(pixel: Any) -> None:
        for group in range(0, lanes, step):
            block(pixel, group)

    def singly() -> None:
        with t.serial(first, last) as pixel:
            for lane in range(lanes):
                one(pixel, lane)

    def together() -> None:
        with t.serial(t.int64(0), t.floordiv(last - first, t.int64(step))) as index:
            blocks(w.keep(first + index * step))
        rest = t.floormod(last - first, t.int64(step))
        w.when(rest > t.int64(0), lambda: blocks(w.keep(last - step)))

    if step == 1:
        singly()
    else:
        w.either(last - first < t.int64(step), singly, together)


def turns(lanes: int) -> str:
    """A function in LLVM IR that turns a block for so many lanes; addresses need no alignment.

    `hp_turn` reads rows that lie one pitch apart and writes their columns another pitch apart. Pairs of rows are
    interleaved, then pairs of pairs, then halves are exchanged: each step has one instruction a vector on x86.
    """
    count = side(lanes)
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
                    lines.append(f"{found[place]} = shufflevector {pair}, {_mask(mask)}")
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


def _mask(lanes: tuple[int, ...]) -> str:
    return f"<{len(lanes)} x i32> <{', '.join(f'i32 {lane}' for lane in lanes)}>"


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
