"""The schedules for the CPU: parameters, phases and scratch memory of each.

Which schedule a candidate belongs to follows from direction, layout and the names of its parameters, so records need
not name one. Parameters of all of them:
    lanes: values that are computed side by side; strip: output rows that are done before the next ones.
Forward and input gradient:
    tile_rows, tile_columns or tile_vectors: outputs held in registers; unroll: 1 if rows of taps are written out where
    none meets a border; columns_outer: 1 if all channels of a tile come before the next tile; stream: 1 if results are
    written past the caches; parts: units of work.
Weight gradient:
    tap_rows, tap_columns: taps whose sums are held in registers; tile_columns, tile_rows: columns or rows of the
    gradient that pass by at a time; parts, groups: units of work, by images (and strips) and by channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridpar.tvm_kernels.schedules.cpu_gather_moments import scratch_floats
from hybridpar.tvm_kernels.schedules.geometry import PREPARED, axis
from hybridpar.tvm_kernels.schedules.planes import padded_tile, turned_tile, whole_lines
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

_HERE = Path(__file__).parent
_FLOAT = 4

Parameters = Mapping[str, int]
Phases = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Family:
    """A schedule.

    Attributes:
        source: Its file, without folder and ending.
        names: Its parameters.
        imports: Schedules that it is made of besides.
        phases: Functions in the order in which they run, and how far each counts.
        scratch: Floats that all threads together need.
    """

    source: str
    names: tuple[str, ...]
    imports: tuple[str, ...]
    phases: Callable[[ConvShape, Direction, Parameters], Phases]
    scratch: Callable[[ConvShape, Direction, Parameters], int]

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything that its code is made from, its own file first."""
        folder = _HERE / "schedules"
        own = [folder / f"{name}.py" for name in (self.source, *self.imports, "geometry")]
        return (*own, _HERE / "shapes.py")


def family_of(direction: Direction, layout: Layout, names: Iterable[str]) -> Family | None:
    """The schedule that has these parameters, or None."""
    given = set(names)
    return next((one for one in FAMILIES[layout, _is_sum(direction)] if set(one.names) == given), None)


def families(direction: Direction, layout: Layout) -> tuple[Family, ...]:
    """The schedules for a direction and layout."""
    return FAMILIES[layout, _is_sum(direction)]


def _is_sum(direction: Direction) -> bool:
    return direction is Direction.WEIGHT_GRADIENT


def _blocks(shape: ConvShape, own: Parameters) -> int:
    return -(-shape.channels // own["lanes"])


def _gather_phases(shape: ConvShape, direction: Direction, own: Parameters) -> Phases:
    units = shape.batch * -(-axis(shape, direction, 0).out // own["strip"])
    return ("prepare", -(-shape.channels // PREPARED)), ("rows", units)


def _gather_scratch(shape: ConvShape, direction: Direction, own: Parameters) -> int:
    return (shape.kernel[0] * shape.kernel[1] + 1) * shape.channels


def _moments_phases(shape: ConvShape, direction: Direction, own: Parameters) -> Phases:
    return (*_gather_phases(shape, direction, own), ("merge", _blocks(shape, own)))


def _moments_scratch(shape: ConvShape, direction: Direction, own: Parameters) -> int:
    return scratch_floats(shape, own["lanes"], own["strip"], own["tile_rows"])


def _weight_phases(shape: ConvShape, direction: Direction, own: Parameters) -> Phases:
    return ("rows", own["parts"] * own["groups"]), ("merge", _blocks(shape, own))


def _weight_scratch(shape: ConvShape, direction: Direction, own: Parameters) -> int:
    return own["parts"] * shape.kernel[0] * shape.kernel[1] * _blocks(shape, own) * own["lanes"]


def _rows_phases(shape: ConvShape, direction: Direction, own: Parameters) -> Phases:
    return (("planes", own["parts"]),)


def _rows_scratch(shape: ConvShape, direction: Direction, own: Parameters) -> int:
    padded = padded_tile(axis(shape, direction, 0), axis(shape, direction, 1), own["strip"])
    return own["parts"] * padded.places


def _rows_weight_phases(shape: ConvShape, direction: Direction, own: Parameters) -> Phases:
    return ("planes", own["parts"] * own["groups"]), ("merge", shape.channels)


def _rows_weight_scratch(shape: ConvShape, direction: Direction, own: Parameters) -> int:
    sums = own["parts"] * shape.channels * shape.kernel[0] * shape.kernel[1] * own["lanes"]
    return whole_lines(sums) + own["groups"] * _rows_scratch(shape, direction, own)


def _turned_phases(shape: ConvShape, direction: Direction, own: Parameters) -> Phases:
    return ("prepare", -(-shape.channels // PREPARED)), ("blocks", own["parts"])


def _turned_scratch(shape: ConvShape, direction: Direction, own: Parameters) -> int:
    _, padded = turned_tile(axis(shape, direction, 0), axis(shape, direction, 1), own["strip"], own["lanes"])
    return whole_lines(_gather_scratch(shape, direction, own)) + own["parts"] * padded


def _turned_weight_phases(shape: ConvShape, direction: Direction, own: Parameters) -> Phases:
    return ("blocks", own["parts"] * own["groups"]), ("merge", _blocks(shape, own))


def _turned_weight_scratch(shape: ConvShape, direction: Direction, own: Parameters) -> int:
    _, padded = turned_tile(axis(shape, direction, 0), axis(shape, direction, 1), own["strip"], own["lanes"])
    return whole_lines(_weight_scratch(shape, direction, own)) + own["parts"] * own["groups"] * padded


GATHER = Family(
    "cpu_gather",
    ("lanes", "tile_rows", "tile_columns", "strip", "columns_outer", "unroll", "stream"),
    (),
    _gather_phases,
    _gather_scratch,
)
#: The forward of `GATHER` that also leaves the moments of its result, for a norm; no search comes to it by itself.
GATHER_MOMENTS = Family("cpu_gather_moments", GATHER.names, ("cpu_gather", "planes"), _moments_phases, _moments_scratch)
WEIGHT = Family(
    "cpu_weight",
    ("lanes", "tap_rows", "tap_columns", "tile_columns", "strip", "parts", "groups"),
    (),
    _weight_phases,
    _weight_scratch,
)
ROWS = Family(
    "cpu_rows", ("lanes", "tile_rows", "tile_vectors", "strip", "parts"), ("planes",), _rows_phases, _rows_scratch
)
ROWS_WEIGHT = Family(
    "cpu_rows_weight",
    ("lanes", "tap_rows", "tap_columns", "tile_rows", "strip", "parts", "groups"),
    ("planes",),
    _rows_weight_phases,
    _rows_weight_scratch,
)
TURNED = Family(
    "cpu_turned",
    ("lanes", "tile_rows", "tile_columns", "strip", "unroll", "parts"),
    ("turning", "planes", "cpu_gather", "cpu_weight"),
    _turned_phases,
    _turned_scratch,
)
TURNED_WEIGHT = Family("cpu_turned", WEIGHT.names, TURNED.imports, _turned_weight_phases, _turned_weight_scratch)

#: Schedules by layout, and whether it is the weight gradient that they compute.
FAMILIES: dict[tuple[Layout, bool], tuple[Family, ...]] = {
    (Layout.CHANNELS_LAST, False): (GATHER,),
    (Layout.CHANNELS_LAST, True): (WEIGHT,),
    (Layout.CONTIGUOUS, False): (ROWS, TURNED),
    (Layout.CONTIGUOUS, True): (ROWS_WEIGHT, TURNED_WEIGHT),
}
