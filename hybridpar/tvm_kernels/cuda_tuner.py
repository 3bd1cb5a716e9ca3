"""Why: on a machine with a GPU its kernels are measured; on one without, what the model likes best is compiled ahead.

`tune_cuda` searches as `tuner.tune` does on a CPU: the model's best, some drawn at random, then neighbours of the
fastest until the time is up, and the finalists once more. `compile_all` leaves compiled candidates, in the model's
order, as records without a time, which are never chosen to run.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.codegen.compile_pool import Builder, Built
from hybridpar.machine.process import available_cores
from hybridpar.tvm_kernels.candidates import neighbours
from hybridpar.tvm_kernels.cuda_cost import estimate
from hybridpar.tvm_kernels.cuda_device import Gpu, gpu_at
from hybridpar.tvm_kernels.cuda_kernel import Compiled, CudaKernel, CudaVariant, compile_source, load_cubin
from hybridpar.tvm_kernels.cuda_measure import CudaBench
from hybridpar.tvm_kernels.cuda_space import candidates
from hybridpar.tvm_kernels.database import Database, KernelKey, KernelRecord, append_records, read_database
from hybridpar.tvm_kernels.device import installed_versions
from hybridpar.tvm_kernels.measure import steady_timing
from hybridpar.tvm_kernels.record import is_right
from hybridpar.tvm_kernels.search import Progress, SearchReport
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.standings import Standings, Tuned, TuningStopped, key_of
from hybridpar.tvm_kernels.tuner import BUILD_TIMEOUT

_log = logging.getLogger(__name__)

#: Candidates that are left for a convolution that cannot be measured.
KEPT = 3
_LIKED, _DRAWN, _FINALISTS = 8, 3, 3
_GLANCE, _LONGEST, _FINAL = 0.05, 0.5, 0.15


@dataclass(frozen=True)
class Ranked:
    """Parameters, and the seconds that the model says."""

    parameters: dict[str, int]
    seconds: float


def ranked(shape: ConvShape, direction: Direction, layout: Layout, dtype: str, gpu: Gpu) -> list[Ranked]:
    """The space in the model's order.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        layout: Of the images.
        dtype: Of all tensors.
        gpu: That it is for.
    """
    found = [
        Ranked(one, estimate(shape, direction, layout, dtype, one, gpu).seconds)
        for one in candidates(shape, direction, layout, dtype, gpu)
    ]
    return sorted((one for one in found if one.seconds < float("inf")), key=lambda one: one.seconds)


# ------------------------------------------------------------------------------------------------------ without a GPU


def compile_all(
    keys: Iterable[KernelKey],
    path: Path,
    seconds: float,
    *,
    gpu: Gpu,
    again: bool = False,
    seed: int = 0,
    trials: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    builder: Builder | None = None,
) -> SearchReport:
    """Compile the model's best candidates, and append records of them without a time to a database.

    Args:
        keys: The convolutions.
        path: The database; machine code goes to a directory of the same name with `.cubins`.
        seconds: Time for all of it; what was begun is finished.
        gpu: That it is for.
        again: Compile also where there is a record.
        seed: Not used; nothing is drawn.
        trials: At most so many candidates for each.
        on_progress: Called at the start of each.
        builder: Writes the sources; None for one of this call's own.

    Raises:
        UsageError: The database cannot be read or written.
        KernelsUnavailable: Nothing can be compiled on this machine.
    """
    del seed
    keys = list(dict.fromkeys(keys))
    database = read_database(path) if path.exists() else Database(str(path))
    known = {record.key for record in database.records if record.current}
    todo = [key for key in keys if again or key not in known]
    report = SearchReport(skipped=len(keys) - len(todo))
    end = time.monotonic() + seconds
    own = builder or Builder(len(available_cores()), BUILD_TIMEOUT)
    try:
        for place, key in enumerate(todo):
            if place and time.monotonic() > end:
                report.left = len(todo) - place
                break
            if on_progress is not None:
                on_progress(Progress(report.skipped + place, len(keys), key))
            records = list(_compiled(key, path, gpu, own, trials or KEPT))
            append_records(path, records)
            report.tuned += bool(records)
            report.empty += not records
    except KeyboardInterrupt:
        report.stopped, report.left = True, len(todo) - report.tuned - report.empty
    finally:
        if builder is None:
            own.close()
    return report


def _compiled(key: KernelKey, path: Path, gpu: Gpu, builder: Builder, count: int) -> Iterator[KernelRecord]:
    """Records of the best candidates that compile without keeping values in memory for want of registers."""
    folder = path.with_suffix(".cubins")
    found = failed = 0
    for one in ranked(key.shape, key.direction, key.layout, key.dtype, gpu):
        if found == count or failed > 2 * count + 4:
            break
        variant = CudaVariant(key.shape, key.direction, key.layout, key.dtype, one.parameters)
        try:
            code = _code(builder.build(variant.request), gpu.architecture)
        except KernelsUnavailable as error:
            failed += 1
            _log.info("%s %s %s: %s", key.direction, key.shape.text, one.parameters, error)
            if failed > 4 and not found:
                raise
            continue
        folder.mkdir(exist_ok=True)
        file = folder / f"{hashlib.sha256(code.code).hexdigest()[:24]}.cubin"
        file.write_bytes(code.code)
        found += 1
        item = 4 if key.dtype == "float32" else 2
        yield KernelRecord(
            direction=key.direction,
            shape=key.shape.text,
            dtype=key.dtype,
            layout=key.layout,
            device=key.device,
            threads=key.threads,
            versions=dict(installed_versions()),
            parameters=dict(one.parameters),
            align=16,
            ms=None,
            stock_ms=None,
            floor_ms=gpu.floor_ms(key.shape.multiply_adds, key.shape.least_bytes(key.direction) * item // 4),
            predicted_ms=1e3 * one.seconds,
            cubin=f"{folder.name}/{file.name}",
            tuned_at=time.time(),
        )


def _code(built: Built, architecture: str) -> Compiled:
    """Machine code that spills nothing.

    Raises:
        KernelsUnavailable: There is none.
    """
    found = compile_source(built.image.decode(), architecture)
    if found.spilled:
        raise KernelsUnavailable(f"a thread would keep {found.spilled} bytes in memory for want of registers")
    return found


# --------------------------------------------------------------------------------------------------------- with a GPU


def tune_cuda(
    shape: ConvShape,
    direction: Direction,
    layout: Layout,
    threads: int = 1,
    budget_s: float = 30.0,
    seed: int = 0,
    on_progress: Callable[[Tuned, Tuned], None] | None = None,
    *,
    known: Sequence[Mapping[str, int]] = (),
    trials: int | None = None,
    dtype: str = "float32",
    index: int = 0,
    builder: Builder | None = None,
    speed: object = None,
    bench: CudaBench | None = None,
) -> list[Tuned]:
    """Search for the fastest kernel of one direction of one convolution on a GPU.

    Args:
        shape: The convolution.
        direction: Which of its three directions.
        layout: Of the images.
        threads: Not used: of the CPU.
        budget_s: Seconds for all of it; at least one candidate is tried.
        seed: Of the data and of the random part of the search.
        on_progress: Called with each candidate that was measured and the best so far.
        known: Parameters that did well before, best first.
        trials: At most so many candidates; None for as many as there is time for.
        dtype: Of all tensors.
        index: Of the GPU, by torch's number.
        builder: Writes sources; None for one of this call's own.
        speed: Not used: of the CPU.
        bench: Checks and times; None for one on that GPU.

    Returns:
        All that were measured, best first: finalists before others.

    Raises:
        TuningStopped: On KeyboardInterrupt, with what there is.
        KernelsUnavailable: Nothing at all can be built or loaded on this machine.
    """
    del threads, speed
    own = builder or Builder(len(available_cores()), BUILD_TIMEOUT)
    bench = bench or CudaBench(shape, direction, layout, dtype, torch.device("cuda", index), seed)
    search = _Search(bench, gpu_at(index), index, own, random.Random(seed), on_progress)
    try:
        search.run(time.monotonic() + budget_s, budget_s, known, trials)
    except KeyboardInterrupt:
        raise TuningStopped(search.sorted()) from None
    finally:
        if builder is None:
            own.close()
    return search.sorted()


class _Search(Standings[CudaKernel]):
    """One search."""

    def __init__(
        self,
        bench: CudaBench,
        gpu: Gpu,
        index: int,
        builder: Builder,
        draw: random.Random,
        on_progress: Callable[[Tuned, Tuned], None] | None,
    ) -> None:
        self.bench, self.gpu, self.index, self.builder, self.random = bench, gpu, index, builder, draw
        found = ranked(bench.shape, bench.direction, bench.layout, bench.dtype, gpu)
        self.space = [one.parameters for one in found]
        super().__init__({key_of(one.parameters): one.seconds for one in found}, on_progress)

    def run(self, end: float, budget: float, known: Sequence[Mapping[str, int]], trials: int | None) -> None:
        """Measure until the time is up."""
        stop, allowed = end - _FINAL * budget, trials or len(self.space)
        ahead: list[tuple[dict[str, int], Future[Built]]] = []
        for one in self._proposals(known):
            if len(self.asked) >= allowed or (self.results and time.monotonic() > stop):
                break
            self.asked.add(key_of(one))
            ahead.append((one, self.builder.submit(self._variant(one).request)))
            if len(ahead) > len(available_cores()):
                self._take(*ahead.pop(0))
        for parameters, future in ahead:
            if not self.results or time.monotonic() < stop:
                self._take(parameters, future)
            else:
                future.cancel()
        self._finals(end)

    def _variant(self, parameters: Mapping[str, int]) -> CudaVariant:
        bench = self.bench
        return CudaVariant(bench.shape, bench.direction, bench.layout, bench.dtype, parameters)

    def _proposals(self, known: Sequence[Mapping[str, int]]) -> Iterator[dict[str, int]]:
        """What to try, in order; what is best so far decides what comes next."""
        fresh = {key_of(one): one for one in self.space}
        drawn = self.random.sample(self.space, min(_DRAWN, len(self.space)))
        self.drawn = {key_of(one) for one in drawn}
        wanted: list[Mapping[str, int]] = [*known[:_FINALISTS], *self.space[:_LIKED], *drawn]
        while len(self.asked) < len(self.space):
            for one in wanted:
                if key_of(one) in fresh and key_of(one) not in self.asked:
                    yield fresh[key_of(one)]
            best = [self.results[one].parameters for one in self.fastest(_FINALISTS)]
            near = [other for one in best for other in neighbours(one, self.space)]
            near = [one for one in near if key_of(one) not in self.asked]
            near.sort(key=lambda one: self.predicted[key_of(one)])
            left = [one for one in self.space if key_of(one) not in self.asked]
            wanted = [*(near[:4] or left[:1])]

    def _take(self, parameters: Mapping[str, int], future: Future[Built]) -> None:
        """Wait for a source, compile, load, check and measure it."""
        try:
            code = _code(future.result(), self.gpu.architecture)
            kernel = load_cubin(self._variant(parameters), code.code, self.index)
        except (KernelsUnavailable, RuntimeError, OSError) as error:
            self.lose(f"{self.bench.direction} {self.bench.shape.text} {parameters}", error)
            return
        error_found, stock_error = self.bench.error(kernel), self.bench.stock_error
        if not is_right(error_found, self.bench.direction, self.bench.dtype, stock_error):
            _log.warning(
                "%s %s %s is wrong by %.1e", self.bench.direction, self.bench.shape.text, parameters, error_found
            )
            return
        timing = self.bench.compare(kernel, _GLANCE)
        shape, item = self.bench.shape, 4 if self.bench.dtype == "float32" else 2
        floor = self.gpu.floor_ms(shape.multiply_adds, shape.least_bytes(self.bench.direction) * item // 4)
        key = key_of(parameters)
        self.kernels[key] = kernel
        self.note(key, self.measured(parameters, timing, floor, error_found, stock_error))

    def _finals(self, end: float) -> None:
        """Time the fastest once more, as long as there is time, in turn, until two comparisons agree."""
        best = self.fastest(_FINALISTS)
        for place, key in enumerate(best):
            left = max(0.0, end - time.monotonic()) / (len(best) - place)
            compare = partial(self.bench.compare, self.kernels[key], min(left, _LONGEST) / 2, least=9)
            self.note(key, self.finish(key, steady_timing(compare)))
