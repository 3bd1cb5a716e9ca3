"""The schedules for the CPU: parameters, phases, scratch memory, space and cost of each.

Which schedule a candidate belongs to follows from direction, layout and the names of its parameters, so records need
not name one. Parameters of all of them:
    lanes: values that are computed side by side; strip: output rows that are done before the next ones.
Forward and input gradient:
    tile_rows, tile_columns or tile_vectors: outputs held in registers; unroll: 1 if rows of taps are written out where
    none crosses a border; columns_outer: 1 if all channels of a tile come before the next tile; stream: 1 if results
    are written past the caches; parts: units of work.
In channels_last, only where it is 1:
    sweep: the rows of a strip are read in order first.
Weight gradient:
    tap_rows, tap_columns: taps whose sums are held in registers; tile_columns, tile_rows: columns or rows of the
    gradient that pass by at a time; parts, groups: units of work, by images (and strips) and by channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hybridpar.tvm_kernels import space
from hybridpar.tvm_kernels.cost import Cost, gather_cost, rows_cost, rows_weight_cost, turned_cost, weight_cost
from hybridpar.tvm_kernels.machine import Machine
from hybridpar.tvm_kernels.schedules.cpu_gather_moments import scratch_floats
from hybridpar.tvm_kernels.schedules.geometry import PREPARED, axis
from hybridpar.tvm_kernels.schedules.planes import padded_tile, turned_tile, whole_lines
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

_HERE = Path(__file__).parent
_FLOAT = 4

Parameters = Mapping[str, int]
Phases = tuple[tuple[str, int], ...]
Work = tuple[Phases, int]


@dataclass(frozen=True)
class Family:
    """A schedule for the CPU, and how its candidates are listed, checked and compared.

    Attributes:
        source: Its file, without folder and ending.
        names: Its parameters.
        optional: Those that are 0 where they are not named.
        imports: Schedules that it is made of besides.
        work: Functions in the order in which they run, each with the end of its range; and the floats of scratch
            memory that all threads together need.
        reject: Why parameters make no kernel, or None.
        candidates: Parameters worth a try for some threads of a machine; some may not be allowed.
        cost: Predicts what a candidate costs.
        most_lanes: Values that can lie side by side.
    """

    source: str
    names: tuple[str, ...]
    imports: tuple[str, ...]
    work: Callable[[ConvShape, Direction, Parameters], Work]
    reject: Callable[[ConvShape, Direction, Parameters], str | None]
    candidates: Callable[[ConvShape, Direction, int, Machine], Iterator[dict[str, int]]]
    cost: Callable[[ConvShape, Direction, Parameters, int, Machine], Cost]
    most_lanes: Callable[[ConvShape, Direction], int] = lambda shape, _: shape.channels
    optional: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything that its code is made from, its own file first."""
        folder = _HERE / "schedules"
        own = [folder / f"{name}.py" for name in (self.source, *self.imports, "geometry")]
        return (*own, _HERE / "shapes.py")


def family_of(direction: Direction, layout: Layout, names: Iterable[str]) -> Family | None:
    """The schedule that has some parameters.

    Args:
        direction: Which of its three directions.
        layout: Of the images.
        names: Names of parameters.

    Returns:
        The schedule; None where there is none.
    """
    given = set(names)
    found = FAMILIES[layout, _is_sum(direction)]
    return next((one for one in found if set(one.names) == given - set(one.optional)), None)


def families(direction: Direction, layout: Layout) -> tuple[Family, ...]:
    """The schedules for a direction and layout.

    Args:
        direction: Which of its three directions.
        layout: Of the images.

    Returns:
        Schedules, in the order in which they are tried.
    """
    return FAMILIES[layout, _is_sum(direction)]


def _is_sum(direction: Direction) -> bool:
    return direction is Direction.WEIGHT_GRADIENT


