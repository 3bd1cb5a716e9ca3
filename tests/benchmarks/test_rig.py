"""Tests the arithmetic that all benchmarks share: rounds, system load, ratios with bootstrap intervals, verdicts."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.rig import load
from benchmarks.rig import paired as paired_module
from benchmarks.rig.launch import launch
from benchmarks.rig.network import Network
from benchmarks.rig.paired import balanced_orders, paired
from benchmarks.rig.stats import Ratio, bootstrap_ratio, verdict

# ---------------------------------------------------------------------------------------------------- statistics


def test_what_slows_a_whole_round_down_cancels() -> None:
    mood = np.random.default_rng(0).uniform(1, 10, size=25)
    ratio = bootstrap_ratio(list(3 * mood), list(4 * mood))
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((0.75, 0.75, 0.75))


def test_bootstrap_is_seeded_and_keeps_the_median_of_the_ratios() -> None:
    generator = np.random.default_rng(1)
    times, over = generator.uniform(1, 2, 201), generator.uniform(1, 2, 201)
    ratio = bootstrap_ratio(list(times), list(over), seed=3)
    assert ratio.median == statistics.median(a / b for a, b in zip(times, over, strict=True))
    assert ratio.low < ratio.median < ratio.high
    assert bootstrap_ratio(list(times), list(over), seed=3) == ratio
    assert len({bootstrap_ratio(list(times), list(over), seed=seed) for seed in range(8)}) > 1


@pytest.mark.parametrize(
    ("low", "high", "target", "word"),
    [
        (0.80, 0.90, None, "faster"),
        (0.99, 1.03, None, "parity"),
        (0.99, 1.04, None, "unclear"),
        (1.01, 1.02, None, "slower"),
        (0.30, 0.33, 0.33, "met"),
        (0.30, 0.34, 0.33, "met"),
        (0.34, 0.40, 0.33, "missed"),
    ],
)
def test_verdict(low: float, high: float, target: float | None, word: str) -> None:
    ratio = Ratio((low + high) / 2, low, high)
    assert verdict(ratio, target) == word
    assert verdict(ratio, target, loaded=True) == "loaded"


# ---------------------------------------------------------------------------------------------------- paired runs


class Machine:
    """A machine with its own clock: what runs on it takes as long as it says, whatever the real one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.ranks = self.others = self.visible = 0.0
        self.foreign = 0.0
        self.seen: float | None = None
        self.calls: list[str] = []
        for module in (paired_module, load):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(load, "busy_seconds", lambda: self.ranks + self.others)
        monkeypatch.setattr(load, "process_seconds", lambda: self.ranks + self.visible)
        monkeypatch.setattr(load, "own_seconds", lambda: self.ranks)

    def work(self, name: str, seconds: float) -> None:
        self.calls.append(name)
        self.now += seconds
        self.ranks += seconds
        self.others += self.foreign * seconds
        self.visible += (self.foreign if self.seen is None else self.seen) * seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_times_and_ratios_of_an_idle_machine(machine: Machine) -> None:
    result = paired({"a": lambda: machine.work("a", 0.3), "b": lambda: machine.work("b", 0.6)})
    assert (result.rounds, result.dropped, result.loaded) == (20, 0, False)
    assert result.load == pytest.approx(0, abs=1e-9)
    assert result.median_ms("a") == pytest.approx(300)
    assert result.min_ms("b") == pytest.approx(600)
    assert result.ratio("a", "b").median == pytest.approx(0.5)
    assert Counter(machine.calls) == {"a": 23, "b": 23}


def test_every_method_comes_at_every_position_equally_often_and_orders_change() -> None:
    orders = list(itertools.islice(balanced_orders(["a", "b", "c"], seed=0), 30))
    for first in range(0, 30, 3):
        for position in range(3):
            assert {order[position] for order in orders[first : first + 3]} == {"a", "b", "c"}
    assert len({tuple(order) for order in orders}) == 6
    assert list(itertools.islice(balanced_orders(["c", "a", "b"], seed=0), 30)) == orders
    assert list(itertools.islice(balanced_orders(["a", "b", "c"], seed=1), 30)) != orders


def test_busy_rounds_are_dropped_and_taken_again(machine: Machine) -> None:
    def step() -> None:
        # Somebody else works during rounds 5 to 9 after the warm-up, which also slows this method down.
        machine.foreign = 0.5 if 8 <= len(machine.calls) < 13 else 0.1
        machine.work("a", 2.0 if machine.foreign > 0.15 else 1.0)

    result = paired({"a": step}, 20, warmup=3)
    assert (result.rounds, result.dropped, result.loaded) == (20, 5, False)
    assert result.milliseconds["a"] == pytest.approx([1000.0] * 20)
    assert result.load == pytest.approx(0.1)
    assert len(machine.calls) == 28


TWO_RANKS = """
import json, sys, time
import torch, torch.distributed as dist
from benchmarks.rig.paired import paired
from benchmarks.rig.rank import process_group

with process_group() as (rank, ranks):
    # Were the orders different, these collectives would meet each other and fail: their sizes differ.
    def exchange(size):
        tensor = torch.ones(size)
        return lambda: (tensor.fill_(1), dist.all_reduce(tensor), time.sleep(0.02 * rank))
    names = ["a", "b", "c"] if rank == 0 else ["c", "b", "a"]
    result = paired({name: exchange(1000 * (ord(name) - 96)) for name in names}, 20, keep_busy=True)
    every = [None] * ranks
    dist.all_gather_object(every, {name: result.milliseconds[name] for name in "abc"})
    if rank == 0:
        print(json.dumps({"same": every[0] == every[1], "rounds": result.rounds, "least": result.min_ms("a")}))
"""


def test_two_ranks_agree_on_order_and_on_the_slowest_time(tmp_path: Path) -> None:
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(TWO_RANKS)
    with Network(2) as network, output.open("w") as file:
        launch([str(script)], network, timeout=120, stdout=file)
    answer = json.loads(output.read_text())
    assert answer["same"]
    assert answer["rounds"] == 20
    assert answer["least"] >= 20  # rank 1 sleeps for 20 ms in every step, and the slowest rank is what counts
