"""Tests the space of schedules: what it contains, and which parameters of a record it refuses.

Records become machine code that checks nothing.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kernels.ranking import rank
from hybridpar.tvm_kernels.families import (
    FAMILIES,
    GATHER,
    ROWS,
    ROWS_WEIGHT,
    TURNED,
    WEIGHT,
    candidates,
    estimate,
    families,
    reject,
)
from hybridpar.tvm_kernels.kernel import Variant
from hybridpar.tvm_kernels.machine import Machine
from hybridpar.tvm_kernels.schedules.geometry import Axis, axis, by_input, interior, spans
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.space import neighbours, outside

LAST, PLANES = Layout.CHANNELS_LAST, Layout.CONTIGUOUS
MACHINES = [Machine(8, 16), Machine(16, 32), Machine(4, 32)]
SHAPE = ConvShape.parse("8x144x56x56 k3x3 s1x1 p1x1 d1x1")
STRIDED = ConvShape.parse("8x144x56x56 k5x5 s2x2 p2x2 d1x1")
#: Parameters that are allowed for SHAPE, of every schedule.
GOOD: dict[tuple[Layout, Direction], list[dict[str, int]]] = {
    **{
        (LAST, direction): [dict(zip(GATHER.names, (8, 2, 4, 8, 0, 1, 0), strict=True))]
        for direction in (Direction.FORWARD, Direction.INPUT_GRADIENT)
    },
    **{
        (PLANES, direction): [
            dict(zip(ROWS.names, (8, 2, 3, 8, 2), strict=True)),
            dict(zip(TURNED.names, (8, 2, 4, 8, 1, 2), strict=True)),
        ]
        for direction in (Direction.FORWARD, Direction.INPUT_GRADIENT)
    },
    (LAST, Direction.WEIGHT_GRADIENT): [dict(zip(WEIGHT.names, (8, 3, 3, 4, 7, 2, 2), strict=True))],
    (PLANES, Direction.WEIGHT_GRADIENT): [
        dict(zip(ROWS_WEIGHT.names, (8, 3, 3, 2, 7, 2, 2), strict=True)),
        dict(zip(WEIGHT.names, (8, 3, 3, 4, 7, 2, 2), strict=True)),
    ],
}
ALL_GOOD = [(layout, direction, one) for (layout, direction), known in GOOD.items() for one in known]


def test_every_schedule_is_known_by_its_parameters() -> None:
    for (layout, is_sum), known in FAMILIES.items():
        assert len({frozenset(one.names) for one in known}) == len(known)
        own = [direction for direction in Direction if (direction is Direction.WEIGHT_GRADIENT) == is_sum]
        assert {len(GOOD[layout, direction]) for direction in own} == {len(known)}
        assert all(path.is_file() for one in known for path in one.files)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("machine", "shape"),
    [
        pytest.param(MACHINES[0], SHAPE, id="avx2-plain"),
        pytest.param(MACHINES[1], STRIDED, id="avx512-strided"),
        pytest.param(MACHINES[0], STRIDED, id="avx2-strided", marks=pytest.mark.sweep),
        pytest.param(MACHINES[1], SHAPE, id="avx512-plain", marks=pytest.mark.sweep),
        pytest.param(MACHINES[2], SHAPE, id="neon-plain", marks=pytest.mark.sweep),
        pytest.param(MACHINES[2], STRIDED, id="neon-strided", marks=pytest.mark.sweep),
    ],
)
def test_candidates_are_many_different_and_allowed(
    shape: ConvShape, direction: Direction, machine: Machine, layout: Layout
) -> None:
    for threads in (1, 2, 8):
        space = list(candidates(shape, direction, layout, threads, machine))
        assert len({tuple(sorted(one.items())) for one in space}) == len(space) > 20
        assert all(reject(shape, direction, layout, one) is None for one in space)
        widest = max(space, key=lambda one: one.get("parts", 0) * one.get("groups", 1))
        variant = Variant(shape, direction, layout, widest)
        assert max(count for _, count in variant.phases) >= threads
        assert variant.scratch_bytes > 0
        assert len({frozenset(one) - {"sweep"} for one in space}) == len(families(direction, layout))


@pytest.mark.parametrize(("layout", "direction", "good"), ALL_GOOD)
def test_what_is_no_number_or_no_parameter_is_refused(
    layout: Layout, direction: Direction, good: dict[str, int]
) -> None:
    assert reject(SHAPE, direction, layout, good) is None
    for name in good:
        for value in (0, -1, 10**9, 2.0, "8", True, None):
            changed = {**good, name: value}
            allowed = name in ("columns_outer", "unroll", "strip", "stream") and value in (0, 1) and type(value) is int
            if not allowed:
                assert reject(SHAPE, direction, layout, changed), changed  # type: ignore[arg-type]
        assert reject(SHAPE, direction, layout, {key: value for key, value in good.items() if key != name})
    assert reject(SHAPE, direction, layout, {**good, "more": 1})
    assert reject(SHAPE, direction, layout, {})


def test_only_large_results_are_written_past_the_caches_and_in_whole_lines() -> None:
    large = ConvShape.parse("32x144x56x56 k3x3 s1x1 p1x1 d1x1")
    small = ConvShape.parse("2x144x14x14 k3x3 s1x1 p1x1 d1x1")
    machine = MACHINES[0]
    for direction in (Direction.FORWARD, Direction.INPUT_GRADIENT):
        past = [one for one in candidates(large, direction, LAST, 1, machine) if one["stream"]]
        assert past
        assert all(one["lanes"] % 16 == 0 and 144 % one["lanes"] == 0 for one in past)
        assert not any(one["stream"] for one in candidates(small, direction, LAST, 1, machine))
        narrow = {**past[0], "lanes": 8}
        assert "whole cache lines" in str(reject(large, direction, LAST, narrow))
        plain = {**past[0], "stream": 0}
        costs = [estimate(large, direction, one, 1, machine, LAST).cycles for one in (past[0], plain)]
        assert costs[0] < costs[1]


@pytest.mark.parametrize("direction", Direction)
def test_strips_are_swept_that_come_from_memory_and_stay_in_a_cache(direction: Direction) -> None:
    machine = MACHINES[1]
    swept = [one for one in candidates(SHAPE, direction, LAST, 1, machine) if "sweep" in one]
    assert swept
    assert max(one["strip"] for one in swept) * 2 * 56 * 144 * 4 <= 512 << 10
    small = ConvShape.parse("2x144x14x14 k3x3 s1x1 p1x1 d1x1")
    assert not any("sweep" in one for one in candidates(small, direction, LAST, 1, machine))
    plain = {name: value for name, value in swept[0].items() if name != "sweep"}
    assert plain in neighbours(swept[0], [plain, *swept])
    assert (
        estimate(SHAPE, direction, swept[0], 1, machine).cycles < estimate(SHAPE, direction, plain, 1, machine).cycles
    )
    assert reject(SHAPE, direction, LAST, {**plain, "sweep": 2})


def test_lanes_never_pass_what_lies_side_by_side() -> None:
    narrow = ConvShape.parse("1x5x9x6 k3x3 s1x1 p1x1 d1x1")
    for layout, direction, good in ALL_GOOD:
        assert "lanes" in str(reject(narrow, direction, layout, good))
        found = {one["lanes"] for one in candidates(narrow, direction, layout, 1, MACHINES[0])}
        assert found == {4}


def test_columns_far_apart_are_gathered_over_channels_alone() -> None:
    far = ConvShape.parse("1x8x40x40 k3x3 s3x3 p1x1 d1x1")
    for direction in (Direction.FORWARD, Direction.WEIGHT_GRADIENT):
        over_columns = GOOD[PLANES, direction][0]
        assert "two apart" in str(reject(far, direction, PLANES, {**over_columns, "parts": 1, "strip": 2}))
        assert list(candidates(far, direction, PLANES, 1, MACHINES[0]))


def test_what_no_kernel_covers() -> None:
    both = ConvShape.parse("1x8x20x20 k3x3 s2x2 p1x1 d2x2")
    for layout in Layout:
        assert outside(both, Direction.INPUT_GRADIENT)
        assert outside(both, Direction.FORWARD) is None
        assert outside(ConvShape.parse("1x8x40x40 k33x3 s1x1 p1x1 d1x1"), Direction.FORWARD)
        assert outside(ConvShape.parse("1x8x40x40 k1x1 s1x1 p0x0 d1x1"), Direction.FORWARD)
        assert not list(candidates(both, Direction.INPUT_GRADIENT, layout, 1, MACHINES[0]))


@pytest.mark.parametrize("direction", Direction)
def test_neighbours_are_one_step_away(direction: Direction) -> None:
    space = list(candidates(SHAPE, direction, LAST, 2, MACHINES[0]))
    for one in space[::200]:
        for other in neighbours(one, space):
            changed = [name for name in {*one, *other} if one.get(name, 0) != other.get(name, 0)]
            assert len(changed) == 1 or set(changed) == {"strip", "tile_rows"}
    assert any(neighbours(one, space) for one in space[::200])


@pytest.mark.parametrize("direction", Direction)
def test_neighbours_are_of_the_same_family(direction: Direction) -> None:
    space = list(candidates(SHAPE, direction, PLANES, 1, MACHINES[0]))
    families = {frozenset(one) for one in space}
    assert len(families) > 1
    for one in space[:: max(1, len(space) // 50)]:
        assert all(other.keys() == one.keys() for other in neighbours(one, space))


# ------------------------------------------------------------------------------------------------------------- geometry

AXES = st.builds(
    Axis,
    out=st.integers(1, 30),
    size=st.integers(1, 30),
    taps=st.integers(1, 9),
    stride=st.integers(1, 3),
    padding=st.integers(0, 6),
    dilation=st.integers(1, 3),
    transposed=st.booleans(),
)


@given(AXES, st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_spans_cover_an_axis_once_with_the_right_taps(along: Axis, tiles: int) -> None:
    tile = tiles * along.whole
    seen = []
    for span in spans(along, tile):
        for moved in range(span.count):
            for index, taps in enumerate(span.taps):
                out = span.start + moved * tile + index
                shift = moved * along.shift(tile)
                assert tuple((tap, place + shift) for tap, place in taps) == along.bounded(out)
                seen.append(out)
    assert seen == list(range(along.out))
    inner = interior(along, tile)
    if inner is not None:
        assert all(
            along.bounded(out) == along.unbounded(out) for out in range(inner.start, inner.start + inner.count * tile)
        )


@pytest.mark.parametrize("shape", [SHAPE, STRIDED], ids=["plain", "strided"])
def test_both_directions_use_the_same_pairs(shape: ConvShape) -> None:
    def pairs(direction: Direction) -> set[tuple[int, int, int]]:
        along = axis(shape, direction, 0)
        found = {(out, tap, place) for out in range(along.out) for tap, place in along.bounded(out)}
        return found if direction is Direction.FORWARD else {(place, tap, out) for out, tap, place in found}

    assert pairs(Direction.FORWARD) == pairs(Direction.INPUT_GRADIENT)
    width = len(pairs(Direction.FORWARD))
    assert width * width * shape.batch * shape.channels == shape.multiply_adds


def test_inputs_know_their_uses() -> None:
    assert by_input((((0, 4), (1, 5)), ((0, 5),))) == ((4, ((0, 0),)), (5, ((0, 1), (1, 0))))


# ----------------------------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize(("layout", "direction", "good"), ALL_GOOD)
def test_costs_follow_the_work(layout: Layout, direction: Direction, good: dict[str, int]) -> None:
    machine = MACHINES[0]

    def cycles(text: str, threads: int = 1) -> float:
        return estimate(ConvShape.parse(text), direction, good, threads, machine, layout).cycles

    alone = cycles("8x144x56x56 k3x3 s1x1 p1x1 d1x1")
    assert 3.9 < cycles("32x144x56x56 k3x3 s1x1 p1x1 d1x1") / alone < 4.1
    assert 1.9 < alone / cycles("8x144x56x56 k3x3 s1x1 p1x1 d1x1", threads=2) < 2.1
    assert cycles("8x144x56x56 k7x7 s1x1 p3x3 d1x1") > 1.5 * alone


def test_too_few_and_too_many_sums_cost() -> None:
    shape, machine = ConvShape.parse("8x64x14x14 k7x7 s1x1 p3x3 d1x1"), MACHINES[0]

    def compute(columns: int) -> float:
        own = {**GOOD[LAST, Direction.FORWARD][0], "tile_rows": 1, "tile_columns": columns}
        return estimate(shape, Direction.FORWARD, own, 1, machine).compute

    assert compute(7) < compute(1)
    assert compute(7) < compute(14) * 1.2


def test_a_ranking_is_told_by_order_alone() -> None:
    right = rank([1.0, 5.0, 9.0, 2.0], [10.0, 30.0, 400.0, 20.0])
    assert right.correlation == pytest.approx(1.0)
    assert right.regret == {1: 0.0, 4: 0.0, 16: 0.0}
    wrong = rank([9.0, 5.0, 1.0], [10.0, 20.0, 40.0])
    assert wrong.correlation == pytest.approx(-1.0)
    assert wrong.regret[1] == pytest.approx(3.0)
    assert wrong.regret[4] == 0.0
    assert rank([], []).regret == {}
    assert rank([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).correlation is None
