"""Measures how well the cost model ranks candidates for a kernel.

A search compiles only the candidates that the model ranks best, so its result depends on that ranking.

For some convolutions, in all directions and both layouts: the candidates that the model likes best and others drawn at
random are built and timed, each in pairs with the model's first choice, so that changes of the machine's speed cancel
out. Two numbers say how good the order is: Spearman's correlation of predicted cycles and time, over those drawn at
random; and the regret of k, by how much the best of the model's k best is slower than the best of all that were
measured.

Run from the root of the repository, on an idle machine, for about ten minutes; stopped, it goes on where it was:
    python -m benchmarks.kernels.ranking [--threads N] [--liked 8] [--drawn 14]
Appends to results/ranking_candidates.csv and writes results/ranking.csv. A busy machine is refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.rig.records import append_dicts, read_dicts, write_dicts
from hybridpar.codegen.build import Session
from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built
from hybridpar.errors import UsageError
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.families import candidates, estimate
from hybridpar.tvm_kernels.kernel import TunedKernel, Variant, load_image
from hybridpar.tvm_kernels.machine import cpu_fingerprint, this_machine
from hybridpar.tvm_kernels.measure import time_pairs
from hybridpar.tvm_kernels.record import most_error
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.tuner import BUILD_TIMEOUT

SHAPES = (
    "8x96x112x112 k3x3 s2x2 p1x1 d1x1",
    "8x144x56x56 k3x3 s1x1 p1x1 d1x1",
    "8x576x14x14 k3x3 s1x1 p1x1 d1x1",
    "8x240x28x28 k5x5 s1x1 p2x2 d1x1",
    "8x672x14x14 k5x5 s2x2 p2x2 d1x1",
    "8x768x7x7 k7x7 s1x1 p3x3 d1x1",
)
TOP = (1, 4, 8)
#: Seconds in which a candidate and the model's first choice are timed in turn.
GLANCE = 0.15
BUSY = 1.5

RESULTS = Path(__file__).parent / "results"
CANDIDATES, SUMMARY = RESULTS / "ranking_candidates.csv", RESULTS / "ranking.csv"
SETTING = ("device", "threads", "shape", "direction", "layout")
COLUMNS = (*SETTING, "parameters", "drawn", "cycles", "relative")
SUMMARY_COLUMNS = (*SETTING, "candidates", "correlation", *(f"regret_{k}" for k in TOP))

Parameters = Mapping[str, int]
Row = dict[str, str]


@dataclass(frozen=True)
class Ranking:
    """How well predictions order candidates.

    Attributes:
        candidates: How many were compared.
        correlation: Spearman's, 1 where the order is right; None for fewer than three.
        regret: By k: how much slower the best of the k best predicted is than the best of all.
    """

    candidates: int
    correlation: float | None
    regret: dict[int, float]


def rank(predicted: Sequence[float], measured: Sequence[float], top: Sequence[int] = (1, 4, 16)) -> Ranking:
    """Compare predictions with times; only their order matters.

    Args:
        predicted: Of each candidate.
        measured: Of each candidate.
        top: For which k the regret is told.
    """
    order = sorted(range(len(predicted)), key=lambda index: predicted[index])
    best = min(measured, default=0.0)
    regret = {k: min(measured[index] for index in order[:k]) / best - 1 for k in top if order}
    correlation = None
    if len(set(predicted)) > 1 and len(set(measured)) > 1 and len(predicted) > 2:
        correlation = statistics.correlation(_places(predicted), _places(measured))
    return Ranking(len(predicted), correlation, regret)


def _places(values: Sequence[float]) -> list[float]:
    """Place of each value in ascending order; equal ones share the middle of theirs."""
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


def chosen(
    space: Sequence[Parameters], cycles: Sequence[float], liked: int, drawn: int, seed: str
) -> list[tuple[Parameters, float, bool]]:
    """What is measured of a space: (parameters, cycles, whether drawn at random), the model's first choice first."""
    order = sorted(range(len(space)), key=lambda index: cycles[index])
    random_ones = set(random.Random(seed).sample(order, min(drawn, len(order))))
    picked = dict.fromkeys([*order[:liked], *sorted(random_ones)])
    return [(space[index], cycles[index], index in random_ones) for index in picked]


def summarize(rows: Iterable[Row]) -> Iterator[Row]:
    """A row per setting, and one of medians for each direction and layout."""
    settings: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        settings.setdefault(tuple(row[name] for name in SETTING), []).append(row)
    groups: dict[tuple[str, ...], list[Ranking]] = {}
    for setting, own in sorted(settings.items()):
        everything = rank([float(row["cycles"]) for row in own], [float(row["relative"]) for row in own], TOP)
        at_random = [row for row in own if row["drawn"] == "1"]
        by_chance = rank([float(row["cycles"]) for row in at_random], [float(row["relative"]) for row in at_random])
        found = Ranking(everything.candidates, by_chance.correlation, everything.regret)
        groups.setdefault((*setting[:2], *setting[3:]), []).append(found)
        yield _line(setting, found.candidates, found.correlation, found.regret)
    for (device, threads, *rest), found_all in sorted(groups.items()):
        correlations = [one.correlation for one in found_all if one.correlation is not None]
        regrets = {k: statistics.median(one.regret[k] for one in found_all) for k in TOP}
        correlation = statistics.median(correlations) if correlations else None
        count = sum(one.candidates for one in found_all)
        yield _line((device, threads, "median", *rest), count, correlation, regrets)


