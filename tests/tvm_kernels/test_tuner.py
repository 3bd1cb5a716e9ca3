"""Tests the search for one shape: interruptions, candidates that fail, and wrong kernels."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built, Request
from hybridpar.tvm_kernels import measure
from hybridpar.tvm_kernels.choice import Choices, use_choices
from hybridpar.tvm_kernels.conv_bench import COLD, ConvBench, reference
from hybridpar.tvm_kernels.database import Database
from hybridpar.tvm_kernels.kernel import TunedKernel, Variant, load_image
from hybridpar.tvm_kernels.machine import Machine, cpu_fingerprint, this_machine
from hybridpar.tvm_kernels.measure import Timing, summarize_pairs
from hybridpar.tvm_kernels.op import depthwise_conv2d
from hybridpar.tvm_kernels.operation import KernelKey
from hybridpar.tvm_kernels.operations import depthwise
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.space import candidates, reject
from hybridpar.tvm_kernels.tuner import Tuned, TuningStopped, tune
from tests.tvm_kernels.standin import record_of

LAST = Layout.CHANNELS_LAST
SHAPE = ConvShape.parse("2x16x9x9 k3x3 s1x1 p1x1 d1x1")
FORWARD = KernelKey(Direction.FORWARD, SHAPE, LAST, 1, cpu_fingerprint())


@pytest.mark.parametrize("direction", Direction)
def test_a_search_finds_kernels_that_are_right(direction: Direction, builder: Builder) -> None:
    seen: list[tuple[Tuned, Tuned]] = []
    threads = torch.get_num_threads()
    results = tune(
        KernelKey(direction, SHAPE, LAST, 1, cpu_fingerprint()),
        600.0,
        trials=4,
        on_progress=lambda one, best: seen.append((one, best)),
        builder=builder,
    )
    assert torch.get_num_threads() == threads
    assert len(results) == 4
    assert [one.ms for one in results if one.final] == sorted(one.ms for one in results if one.final)
    for one in results:
        assert reject(SHAPE, direction, LAST, one.parameters) is None
        assert one.ms > 0
        assert one.stock_ms > 0
        assert one.error < 1e-5
    assert len(seen) == 4 + sum(one.final for one in results)
    for one in results:
        assert one.layout_ms is None or (one.final and one.layout_ms > 0)


def test_torch_is_timed_in_both_layouts_where_the_other_is_its_better_one(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def compare(bench: ConvBench, kernel: object, seconds: float, least: int = 3, rival: object = None) -> Timing:
        asked.append(rival)
        return Timing(2.0, 4.0 if rival is None else 7.0, 2.0 if rival is None else 3.0, 3)

    monkeypatch.setattr(ConvBench, "compare", compare)
    for better, expected in ((LAST, None), (Layout.CONTIGUOUS, 6.0)):
        monkeypatch.setattr(ConvBench, "stock", property(lambda self, own=better: self.ways[f"torch {own}"]))
        (found,) = tune(FORWARD, 600.0, trials=1, builder=builder)
        assert (found.ms, found.stock_ms, found.layout_ms) == (2.0, 4.0, expected)
    # Once in the search, in its final on each of two benches, and on each in the other layout.
    assert [one is not None for one in asked] == [*[False] * 6, True, True]


def test_a_search_goes_on_from_what_is_known(builder: Builder) -> None:
    (first,) = tune(FORWARD, 0.0, builder=builder, seed=3)
    space = candidates(SHAPE, Direction.FORWARD, 1, this_machine())
    known = next(one for one in space if one != first.parameters)
    (again,) = tune(FORWARD, 0.0, builder=builder, known=[known])
    assert dict(again.parameters) == known


class Failing(Builder):
    """Builds nothing, and notes what it was asked for."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(1)
        self.error = error
        self.asked = 0

    def submit(self, request: Request) -> Future[Built]:
        self.asked += 1
        future: Future[Built] = Future()
        future.set_exception(self.error)
        return future


def test_where_nothing_can_be_built_the_search_ends() -> None:
    with Failing(KernelsUnavailable("no TVM")) as failing, pytest.raises(KernelsUnavailable, match="no TVM"):
        tune(FORWARD, 600.0, builder=failing)
    assert failing.asked < 20


def test_a_user_who_stops_keeps_what_there_is(builder: Builder) -> None:
    def stop(one: Tuned, best: Tuned) -> None:
        raise KeyboardInterrupt

    with pytest.raises(TuningStopped) as stopped:
        tune(FORWARD, 600.0, builder=builder, on_progress=stop)
    assert len(stopped.value.results) == 1
    assert builder.build(Variant(SHAPE, Direction.FORWARD, stopped.value.results[0].parameters).request).image


