"""Tests searches of one key and of all: wrong kernels, what fails, how time is divided, what is recorded."""

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

from benchmarks.kernels.common import torchs_ways
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built, Request
from hybridpar.errors import UsageError
from hybridpar.tvm_kernels import measure
from hybridpar.tvm_kernels.choice import Choices, use_choices
from hybridpar.tvm_kernels.conv_bench import COLD, ConvBench
from hybridpar.tvm_kernels.database import Database, KernelRecord, read_database
from hybridpar.tvm_kernels.kernel import TunedKernel, Variant
from hybridpar.tvm_kernels.machine import Machine, cpu_fingerprint
from hybridpar.tvm_kernels.measure import Timing, summarize_pairs
from hybridpar.tvm_kernels.op import depthwise_conv2d
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from hybridpar.tvm_kernels.space import candidates, reject
from hybridpar.tvm_kernels.table import best_records, summary_lines, table_of
from hybridpar.tvm_kernels.tune import KEPT, Progress, search_all, tune
from tests.tvm_kernels.standin import key_of, record_of

LAST = Layout.CHANNELS_LAST
SHAPE = ConvShape.parse("2x16x9x9 k3x3 s1x1 p1x1 d1x1")
FORWARD = key_of(SHAPE, Direction.FORWARD)


@pytest.mark.parametrize("direction", Direction)
def test_a_search_finds_kernels_that_are_right(direction: Direction, builder: Builder) -> None:
    seen: list[KernelRecord] = []
    key = key_of(SHAPE, direction)
    threads = torch.get_num_threads()
    results = tune(key, 600.0, trials=4, on_progress=seen.append, builder=builder)
    assert torch.get_num_threads() == threads
    assert len(results) == KEPT
    assert [one.ms for one in results] == sorted(one.ms for one in results)
    for one in results:
        assert one.key == key
        assert reject(key, one.parameters) is None
        assert one.error is not None
        assert one.error < 1e-5
    assert len({one.tuned_at for one in results}) == 1, "the fastest record of the newest search is taken"
    assert len(seen) == 4 + KEPT


def test_a_search_goes_on_from_what_is_known(builder: Builder) -> None:
    (first,) = tune(FORWARD, 0.0, builder=builder, seed=3)
    known = next(one for one in candidates(FORWARD) if one != first.parameters)
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


