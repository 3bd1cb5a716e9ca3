"""The schedules for the CPU: parameters, phases, scratch memory, space and cost of each.

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

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hybridpar.tvm_kernels import candidates as candidates_of
from hybridpar.tvm_kernels import space
from hybridpar.tvm_kernels.cost_channels import Cost, gather_cost, weight_cost
from hybridpar.tvm_kernels.cost_planes import rows_cost, rows_weight_cost, turned_cost
from hybridpar.tvm_kernels.machine import Machine
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
        reject: Why parameters make no kernel, or None.
        candidates: Parameters worth a try for some threads of a machine; some may not be allowed.
        cost: Predicts what a candidate costs.
        most_lanes: Values that can lie side by side.
    """

    source: str
    names: tuple[str, ...]
    imports: tuple[str, ...]
    phases: Callable[[ConvShape, Direction, Parameters], Phases]
    scratch: Callable[[ConvShape, Direction, Parameters], int]
    reject: Callable[[ConvShape, Direction, Parameters], str | None]
    candidates: Callable[[ConvShape, Direction, int, Machine], Iterator[dict[str, int]]]
    cost: Callable[[ConvShape, Direction, Parameters, int, Machine], Cost]
    most_lanes: Callable[[ConvShape, Direction], int] = lambda shape, _: shape.channels

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything that its code is made from, its own file first."""
        folder = _HERE / "schedules"
        own = [folder / f"{name}.py" for name in (self.source, *self.imports, "geometry")]
        return (*own, _HERE / "shapes.py")


def family_of(direction: Direction, layout: Layout, names: Iterable[str]) -> Family | None:
    """The schedule that has these parameters, or None.

    Args:
        direction: Which of its three directions.
        layout: Of the images.
        names: Names of parameters.
    """
    given = set(names)
    return next((one for one in FAMILIES[layout, _is_sum(direction)] if set(one.names) == given), None)


def families(direction: Direction, layout: Layout) -> tuple[Family, ...]:
    """The schedules for a direction and layout.

    Args:
        direction: Which of its three directions.
        layout: Of the images.
    """
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


def _alike_in_row(shape: ConvShape, direction: Direction) -> int:
    """Outputs of a row that gather alike."""
    along = axis(shape, direction, 1)
    return along.out // along.whole


GATHER = Family(
    "cpu_gather",
    ("lanes", "tile_rows", "tile_columns", "strip", "columns_outer", "unroll", "stream"),
    (),
    *(_gather_phases, _gather_scratch, space.reject_gather, candidates_of.gather, gather_cost),
)
#: The forward of `GATHER` that also leaves the moments of its result, for a norm; no search comes to it by itself.
GATHER_MOMENTS = replace(
    GATHER,
    source="cpu_gather_moments",
    imports=("cpu_gather", "planes"),
    phases=_moments_phases,
    scratch=_moments_scratch,
)
WEIGHT = Family(
    "cpu_weight",
    ("lanes", "tap_rows", "tap_columns", "tile_columns", "strip", "parts", "groups"),
    (),
    *(_weight_phases, _weight_scratch, space.reject_weight, candidates_of.weight, weight_cost),
)
ROWS = Family(
    "cpu_rows",
    ("lanes", "tile_rows", "tile_vectors", "strip", "parts"),
    ("planes",),
    *(_rows_phases, _rows_scratch, space.reject_rows, candidates_of.rows, rows_cost, _alike_in_row),
)
ROWS_WEIGHT = Family(
    "cpu_rows_weight",
    ("lanes", "tap_rows", "tap_columns", "tile_rows", "strip", "parts", "groups"),
    ("planes",),
    *(_rows_weight_phases, _rows_weight_scratch, space.reject_rows_weight, candidates_of.rows_weight, rows_weight_cost),
    most_lanes=lambda shape, _: shape.out_width,
)
TURNED = Family(
    "cpu_turned",
    ("lanes", "tile_rows", "tile_columns", "strip", "unroll", "parts"),
    ("turning", "planes", "cpu_gather", "cpu_weight"),
    *(_turned_phases, _turned_scratch, space.reject_turned, candidates_of.turned, turned_cost),
)
TURNED_WEIGHT = replace(
    WEIGHT,
    source=TURNED.source,
    imports=TURNED.imports,
    phases=_turned_weight_phases,
    scratch=_turned_weight_scratch,
    cost=turned_cost,
)

#: Schedules by layout, and whether it is the weight gradient that they compute.
FAMILIES: dict[tuple[Layout, bool], tuple[Family, ...]] = {
    (Layout.CHANNELS_LAST, False): (GATHER,),
    (Layout.CHANNELS_LAST, True): (WEIGHT,),
    (Layout.CONTIGUOUS, False): (ROWS, TURNED),
    (Layout.CONTIGUOUS, True): (ROWS_WEIGHT, TURNED_WEIGHT),
}


def reject(shape: ConvShape, direction: Direction, layout: Layout, parameters: Parameters) -> str | None:
    """Why parameters make no kernel, or None; nothing else may be compiled.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        layout: Of the images.
        parameters: By name.
    """
    reason = space.outside(shape, direction)
    if reason is not None:
        return reason
    family = family_of(direction, layout, parameters)
    if family is None or not all(type(value) is int for value in parameters.values()):
        known = " or ".join(", ".join(one.names) for one in families(direction, layout))
        return f"the parameters are {known}, all whole numbers"
    lanes, most = parameters["lanes"], family.most_lanes(shape, direction)
    if lanes not in (1, 2, 4, 8, 16, 32, space.MOST_LANES) or lanes > most:
        return f"lanes={lanes} is no power of two, or more than {most}"
    return family.reject(shape, direction, parameters)


def candidates(
    shape: ConvShape, direction: Direction, layout: Layout, threads: int, machine: Machine
) -> Iterator[dict[str, int]]:
    """Parameters that fit the registers of a machine and give each thread enough to do, of all schedules.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        layout: Of the images.
        threads: That will share the work.
        machine: The CPU.
    """
    if space.outside(shape, direction) is None:
        for family in families(direction, layout):
            for parameters in family.candidates(shape, direction, threads, machine):
                if reject(shape, direction, layout, parameters) is None:
                    yield parameters


def estimate(
    shape: ConvShape,
    direction: Direction,
    parameters: Parameters,
    threads: int,
    machine: Machine,
    layout: Layout = Layout.CHANNELS_LAST,
) -> Cost:
    """What a candidate costs.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: Of the candidate.
        threads: That share the work.
        machine: The CPU.
        layout: Of the images.
    """
    family = family_of(direction, layout, parameters)
    assert family is not None, "only candidates are compared"
    return family.cost(shape, direction, parameters, threads, machine)
