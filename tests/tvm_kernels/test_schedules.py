"""Why: a tile's borders, tails and strides are decided while compiling, so many tiles are run against a plain sum."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from hybridpar.kernel_build import Session
from hybridpar.kernel_builder import Builder
from hybridpar.tvm_kernels.kernel import Kernel, Variant, load_image
from hybridpar.tvm_kernels.machine import Machine
from hybridpar.tvm_kernels.measure import Bench, reference
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.space import candidates, outside

LAST = Layout.CHANNELS_LAST
#: As the CPU of these tests is not known, tiles are made for two kinds.
MACHINES = [Machine(8, 16), Machine(16, 32)]
GUARD = 64


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    with Builder(1) as own:
        yield own


@pytest.fixture(scope="module")
def session() -> Session:
    return Session()


def made(builder: Builder, session: Session, variant: Variant) -> Kernel:
    built = builder.build(variant.request())
    return load_image(variant, built.names, built.image, session)


class Memory:
    """Values at an odd multiple of 4 bytes, between guards."""

    def __init__(self, values: torch.Tensor) -> None:
        self.room = torch.full((values.numel() + 2 * GUARD + 1,), 7.0)
        start = GUARD + 1 - (self.room.data_ptr() // 4) % 2
        self.values = self.room[start : start + values.numel()]
        self.values.copy_(values.reshape(-1))
        self.guards = self.room[:start], self.room[start + values.numel() :]

    @property
    def address(self) -> int:
        return self.values.data_ptr()


def pixels(image: torch.Tensor) -> torch.Tensor:
    """An image as it lies in memory in channels_last."""
    return image.permute(0, 2, 3, 1)


def run(kernel: Kernel, image: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
    """What a kernel computes of two of these, without reading the one that is computed; ranges are cut up."""
    results = {Direction.FORWARD: gradient, Direction.INPUT_GRADIENT: image, Direction.WEIGHT_GRADIENT: weight}
    result = results[kernel.variant.direction]
    operands = [one for one in (image, gradient, weight) if one is not result]
    held = [Memory(one if one is weight else pixels(one)) for one in operands]
    out = Memory(torch.full((result.numel(),), torch.nan))
    scratch = Memory(torch.full((kernel.scratch_bytes // 4,), torch.nan))
    third = Memory(bias) if bias is not None else None
    places = [held[0].address, held[1].address, third.address if third else 0, out.address, scratch.address]
    for function, count in kernel.phases:
        cut = count // 3
        for begin, end in ((cut, count), (0, cut), (count, count)):
            function(*places, begin, end)
    for memory in (*held, out, scratch):
        assert all(guard.eq(7.0).all() for guard in memory.guards), "it wrote beside its memory"
    if result is weight:
        return out.values.view(weight.shape)
    return out.values.view(pixels(result).shape).permute(0, 3, 1, 2)


def check(kernel: Kernel, biased: bool = False) -> None:
    shape, direction = kernel.variant.shape, kernel.variant.direction
    image = torch.randn(shape.batch, shape.channels, shape.height, shape.width)
    gradient = torch.randn(shape.batch, shape.channels, shape.out_height, shape.out_width)
    weight = torch.randn(shape.channels, 1, *shape.kernel)
    bias = torch.randn(shape.channels) if biased and direction is Direction.FORWARD else None
    got = run(kernel, image, gradient, weight, bias)
    expected = reference(shape, direction, image, gradient, weight)
    if bias is not None:
        expected = expected + bias.view(1, -1, 1, 1)
    terms = gradient[:, 0].numel() if direction is Direction.WEIGHT_GRADIENT else weight[0].numel()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=3e-7 * (terms + 8))


def drawn(count: int, seed: int) -> Iterator[tuple[Variant, bool]]:
    """Random shapes with odd sizes, each with a random candidate of a random machine."""
    draw = random.Random(seed)
    while count:
        taps = (draw.choice([1, 3, 5, 7]), draw.choice([3, 5, 2]))
        stride, dilation = (draw.choice([1, 2]), draw.choice([1, 2])), draw.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
        sizes = (draw.randint(1, 3), draw.choice([1, 3, 8, 13, 20, 33]), draw.randint(9, 20), draw.randint(9, 20))
        padding = (draw.randint(0, 4), draw.randint(0, 4))
        shape = ConvShape(*sizes, taps, stride, padding, dilation)
        direction = draw.choice(list(Direction))
        space = list(candidates(shape, direction, LAST, draw.choice([1, 2]), draw.choice(MACHINES)))
        if space:
            count -= 1
            yield Variant(shape, direction, LAST, draw.choice(space)), draw.random() < 0.5
        else:
            assert outside(shape, direction, LAST)


@pytest.mark.parametrize(("variant", "bias"), list(drawn(24, seed=1)), ids=lambda one: getattr(one, "direction", ""))
def test_random_shapes(variant: Variant, bias: bool, builder: Builder, session: Session) -> None:
    check(made(builder, session, variant), bias)


SMALL = ["1x1x5x4 k3x3 s1x1 p1x1 d1x1", "2x11x9x8 k3x3 s2x2 p1x1 d1x1", "1x9x7x7 k7x7 s1x1 p3x3 d1x1"]


def every(text: str, direction: Direction) -> list[Variant]:
    """All candidates for two threads."""
    shape = ConvShape.parse(text)
    found = {tuple(one.items()) for machine in MACHINES for one in candidates(shape, direction, LAST, 2, machine)}
    assert found
    return [Variant(shape, direction, LAST, dict(one)) for one in sorted(found)]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("text", SMALL)
def test_some_candidates(text: str, direction: Direction, builder: Builder, session: Session) -> None:
    space = every(text, direction)
    for variant in random.Random(text).sample(space, min(3, len(space))):
        check(made(builder, session, variant))


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("text", SMALL)
def test_every_candidate(text: str, direction: Direction, builder: Builder) -> None:
    for variant in every(text, direction):
        check(made(builder, Session(), variant))


@pytest.mark.parametrize("direction", Direction)
def test_large_kernels(direction: Direction, builder: Builder, session: Session) -> None:
    shape = ConvShape.parse("1x8x33x17 k31x13 s1x1 p15x6 d1x1")
    space = list(candidates(shape, direction, LAST, 1, MACHINES[0]))
    check(made(builder, session, Variant(shape, direction, LAST, min(space, key=lambda one: one["tile_columns"]))))


@pytest.mark.parametrize("direction", Direction)
def test_results_do_not_depend_on_threads(direction: Direction, builder: Builder, session: Session) -> None:
    shape = ConvShape.parse("3x19x12x11 k3x5 s1x1 p1x2 d1x1")
    parameters = max(candidates(shape, direction, LAST, 2, MACHINES[0]), key=lambda one: one.get("parts", 0))
    kernel = made(builder, session, Variant(shape, direction, LAST, parameters))
    alone, shared = (Bench(shape, direction, LAST, threads).run(kernel) for threads in (1, 3))
    assert torch.equal(alone, shared)


def test_nan_and_infinity_go_where_they_belong(builder: Builder, session: Session) -> None:
    shape = ConvShape.parse("1x8x9x9 k3x3 s1x1 p1x1 d1x1")
    for parameters in list(candidates(shape, Direction.FORWARD, LAST, 1, MACHINES[0]))[::40]:
        kernel = made(builder, session, Variant(shape, Direction.FORWARD, LAST, parameters))
        image, weight = torch.randn(1, 8, 9, 9), torch.randn(8, 1, 3, 3)
        image[0, 2, 0, 0], image[0, 5, 8, 4] = torch.nan, torch.inf
        stock = torch.nn.functional.conv2d(image, weight, padding=1, groups=8)
        got = run(kernel, image, torch.empty_like(stock), weight, None)
        torch.testing.assert_close(got, stock, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", Direction)
def test_nothing_is_allocated_and_no_threads_are_started(direction: Direction, builder: Builder) -> None:
    shape = ConvShape.parse("2x16x14x14 k5x5 s2x2 p2x2 d1x1")
    variant = Variant(shape, direction, LAST, next(candidates(shape, direction, LAST, 1, MACHINES[0])))
    text = builder.build(variant.request(text="ll")).text
    assert "TVMBackendAllocWorkspace" not in text
    assert "TVMBackendParallelLaunch" not in text