def test_a_wrong_kernel_is_never_timed(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(variant: Variant, *rest: object) -> TunedKernel:
        def nothing(*addresses: int) -> None:
            pass

        return TunedKernel(tuple((nothing, count, 1) for count in variant.work[0].values()), 0)

    monkeypatch.setattr(Variant, "load", shifted)
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
        variants = [Variant(record.key, record.parameters) for record in records]
        return [variant.load(builder.build(variant.request)) for variant in variants]

    shape = ConvShape.parse("2x9x10x21 k3x3 s2x2 p1x1 d1x1")
    found = [
        record_of(shape, direction, LAST, parameters=candidates(key_of(shape, direction), Machine(8, 16))[0])
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
    # Two pairs of four readings of the clock each, and one before and two after them: 10 s on 2 threads, 4 of waiting.
    timing = measure.time_pairs(int, int, 0.0, least=2, threads=2)
    assert timing.noise == pytest.approx(4 / (2 * 10 - 4))
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
        bench = ConvBench(key_of(SHAPE, direction))
        for way in (bench.instead, *torchs_ways(bench).values()):
            way()
        held = [weakref.ref(bench), weakref.ref(bench.arguments[0][0])]
        del bench, way
        assert [one() for one in held] == [None, None]
    finally:
        if enabled:
            gc.enable()


@pytest.mark.parametrize("direction", list(Direction))
def test_tensors_take_turns_so_that_none_is_in_a_cache(direction: Direction) -> None:
    bench = ConvBench(key_of("2x64x96x96 k3x3 s1x1 p1x1 d1x1", direction))  # two tensors of 4.5 MiB
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

    def compare(bench: ConvBench, kernel: object, seconds: float, least: int = 3) -> Timing:
        asked.append(bench)
        speedup = 2.0 if bench is asked[0] else 0.7
        return Timing(1.0, speedup, speedup, 3)

    monkeypatch.setattr(ConvBench, "compare", compare)
    (found,) = tune(FORWARD, 600.0, trials=1, builder=builder)
    assert found.stock_ms / found.ms == pytest.approx(0.7), "two that agree on the same tensors are no confirmation"
    assert not found.wins
    assert len({id(bench) for bench in asked}) == 2


def test_an_error_of_nan_is_no_small_one() -> None:
    bench = ConvBench(FORWARD)

    def poison(first: int, second: int, third: int, out: int, *rest: int) -> None:
        ctypes.c_float.from_address(out).value = math.nan

    assert math.isinf(bench.error(TunedKernel(((poison, 1, 1),), 0)))


# ------------------------------------------------------------------------------------------------------------- all keys

SHAPES = [f"{batch}x8x9x9 k3x3 s1x1 p1x1 d1x1" for batch in (2, 4)]
KEYS = [key_of(shape, direction) for shape in SHAPES for direction in Direction]


def evenly(keys: Sequence[KernelKey]) -> dict[KernelKey, float]:
    """As long a search for each, in this order."""
    return dict.fromkeys(keys, 1.0)


def measured(key: KernelKey, size: int, ms: float, **fields: Any) -> KernelRecord:
    return KernelRecord.of(key, {"tile": size}, **{"ms": ms, "stock_ms": 3.0, "error": 1e-7, "tuned_at": 9e9, **fields})


class Tuner:
    """Finds candidates at once, and remembers what it was asked."""

    def __init__(self, stop_at: int | None = None, empty: bool = False) -> None:
        self.asked: list[KernelKey] = []
        self.known: list[list[dict[str, int]]] = []
        self.budgets: list[float] = []
        self.stop_at, self.empty = stop_at, empty

    def __call__(self, key, seconds, seed, on_progress, *, known, trials, **shared):
        assert set(shared) == {"builder", "only"}
        assert (key.layout, key.threads, seed) == (Layout.CHANNELS_LAST, 1, 0)
        self.asked.append(key)
        self.known.append(known)
        self.budgets.append(seconds)
        found = [measured(key, size, 1.0 + size) for size in range(KEPT)]
        on_progress(found[0])
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        return [] if self.empty else found


def test_everything_is_searched_and_the_best_are_kept(tmp_path):
    tuner, told = Tuner(), list[Progress]()
    report = search_all(evenly(KEYS), tmp_path / "k.jsonl", 600.0, tuner=tuner, on_progress=told.append)
    assert (report.tuned, report.skipped, report.left, report.stopped) == (6, 0, 0, False)
    assert tuner.asked == KEYS
    read = read_database(tmp_path / "k.jsonl")
    assert set(read) == set(KEYS)
    assert len(read) == KEPT * len(KEYS)
    for key in KEYS:
        best = read.best(key)
        assert best is not None
        assert (best.ms, best.stock_ms, best.parameters) == (1.0, 3.0, {"tile": 0})
    assert [one.done for one in told if one.best is None] == list(range(6))
    assert tuner.budgets == pytest.approx([100.0 * 6 / (6 - place) for place in range(6)], rel=0.05)


def test_the_budget_goes_where_the_time_goes(tmp_path):
    tuner = Tuner()
    counts = {key: 1.0 + 3 * place for place, key in enumerate(KEYS)}
    report = search_all(counts, tmp_path / "k.jsonl", 600.0, tuner=tuner)
    assert report.tuned == 6
    order = sorted(KEYS, key=lambda key: -counts[key])
    assert tuner.asked == order
    # The stand-in takes no time, so each share is of all that was there at the beginning.
    left = [counts[key] / sum(counts[other] for other in order[place:]) for place, key in enumerate(order)]
    assert tuner.budgets == pytest.approx([600.0 * share for share in left], rel=0.05)


def test_a_search_begins_with_what_comes_with_the_package(tmp_path, monkeypatch):
    shipped = [
        record_of(SHAPES[0], Direction.FORWARD, Layout.CHANNELS_LAST, device="a like one", parameters={"tile": 5}),
        record_of(SHAPES[1], Direction.FORWARD, Layout.CHANNELS_LAST, parameters={"tile": 6}),
    ]
    monkeypatch.setattr("hybridpar.tvm_kernels.tune.packaged_records", lambda: shipped)
    tuner = Tuner()
    assert search_all(evenly(KEYS[:1]), tmp_path / "k.jsonl", 60.0, tuner=tuner).tuned == 1
    assert tuner.known[0] == [{"tile": 6}, {"tile": 5}], "of this device first"
    written = read_database(tmp_path / "k.jsonl")
    assert all(record.device == cpu_fingerprint() for record in written.records), "their times are not taken over"


def test_what_was_found_before_is_skipped_and_shows_where_to_begin(tmp_path):
    file = tmp_path / "k.jsonl"
    search_all(evenly(KEYS[:3]), file, 600.0, tuner=Tuner())
    tuner = Tuner()
    report = search_all(evenly(KEYS), file, 600.0, tuner=tuner)
    assert (report.tuned, report.skipped) == (3, 3)
    assert tuner.asked == KEYS[3:]
    assert all(known[0] == {"tile": 0} for known in tuner.known), "the same convolution of another batch is near"
    again = Tuner()
    assert search_all(evenly(KEYS), file, 600.0, tuner=again, again=True).tuned == 6
    assert len(again.asked) == 6


def test_a_tune_that_is_stopped_goes_on_later(tmp_path):
    file = tmp_path / "k.jsonl"
    report = search_all(evenly(KEYS), file, 600.0, tuner=Tuner(stop_at=4))
    assert (report.stopped, report.tuned, report.left) == (True, 3, 3)
    assert set(read_database(file)) == set(KEYS[:3])
    assert search_all(evenly(KEYS), file, 600.0, tuner=Tuner()).skipped == 3


def test_what_no_second_measurement_confirmed_is_not_recorded(tmp_path, caplog):
    def unsteady(key, *_, **__):
        first = measured(key, 1, 1.0, stock_ms=1.8, noise=0.9)
        steady = measured(key, 2, 2.0, noise=0.1, stock_error=2e-7)
        return [first] if key.direction is Direction.FORWARD else [first, steady]

    report = search_all(evenly(KEYS[:2]), tmp_path / "k.jsonl", 600.0, tuner=unsteady)
    assert (report.tuned, report.unsteady, report.empty, report.left) == (1, 1, 0, 0)
    (record,) = read_database(tmp_path / "k.jsonl").records
    assert (record.parameters, record.noise, record.stock_error) == ({"tile": 2}, 0.1, 2e-7)
    assert f"forward {SHAPES[0]}: measurements lay 90 % apart, so none is recorded" in caplog.text
    again = search_all(evenly(KEYS[:2]), tmp_path / "k.jsonl", 600.0, tuner=unsteady)
    assert again.skipped == 1, "what was not recorded is searched again"


def test_no_kernel_is_no_error(tmp_path):
    report = search_all(evenly(KEYS), tmp_path / "k.jsonl", 600.0, tuner=Tuner(empty=True))
    assert (report.tuned, report.empty) == (0, 6)


def test_a_budget_for_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="too short to try one candidate"):
        search_all(evenly(KEYS), tmp_path / "k.jsonl", 0.5, tuner=Tuner())
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ the table


def database() -> Database:
    one, two = SHAPES
    return Database(
        "",
        [
            record_of(one, Direction.FORWARD, Layout.CHANNELS_LAST, ms=1.0, stock_ms=4.0),
            record_of(two, Direction.FORWARD, Layout.CHANNELS_LAST, ms=2.0, stock_ms=1.0),
            record_of(one, Direction.INPUT_GRADIENT, Layout.CHANNELS_LAST, versions={"tvm": "0.1"}, error=None),
        ],
    )


def test_a_row_says_what_runs():
    records = best_records(database())
    rows = list(zip(*(column.cells for column in table_of(records).columns), strict=True))
    assert sorted(rows) == [
        (SHAPES[0], "forward", "1", "4.000", "1.000", "4.00x", "1.0e-07", "tuned"),
        (SHAPES[0], "input_gradient", "1", "2.000", "1.000", "2.00x", "", "stock, other versions"),
        (SHAPES[1], "forward", "1", "1.000", "2.000", "0.50x", "1.0e-07", "stock"),
    ]
    assert summary_lines(records)[0] == "forward: 1 of 2 tuned, 2.00x torch as chosen (geometric mean)"