def test_a_wrong_kernel_is_never_timed(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(variant: Variant, *rest: object) -> TunedKernel:
        def nothing(*addresses: int) -> None:
            pass

        return TunedKernel(tuple((nothing, count) for _, count in variant.phases), variant.scratch_bytes, 4, 1)

    monkeypatch.setattr(depthwise, "load_image", shifted)
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full(like.shape, torch.nan))
    assert tune(FORWARD, 600.0, trials=2, builder=builder) == []


def test_what_no_kernel_covers_is_not_searched_for() -> None:
    with Failing(AssertionError()) as failing:
        far = ConvShape.parse("1x8x40x40 k33x3 s1x1 p1x1 d1x1")
        for layout in Layout:
            key = KernelKey(Direction.FORWARD, far, layout, 1, cpu_fingerprint())
            assert tune(key, builder=failing) == []
        assert failing.asked == 0


def test_the_op_runs_what_was_compiled(builder: Builder) -> None:
    def make(records: Sequence[Any]) -> list[TunedKernel]:
        variants = [Variant(record.key.shape, record.direction, record.parameters) for record in records]
        return [load_image(variant, builder.build(variant.request)) for variant in variants]

    shape = ConvShape.parse("2x9x10x21 k3x3 s2x2 p1x1 d1x1")
    found = [
        record_of(shape, direction, LAST, parameters=next(candidates(shape, direction, 1, Machine(8, 16))))
        for direction in Direction
    ]
    before = use_choices(Choices(Database("", found), make))
    try:
        x = torch.randn(2, 9, 10, 21).contiguous(memory_format=torch.channels_last).requires_grad_()
        weight, bias = torch.randn(9, 1, 3, 3, requires_grad=True), torch.randn(9, requires_grad=True)
        own = depthwise_conv2d(x, weight, bias, 2, 1)
        stock = torch.nn.functional.conv2d(x, weight, bias, 2, 1, groups=9)
        assert own.stride() == stock.stride()
        assert own.grad_fn is not None
        assert own.grad_fn.name() == "_ConvolutionBackward"
        torch.testing.assert_close(own, stock, rtol=1e-4, atol=1e-5)
        gradient = torch.randn_like(own)
        for got, expected in zip(
            torch.autograd.grad(own, (x, weight, bias), gradient),
            torch.autograd.grad(stock, (x, weight, bias), gradient),
            strict=True,
        ):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    finally:
        use_choices(before)


# ------------------------------------------------------------------------------------------------------------ measuring


def test_disturbed_pairs_are_dropped() -> None:
    timing = summarize_pairs([(0.001, 0.002)] * 9 + [(0.5, 0.002), (0.001, 0.9)])
    assert timing.pairs == 9
    assert timing.ms == pytest.approx(1.0)
    assert timing.stock_ms == pytest.approx(2.0)
    assert timing.speedup == pytest.approx(2.0)


def test_ratios_that_only_medians_show_are_noise() -> None:
    # Torch waits in most of its calls, as threads do on a busy machine; where it did not, it was as fast.
    timing = summarize_pairs([(0.001, 0.228)] * 9 + [(0.001, 0.001)])
    assert timing.speedup == pytest.approx(228)
    assert timing.noise == pytest.approx(227)
    assert summarize_pairs([(0.001, 0.002)] * 9).noise == 0.0


def test_waiting_for_cores_is_noise_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, waited = itertools.count(), itertools.count(step=4.0)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(measure, "seconds_waited", lambda: next(waited))
    # Two pairs of four readings of the clock each, and one before and two after them: 11 s on 2 threads, 4 of waiting.
    timing = measure.time_pairs(int, int, 0.0, least=2, threads=2)
    assert timing.noise == pytest.approx(4 / (2 * 11 - 4), rel=0.1)
    assert measure.time_pairs(int, int, 0.0, least=2, threads=1).noise < 1e9


def timing_of(speedup: float, noise: float = 0.0) -> Timing:
    return Timing(1.0, speedup, speedup, 5, noise)


def test_comparisons_are_repeated_until_two_agree_and_the_worse_counts() -> None:
    taken = iter([timing_of(228.0), timing_of(1.3), timing_of(1.4), timing_of(9.0)])
    found = measure.steady_timing(lambda: next(taken), most=4)
    assert found.speedup == 1.3
    assert found.noise == pytest.approx(1.4 / 1.3 - 1)
    assert next(taken).speedup == 9.0, "no more were taken than were needed"


