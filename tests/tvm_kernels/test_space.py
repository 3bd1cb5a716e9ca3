"""Tests the space of schedules: what it contains, and which parameters of a record it refuses.

Records become machine code that checks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kernels.common import multiply_adds
from hybridpar.tvm_kernels.kernel import Variant
from hybridpar.tvm_kernels.machine import KNOWN, Machine
from hybridpar.tvm_kernels.schedules import outside
from hybridpar.tvm_kernels.schedules.geometry import Axis, axis, interior, spans
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.space import candidates, nearest, neighbours, reject
from tests.tvm_kernels.standin import key_of

GATHER = ("lanes", "tile_rows", "tile_columns", "strip", "columns_outer", "unroll", "stream")
WEIGHT = ("lanes", "tap_rows", "tap_columns", "tile_columns", "strip", "parts", "groups")
MACHINES = [Machine(8, 16), Machine(16, 32), Machine(4, 32)]
SHAPE = ConvShape.parse("8x144x56x56 k3x3 s1x1 p1x1 d1x1")
STRIDED = ConvShape.parse("8x144x56x56 k5x5 s2x2 p2x2 d1x1")
#: Parameters that are allowed for SHAPE.
GOOD: dict[Direction, dict[str, int]] = {
    Direction.FORWARD: dict(zip(GATHER, (8, 2, 4, 8, 0, 1, 0), strict=True)),
    Direction.INPUT_GRADIENT: dict(zip(GATHER, (8, 2, 4, 8, 0, 1, 0), strict=True)),
    Direction.WEIGHT_GRADIENT: dict(zip(WEIGHT, (8, 3, 3, 4, 7, 2, 2), strict=True)),
}


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
def test_candidates_are_many_different_and_allowed(shape: ConvShape, direction: Direction, machine: Machine) -> None:
    for threads in (1, 2, 8):
        key = key_of(shape, direction, threads=threads)
        space = candidates(key, machine)
        assert len({tuple(sorted(one.items())) for one in space}) == len(space) > 20
        assert all(reject(key, one) is None for one in space)
        widest = max(space, key=lambda one: one.get("parts", 0) * one.get("groups", 1))
        ranges, scratch = Variant(key, widest).work
        assert max(ranges.values()) >= threads
        assert scratch > 0
        assert reject(replace(key, layout=Layout.CONTIGUOUS), space[0])


@pytest.mark.parametrize("direction", Direction)
def test_what_is_no_number_or_no_parameter_is_refused(direction: Direction) -> None:
    good, key = GOOD[direction], key_of(SHAPE, direction)
    assert reject(key, good) is None
    assert reject(key, {**good, "sweep": 1}) is None
    for name in good:
        for value in (0, -1, 10**9, 2.0, "8", True, None):
            changed = {**good, name: value}
            allowed = name in ("columns_outer", "unroll", "stream") and value in (0, 1) and type(value) is int
            if not allowed:
                assert reject(key, changed), changed  # type: ignore[arg-type]
        assert reject(key, {other: value for other, value in good.items() if other != name})
    assert reject(key, {**good, "more": 1})
    assert reject(key, {})


def test_only_large_results_are_written_past_the_caches_and_in_whole_lines() -> None:
    large = ConvShape.parse("32x144x56x56 k3x3 s1x1 p1x1 d1x1")
    small = ConvShape.parse("2x144x14x14 k3x3 s1x1 p1x1 d1x1")
    machine = MACHINES[0]
    for direction in (Direction.FORWARD, Direction.INPUT_GRADIENT):
        past = [one for one in candidates(key_of(large, direction), machine) if one["stream"]]
        assert past
        assert all(one["lanes"] % 16 == 0 and 144 % one["lanes"] == 0 for one in past)
        assert all(one["stream"] for one in candidates(key_of(large, direction), machine) if one["lanes"] == 16)
        assert not any(one["stream"] for one in candidates(key_of(small, direction), machine))
        narrow = {**past[0], "lanes": 8}
        assert "whole cache lines" in str(reject(key_of(large, direction), narrow))


@pytest.mark.parametrize("direction", Direction)
def test_strips_are_swept_that_come_from_memory_and_stay_in_a_cache(direction: Direction) -> None:
    machine = MACHINES[1]
    key = key_of(SHAPE, direction)
    swept = [one for one in candidates(key, machine) if "sweep" in one]
    assert swept
    assert max(one["strip"] for one in swept) * 2 * 56 * 144 * 4 <= 512 << 10
    small = ConvShape.parse("2x144x14x14 k3x3 s1x1 p1x1 d1x1")
    assert not any("sweep" in one for one in candidates(key_of(small, direction), machine))
    plain = {name: value for name, value in swept[0].items() if name != "sweep"}
    assert plain in neighbours(swept[0], [plain, *swept])
    assert reject(key, {**plain, "sweep": 2})


def test_what_no_kernel_covers() -> None:
    both = ConvShape.parse("1x8x20x20 k3x3 s2x2 p1x1 d2x2")
    assert outside(both, Direction.INPUT_GRADIENT)
    assert not outside(both, Direction.FORWARD)
    assert outside(ConvShape.parse("1x8x40x40 k33x3 s1x1 p1x1 d1x1"), Direction.FORWARD)
    assert outside(ConvShape.parse("1x8x40x40 k1x1 s1x1 p0x0 d1x1"), Direction.FORWARD)
    assert not candidates(key_of(both, Direction.INPUT_GRADIENT), MACHINES[0])


def test_the_nearest_candidate_is_the_one_that_differs_least() -> None:
    space = candidates(key_of(SHAPE, Direction.FORWARD), MACHINES[0])
    assert all(nearest(one, space) == one for one in space[::20])
    far = {**space[-1], "strip": 100 * space[-1]["strip"]}
    strips = [one["strip"] for one in space if {**one, "strip": 0} == {**space[-1], "strip": 0}]
    assert nearest(far, space) == {**space[-1], "strip": max(strips)}
    assert nearest({"tile_rows": 2}, space)["tile_rows"] == 2


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("text", ["2x8x9x7 k3x3 s1x1 p1x1 d1x1", "2x16x14x14 k5x5 s2x2 p2x2 d1x1"])
def test_a_search_can_go_from_any_candidate_to_any_other(text: str, direction: Direction, layout: Layout) -> None:
    spaces = [candidates(key_of(text, direction, layout, device=KNOWN["h100"].fingerprint))]
    if layout is Layout.CHANNELS_LAST:
        spaces += [candidates(key_of(text, direction, threads=threads), MACHINES[1]) for threads in (1, 2)]
    for space in spaces:
        seen, todo = {named(space[0])}, [space[0]]
        while todo:
            fresh = {named(one): one for one in neighbours(todo.pop(), space) if named(one) not in seen}
            seen |= set(fresh)
            todo += fresh.values()
        assert len(seen) == len(space)


def named(parameters: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(parameters.items()))


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
    tile = tiles * (along.stride if along.transposed else 1)
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
    met = len(pairs(Direction.FORWARD))
    assert multiply_adds(shape) == met * met * shape.batch * shape.channels