def _blocks(shape: ConvShape, own: Parameters) -> int:
    return -(-shape.channels // own["lanes"])


def _gather_work(shape: ConvShape, direction: Direction, own: Parameters) -> Work:
    units = shape.batch * -(-axis(shape, direction, 0).out // own["strip"])
    phases = ("prepare", -(-shape.channels // PREPARED)), ("rows", units)
    return phases, (shape.kernel[0] * shape.kernel[1] + 1) * shape.channels


def _moments_work(shape: ConvShape, direction: Direction, own: Parameters) -> Work:
    phases, _ = _gather_work(shape, direction, own)
    return (*phases, ("merge", _blocks(shape, own))), scratch_floats(
        shape, own["lanes"], own["strip"], own["tile_rows"]
    )


def _weight_work(shape: ConvShape, direction: Direction, own: Parameters) -> Work:
    floats = own["parts"] * shape.kernel[0] * shape.kernel[1] * _blocks(shape, own) * own["lanes"]
    return (("rows", own["parts"] * own["groups"]), ("merge", _blocks(shape, own))), floats


def _rows_work(shape: ConvShape, direction: Direction, own: Parameters) -> Work:
    padded = padded_tile(axis(shape, direction, 0), axis(shape, direction, 1), own["strip"])
    return (("planes", own["parts"]),), own["parts"] * padded.places


def _rows_weight_work(shape: ConvShape, direction: Direction, own: Parameters) -> Work:
    sums = own["parts"] * shape.channels * shape.kernel[0] * shape.kernel[1] * own["lanes"]
    floats = whole_lines(sums) + own["groups"] * _rows_work(shape, direction, own)[1]
    return (("planes", own["parts"] * own["groups"]), ("merge", shape.channels)), floats


def _turned_work(shape: ConvShape, direction: Direction, own: Parameters) -> Work:
    _, padded = turned_tile(axis(shape, direction, 0), axis(shape, direction, 1), own["strip"], own["lanes"])
    if direction is Direction.WEIGHT_GRADIENT:
        ((_, units), merge), floats = _weight_work(shape, direction, own)
        phases: Phases = ("blocks", units), merge
    else:
        (prepare, _), floats = _gather_work(shape, direction, own)
        units, phases = own["parts"], (prepare, ("blocks", own["parts"]))
    return phases, whole_lines(floats) + units * padded


def _alike_in_row(shape: ConvShape, direction: Direction) -> int:
    """Outputs of a row that gather alike."""
    along = axis(shape, direction, 1)
    return along.out // along.whole


GATHER = Family(
    "cpu_gather",
    ("lanes", "tile_rows", "tile_columns", "strip", "columns_outer", "unroll", "stream"),
    (),
    *(_gather_work, space.reject_gather, space.gather, gather_cost),
    optional=("sweep",),
)
#: The forward of `GATHER` that also leaves the moments of its result, for a norm; no search comes to it by itself.
GATHER_MOMENTS = replace(GATHER, source="cpu_gather_moments", imports=("cpu_gather", "planes"), work=_moments_work)
WEIGHT = Family(
    "cpu_weight",
    ("lanes", "tap_rows", "tap_columns", "tile_columns", "strip", "parts", "groups"),
    (),
    *(_weight_work, space.reject_weight, space.weight, weight_cost),
    optional=("sweep",),
)
ROWS = Family(
    "cpu_rows",
    ("lanes", "tile_rows", "tile_vectors", "strip", "parts"),
    ("planes",),
    *(_rows_work, space.reject_rows, space.rows, rows_cost, _alike_in_row),
)
ROWS_WEIGHT = Family(
    "cpu_rows_weight",
    ("lanes", "tap_rows", "tap_columns", "tile_rows", "strip", "parts", "groups"),
    ("planes",),
    *(_rows_weight_work, space.reject_rows_weight, space.rows_weight, rows_weight_cost),
    most_lanes=lambda shape, _: shape.out_width,
)
TURNED = Family(
    "cpu_turned",
    ("lanes", "tile_rows", "tile_columns", "strip", "unroll", "parts"),
    ("planes", "cpu_gather", "cpu_weight"),
    *(_turned_work, space.reject_turned, space.turned, turned_cost),
)
TURNED_WEIGHT = replace(
    WEIGHT, source=TURNED.source, imports=TURNED.imports, work=_turned_work, cost=turned_cost, optional=()
)

#: Schedules by layout, and whether it is the weight gradient that they compute.
FAMILIES: dict[tuple[Layout, bool], tuple[Family, ...]] = {
    (Layout.CHANNELS_LAST, False): (GATHER,),
    (Layout.CHANNELS_LAST, True): (WEIGHT,),
    (Layout.CONTIGUOUS, False): (ROWS, TURNED),
    (Layout.CONTIGUOUS, True): (ROWS_WEIGHT, TURNED_WEIGHT),
}


def reject(shape: ConvShape, direction: Direction, layout: Layout, parameters: Parameters) -> str | None:
    """Why parameters make no kernel; nothing else may be compiled.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        layout: Of the images.
        parameters: By name.

    Returns:
        A reason in words; None where they make a kernel.
    """
    if reason := space.outside(shape, direction):
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
    """Parameters that fit the registers of a CPU and give each thread enough to do, of all schedules.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        layout: Of the images.
        threads: That will share the work.
        machine: The CPU.

    Yields:
        Parameters by name.
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
    """Predict what a candidate costs.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        parameters: Of the candidate.
        threads: That share the work.
        machine: The CPU.
        layout: Of the images.

    Returns:
        The cost.
    """
    family = family_of(direction, layout, parameters)
    assert family is not None, "only candidates are compared"
    return family.cost(shape, direction, parameters, threads, machine)
