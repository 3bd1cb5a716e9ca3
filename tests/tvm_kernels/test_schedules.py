"""Tests schedules of convolution kernels against a plain sum, for many tiles, borders and strides.

Borders, tails and strides of a tile are decided while compiling.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridpar.codegen.build import Session
from hybridpar.codegen.compile_pool import Builder
from hybridpar.tvm_kernels.conv_bench import DTYPES, ConvBench, reference
from hybridpar.tvm_kernels.kernel import TunedKernel, Variant
from hybridpar.tvm_kernels.machine import Machine
from hybridpar.tvm_kernels.schedules import outside
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey
from hybridpar.tvm_kernels.space import candidates
from tests.tvm_kernels.standin import key_of

#: As the CPU of these tests is not known, tiles are made for two kinds.
MACHINES = [Machine(8, 16), Machine(16, 32)]
WITH_BFLOAT16 = Machine(16, 32, bfloat16=True)
GUARD = 64


@pytest.fixture(scope="module")
def session() -> Session:
    return Session()


def made(builder: Builder, session: Session, variant: Variant) -> tuple[KernelKey, TunedKernel]:
    """The kernel, and what it is of."""
    return variant.key, variant.load(builder.build(variant.request), session)


class Memory:
    """Values at an odd multiple of their size, or at what they must be aligned to, between guards."""

    def __init__(self, values: torch.Tensor, align: int = 0) -> None:
        item = values.element_size()
        self.padded = torch.full((values.numel() + 2 * GUARD + 32,), 7.0, dtype=values.dtype)
        first = self.padded.data_ptr() // item
        start = GUARD + (1 - first % 2 if align <= item else -(first + GUARD) % (align // item))
        self.values = self.padded[start : start + values.numel()]
        self.values.copy_(values.reshape(-1))
        self.guards = self.padded[:start], self.padded[start + values.numel() :]

    @property
    def address(self) -> int:
        return self.values.data_ptr()


def in_memory(image: torch.Tensor) -> torch.Tensor:
    """An image with its axes as they lie in memory."""
    return image.permute(0, 2, 3, 1)


def run(
    made: tuple[KernelKey, TunedKernel],
    image: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
):
    """What a kernel computes of two of these, without reading the one that is computed; ranges are cut up."""
    results = {Direction.FORWARD: gradient, Direction.INPUT_GRADIENT: image, Direction.WEIGHT_GRADIENT: weight}
    key, kernel = made
    result = results[key.direction]
    operands = [one for one in (image, gradient, weight) if one is not result]
    held = [Memory(one if one is weight else in_memory(one)) for one in operands]
    out = Memory(torch.full((result.numel(),), torch.nan, dtype=image.dtype), kernel.align_out)
    scratch = Memory(torch.full((kernel.scratch_bytes // 4,), torch.nan))
    third = Memory(bias) if bias is not None else None
    places = [held[0].address, held[1].address, third.address if third else 0, out.address, scratch.address]
    for function, count, _ in kernel.phases:
        cut = count // 3
        for begin, end in ((cut, count), (0, cut), (count, count)):
            function(*places, begin, end)
    for memory in (*held, out, scratch):
        assert all(guard.eq(7.0).all() for guard in memory.guards), "it wrote beside its memory"
    if result is weight:
        return out.values.view(weight.shape)
    return out.values.view(in_memory(result).shape).permute(0, 3, 1, 2)


def check(kernel: tuple[KernelKey, TunedKernel], biased: bool = False) -> None:
    shape, direction, dtype = kernel[0].shape, kernel[0].direction, DTYPES[kernel[0].dtype]
    image = torch.randn(shape.batch, shape.channels, shape.height, shape.width).to(dtype)
    gradient = torch.randn(shape.batch, shape.channels, shape.out_height, shape.out_width).to(dtype)
    weight = torch.randn(shape.channels, 1, *shape.kernel).to(dtype)
    bias = torch.randn(shape.channels).to(dtype) if biased and direction is Direction.FORWARD else None
    got = run(kernel, image, gradient, weight, bias)
    expected = reference(shape, direction, image, gradient, weight)
    if bias is not None:
        expected = expected + bias.view(1, -1, 1, 1)
    terms = gradient[:, 0].numel() if direction is Direction.WEIGHT_GRADIENT else weight[0].numel()
    rounding = 2.0**-8 if dtype is torch.bfloat16 else 0.0  # to nearest
    torch.testing.assert_close(got.double(), expected, rtol=1e-5 + rounding, atol=3e-7 * (terms + 8))


def drawn(count: int, seed: int, machines: list[Machine] = MACHINES, **fields: Any) -> Iterator[tuple[Variant, bool]]:
    """Random shapes with odd sizes, each with a random candidate of a random machine."""
    draw = random.Random(seed)
    while count:
        taps = (draw.choice([1, 3, 5, 7]), draw.choice([3, 5, 2]))
        stride, dilation = (draw.choice([1, 2]), draw.choice([1, 2])), draw.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
        sizes = (draw.randint(1, 3), draw.choice([1, 3, 8, 13, 20, 33, 64]), draw.randint(9, 20), draw.randint(9, 20))
        padding = (draw.randint(0, 4), draw.randint(0, 4))
        shape = ConvShape(*sizes, taps, stride, padding, dilation)
        direction = draw.choice(list(Direction))
        key = key_of(shape, direction, threads=draw.choice([1, 2]), **fields)
        space = candidates(key, draw.choice(machines))
        if space:
            count -= 1
            parameters = draw.choice(space)
            if direction is not Direction.WEIGHT_GRADIENT and parameters["strip"] == parameters["tile_rows"]:
                parameters = {**parameters, "columns_outer": draw.choice([0, 1])}
            if draw.random() < 0.5:
                parameters = {**parameters, "sweep": 1}
            yield Variant(key, parameters), draw.random() < 0.5
        else:
            assert outside(shape, direction)


DRAWN = [*drawn(16, seed=1), *drawn(12, seed=4, machines=[WITH_BFLOAT16], dtype="bfloat16")]


def test_drawn_are_all_directions_dtypes_strides_and_dilations() -> None:
    keys = [variant.key for variant, _ in DRAWN]
    for dtype in ("float32", "bfloat16"):
        for direction in Direction:
            shapes = [key.shape for key in keys if (key.direction, key.dtype) == (direction, dtype)]
            assert {max(shape.stride) for shape in shapes} == {1, 2}
    assert {key.direction for key in keys if max(key.shape.dilation) == 2} == set(Direction)
    assert {key.shape.padding[0] > key.shape.kernel[0] // 2 for key in keys} == {True, False}


@pytest.mark.parametrize(
    ("variant", "bias"),
    DRAWN,
    ids=lambda one: f"{one.key.direction}-{one.key.dtype}" if isinstance(one, Variant) else "",
)
def test_random_shapes(variant: Variant, bias: bool, builder: Builder, session: Session) -> None:
    check(made(builder, session, variant), bias)


SMALL = ["1x1x5x4 k3x3 s1x1 p1x1 d1x1", "2x11x9x8 k3x3 s2x2 p1x1 d1x1", "1x9x7x7 k7x7 s1x1 p3x3 d1x1"]


def every(text: str, direction: Direction) -> list[Variant]:
    """All candidates for two threads."""
    key = key_of(text, direction, threads=2)
    found = {tuple(one.items()) for machine in MACHINES for one in candidates(key, machine)}
    assert found
    return [Variant(key, dict(one)) for one in sorted(found)]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("text", SMALL)
def test_some_candidates(text: str, direction: Direction, builder: Builder, session: Session) -> None:
    space = every(text, direction)
    for variant in random.Random(text).sample(space, min(2, len(space))):
        check(made(builder, session, variant))


GATHER = ("lanes", "tile_rows", "tile_columns", "strip", "columns_outer", "unroll", "stream")
#: Whole lines of channels in one vector and in two, at either stride.
STREAMED = [
    ("2x32x11x9 k3x3 s1x1 p1x1 d1x1", Direction.FORWARD, "float32", (16, 2, 3, 4, 0, 1, 1)),
    ("1x48x8x9 k5x5 s2x2 p2x2 d1x1", Direction.FORWARD, "float32", (16, 1, 2, 1, 1, 0, 1)),
    ("2x32x9x10 k3x3 s2x2 p1x1 d1x1", Direction.INPUT_GRADIENT, "float32", (32, 2, 2, 2, 1, 1, 1)),
    ("2x64x9x7 k3x3 s1x1 p1x1 d2x1", Direction.FORWARD, "bfloat16", (64, 1, 3, 2, 0, 1, 1)),
    ("1x48x9x8 k3x3 s1x1 p1x1 d1x1", Direction.INPUT_GRADIENT, "bfloat16", (16, 1, 4, 2, 1, 1, 1)),
]


@pytest.mark.parametrize(("text", "direction", "dtype", "values"), STREAMED)
def test_results_that_are_written_past_the_caches(
    text: str, direction: Direction, dtype: str, values: tuple[int, ...], builder: Builder, session: Session
) -> None:
    parameters = dict(zip(GATHER, values, strict=True))
    check(made(builder, session, Variant(key_of(text, direction, dtype=dtype), parameters)), biased=True)


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.INPUT_GRADIENT])
def test_lines_of_bfloat16_that_reach_back_into_others(
    direction: Direction, builder: Builder, session: Session
) -> None:
    """Of 38 channels the second vector of 32 begins at channel 6."""
    parameters = dict(zip(GATHER, (32, 2, 3, 4, 1, 1, 0), strict=True))
    check(
        made(
            builder, session, Variant(key_of("2x38x9x7 k3x3 s1x1 p1x1 d1x1", direction, dtype="bfloat16"), parameters)
        ),
        True,
    )


#: Images of one pixel, narrower than a vector, of one channel; padding beyond the kernel, and none.
EDGES = [
    "1x9x1x1 k3x3 s1x1 p1x1 d1x1",
    "2x1x6x21 k3x3 s1x1 p1x1 d1x1",
    "1x5x3x2 k5x5 s1x1 p2x2 d1x1",
    "1x3x8x19 k3x3 s2x2 p0x0 d1x1",
    "2x2x5x11 k3x3 s2x1 p4x5 d1x1",
    "1x8x9x12 k3x3 s3x3 p1x1 d1x1",
]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("text", EDGES)
def test_edges(text: str, direction: Direction, builder: Builder, session: Session) -> None:
    shape = ConvShape.parse(text)
    key = key_of(shape, direction, threads=2)
    space = candidates(key, MACHINES[0])
    assert bool(space) != bool(outside(shape, direction))
    if space:
        check(made(builder, session, Variant(key, random.Random(text).choice(space))))


@pytest.mark.parametrize("direction", Direction)
def test_large_kernels(direction: Direction, builder: Builder, session: Session) -> None:
    key = key_of("1x8x33x17 k31x13 s1x1 p15x6 d1x1", direction)
    space = candidates(key, MACHINES[0])
    check(made(builder, session, Variant(key, min(space, key=lambda one: one["tile_columns"]))))


def with_most_parts(shape: ConvShape, direction: Direction, threads: int) -> Variant:
    key = key_of(shape, direction, threads=threads)
    return Variant(key, max(candidates(key, MACHINES[0]), key=lambda one: one.get("parts", 0)))


@pytest.mark.parametrize("direction", Direction)
def test_results_do_not_depend_on_threads(direction: Direction, builder: Builder, session: Session) -> None:
    shape = ConvShape.parse("3x19x12x11 k3x5 s1x1 p1x2 d1x1")
    variant = with_most_parts(shape, direction, 2)
    built, bench = builder.build(variant.request), ConvBench(variant.key)
    variants = [replace(variant, key=replace(variant.key, threads=threads)) for threads in (1, 3)]
    alone, shared = (bench.run(one.load(built, session)) for one in variants)
    assert torch.equal(alone, shared)


def test_nan_and_infinity_go_where_they_belong(builder: Builder, session: Session) -> None:
    shape = ConvShape.parse("1x8x9x9 k3x3 s1x1 p1x1 d1x1")
    key = key_of(shape, Direction.FORWARD)
    for one in candidates(key, MACHINES[0])[::40]:
        kernel = made(builder, session, Variant(key, one))
        image, weight = torch.randn(1, 8, 9, 9), torch.randn(8, 1, 3, 3)
        image[0, 2, 0, 0], image[0, 5, 8, 4] = torch.nan, torch.inf
        stock = torch.nn.functional.conv2d(image, weight, padding=1, groups=8)
        got = run(kernel, image, torch.empty_like(stock), weight, None)
        torch.testing.assert_close(got, stock, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_not_finite_counts_once(builder: Builder, session: Session) -> None:
    shape = ConvShape.parse("1x8x5x11 k3x3 s1x1 p1x1 d1x1")
    image, gradient = torch.randn(1, 8, 5, 11), torch.randn(1, 8, 5, 11)
    gradient[0, 1, 2, 5] = torch.nan
    variant = with_most_parts(shape, Direction.WEIGHT_GRADIENT, 1)
    got = run(made(builder, session, variant), image, gradient, torch.empty(8, 1, 3, 3), None)
    assert got[1].isnan().all()
    assert got[[0, *range(2, 8)]].isfinite().all()


@pytest.mark.parametrize("direction", Direction)
def test_nothing_is_allocated_and_no_threads_are_started(direction: Direction, builder: Builder) -> None:
    shape = ConvShape.parse("2x16x14x18 k5x5 s2x2 p2x2 d1x1")
    image = builder.build(with_most_parts(shape, direction, 1).request).image
    for symbol in (b"TVMBackendAllocWorkspace", b"TVMBackendParallelLaunch"):
        assert symbol not in image