def test_noise_refuses_only_gains_that_lie_within_it() -> None:
    taken = iter([timing_of(32.0, noise=0.9), timing_of(24.0), timing_of(9.0)])
    found = measure.steady_timing(lambda: next(taken))
    assert (found.speedup, found.noise, next(taken).speedup) == (24.0, 0.9, 9.0), "the third was not needed"
    assert measure.is_gain(found.speedup, found.noise)
    assert [measure.is_gain(1.1, noise) for noise in (0.05, 0.2, math.nan)] == [True, False, False]
    assert [measure.is_clear(1.1, noise) for noise in (0.05, 0.2, 0.3)] == [True, True, False], "or it gains nothing"
    assert [measure.is_clear(0.9, noise) for noise in (0.2, 0.3, math.nan)] == [True, False, False]
    assert not measure.is_clear(2.0, math.nan)


@pytest.mark.parametrize("direction", list(Direction))
def test_tensors_are_freed_with_their_bench(direction: Direction) -> None:
    enabled = gc.isenabled()
    gc.disable()  # what waits for a collection holds gigabytes until then
    try:
        bench = ConvBench(SHAPE, direction, LAST)
        for way in (bench.instead, *bench.ways.values()):
            way()
        held = [weakref.ref(bench), weakref.ref(bench.arguments()[0])]
        del bench, way
        assert [one() for one in held] == [None, None]
    finally:
        if enabled:
            gc.enable()


@pytest.mark.parametrize("direction", list(Direction))
def test_tensors_take_turns_so_that_none_is_in_a_cache(direction: Direction) -> None:
    shape = ConvShape.parse("2x64x96x96 k3x3 s1x1 p1x1 d1x1")  # two tensors of 4.5 MiB
    bench = ConvBench(shape, direction, LAST)
    asked: list[tuple[int, ...]] = []

    def kernel(first: torch.Tensor, second: torch.Tensor, _: None, out: torch.Tensor) -> None:
        asked.append((first.data_ptr(), second.data_ptr(), out.data_ptr()))

    count = len(bench.operands(LAST))
    assert count * 9 * 2**20 >= COLD
    for _ in range(2 * count):
        bench.run(kernel)
    large = {Direction.FORWARD: (0, 2), Direction.INPUT_GRADIENT: (0, 2), Direction.WEIGHT_GRADIENT: (0, 1)}
    for place in large[direction]:
        assert len({own[place] for own in asked[:count]}) == count
    read = [place for place in large[direction] if place < 2]
    assert [[own[place] for place in read] for own in asked[:count]] == [
        [own[place] for place in read] for own in asked[count:]
    ]


def test_a_gain_that_other_tensors_do_not_confirm_is_none(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ConvBench] = []

    def compare(bench: ConvBench, kernel: object, seconds: float, least: int = 3, rival: object = None) -> Timing:
        asked.append(bench)
        speedup = 2.0 if bench is asked[0] else 0.7
        return Timing(1.0, speedup, speedup, 3)

    monkeypatch.setattr(ConvBench, "compare", compare)
    monkeypatch.setattr(ConvBench, "stock", property(lambda self: self.instead))
    (found,) = tune(FORWARD, 600.0, trials=1, builder=builder)
    assert found.stock_ms / found.ms == pytest.approx(0.7), "two that agree on the same tensors are no confirmation"
    assert not found.clear
    assert len({id(bench) for bench in asked}) == 2


@pytest.mark.parametrize(
    "text", ["2x3x7x6 k3x5 s1x1 p1x2 d1x1", "1x2x9x9 k3x3 s2x2 p0x1 d1x2", "2x1x5x5 k5x5 s1x2 p4x3 d1x1"]
)
def test_the_reference_is_torchs_in_float64(text: str) -> None:
    shape = ConvShape.parse(text)
    image = torch.randn(shape.batch, shape.channels, shape.height, shape.width, dtype=torch.float64)
    weight = torch.randn(shape.channels, 1, *shape.kernel, dtype=torch.float64)
    image.requires_grad_()
    weight.requires_grad_()
    sizes = (shape.stride, shape.padding, shape.dilation, shape.channels)
    out = torch.nn.functional.conv2d(image, weight, None, *sizes)
    gradient = torch.randn_like(out)
    expected = dict(zip(Direction, (out, *torch.autograd.grad(out, (image, weight), gradient)), strict=True))
    for direction in Direction:
        got = reference(shape, direction, image.detach(), gradient, weight.detach())
        torch.testing.assert_close(got, expected[direction].detach())


def test_an_error_of_nan_is_no_small_one() -> None:
    bench = ConvBench(SHAPE, Direction.FORWARD, LAST)

    def poison(first: int, second: int, third: int, out: int, *rest: int) -> None:
        ctypes.c_float.from_address(out).value = math.nan

    assert math.isinf(bench.error(TunedKernel(((poison, 1),), 0, 4, 1)))