def _line(setting: Sequence[str], count: int, correlation: float | None, regret: Mapping[int, float]) -> Row:
    told = "" if correlation is None else f"{correlation:.3f}"
    values = (*setting, str(count), told, *(f"{regret[k]:.3f}" for k in TOP))
    return dict(zip(SUMMARY_COLUMNS, values, strict=True))


class Settings:
    """Measures one convolution, direction and layout after the other, and keeps each candidate at once.

    Args:
        threads: That a call may use.
        liked: How many of the model's best are measured.
        drawn: How many are drawn at random.
        output: Table of candidates, appended to.
    """

    def __init__(self, threads: int, liked: int, drawn: int, output: Path = CANDIDATES) -> None:
        self.threads, self.liked, self.drawn, self.output = threads, liked, drawn, output
        self.done = {tuple(row[name] for name in COLUMNS[:6]) for row in read(output)}

    def run(self, shapes: Iterable[str], builder: Builder) -> None:
        """Measure all that has not been."""
        for text, direction, layout in itertools.product(shapes, Direction, Layout):
            self._setting(ConvShape.parse(text), direction, layout, builder)

    def _setting(self, shape: ConvShape, direction: Direction, layout: Layout, builder: Builder) -> None:
        machine = this_machine()
        space = list(candidates(shape, direction, layout, self.threads, machine))
        cycles = [estimate(shape, direction, one, self.threads, machine, layout).cycles for one in space]
        setting = (cpu_fingerprint(), str(self.threads), shape.text, str(direction), str(layout))
        picked = chosen(space, cycles, self.liked, self.drawn, shape.text)
        left = [one for one in picked if (*setting, _text(one[0])) not in self.done]
        if not left:
            return
        session, bench = Session(), ConvBench(shape, direction, layout, self.threads)
        first = picked[0][0]
        variants = [Variant(shape, direction, layout, one) for one in (first, *(one for one, _, _ in left))]
        building = [builder.submit(variant.request) for variant in variants]
        reference = self._kernel(variants[0], building[0], session, bench)
        if reference is None:
            raise UsageError(f"the model's first choice for {shape.text} {direction} {layout} cannot be used: {first}")
        for (parameters, cost, at_random), variant, built in zip(left, variants[1:], building[1:], strict=True):
            kernel = self._kernel(variant, built, session, bench)
            if kernel is None:
                continue
            relative = self._relative(bench, kernel, reference)
            values = (*setting, _text(parameters), str(int(at_random)), f"{cost:.0f}", f"{relative:.4f}")
            append_dicts(self.output, [dict(zip(COLUMNS, values, strict=True))])
        print(shape.text, direction, layout, len(left), file=sys.stderr, flush=True)

    def _relative(self, bench: ConvBench, kernel: TunedKernel, reference: TunedKernel) -> float:
        """How many times as long as the reference a kernel takes."""
        bench.run(kernel), bench.run(reference)
        timing = time_pairs(
            lambda: bench.run(kernel), lambda: bench.run(reference), GLANCE, least=7, threads=self.threads
        )
        return 1 / timing.speedup

    def _kernel(self, variant: Variant, built: Future[Built], session: Session, bench: ConvBench) -> TunedKernel | None:
        """The kernel, or None where it cannot be built."""
        try:
            found = built.result()
        except KernelsUnavailable as error:
            print(f"{variant.shape.text} {dict(variant.parameters)}: {error}", file=sys.stderr)
            return None
        kernel = load_image(variant, found, session, self.threads)
        error_found = bench.error(kernel)
        if error_found > most_error(variant.direction):
            raise UsageError(f"{variant.shape.text} {variant.direction} {dict(variant.parameters)} is wrong")
        return kernel


def _text(parameters: Parameters) -> str:
    return json.dumps(dict(sorted(parameters.items())))


def read(path: Path) -> list[Row]:
    """The rows of a table; none where there is no such file. A last line that was cut off is taken away."""
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
    return read_dicts(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--liked", type=int, default=max(TOP))
    parser.add_argument("--drawn", type=int, default=14)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    options = parser.parse_args()
    if os.getloadavg()[0] > BUSY:
        raise UsageError(
            f"the load average is {os.getloadavg()[0]:.1f}",
            "Numbers of a busy machine say nothing about the model.",
            "Measure when it is idle.",
        )
    torch.set_num_threads(options.threads)
    with Builder(1, BUILD_TIMEOUT) as builder:
        Settings(options.threads, options.liked, options.drawn).run(options.shapes, builder)
    rows = list(summarize(read(CANDIDATES)))
    write_dicts(SUMMARY, rows)
    for row in rows:
        print(*row.values())


if __name__ == "__main__":
    main()
