"""Shows what the second level of tiling is worth on a GPU: virtual threads, and phases that lie apart. A part of the
pack `kernels` of `scripts/gpu_check.py`, whose `--prebuild` compiles it.

A block's tile is the same in every row: `columns` results side by side in a thread, `virtual` times, are 4. With one
virtual thread a thread has all 4 side by side, so that neighbouring threads begin 4 columns apart, and a warp's lanes
wait for each other's banks of shared memory. With 4, each has a result in four places. At stride 2 every other column
is read; where phases lie apart in shared memory, columns that are read together lie side by side.

Conflicts are predicted from the schedule's own index expressions: accesses of shared memory for each one without.
Rows are added to `tiling.csv`, times as medians of alternating pairs against one virtual thread.
"""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.rig.records import append_dicts
from hybridpar.codegen.compile_pool import Builder
from hybridpar.tvm_kernels.conv_bench import ConvBench
from hybridpar.tvm_kernels.cuda_kernel import CudaVariant, compile_unspilled, load_cubin
from hybridpar.tvm_kernels.cuda_space import bank_conflicts
from hybridpar.tvm_kernels.database import most_error
from hybridpar.tvm_kernels.machine import KNOWN
from hybridpar.tvm_kernels.measure import time_pairs
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout
from hybridpar.tvm_kernels.space import reject
from scripts.gpu_common import Pack

LIST = "tiling.jsonl"
SECONDS = 0.1

#: Layers of MobileNetV2 with the threads of a block along columns: one with stride 1, and one with stride 2, whose
#: phases may lie apart.
SHAPES = {"64x32x112x112 k3x3 s1x1 p1x1 d1x1": 32, "64x96x112x112 k3x3 s2x2 p1x1 d1x1": 16}
DIRECTIONS = Direction.FORWARD, Direction.WEIGHT_GRADIENT
#: Columns of a thread and how often it has them: the same tile.
SPLITS = (4, 1), (2, 2), (1, 4)


@dataclass(frozen=True)
class Case:
    """A row of the table: a kernel, and whether its phases lie apart."""

    shape: str
    direction: Direction
    columns: int
    virtual: int
    apart: bool

    @property
    def key(self) -> KernelKey:
        """What it computes, on a GPU of any kind."""
        shape = ConvShape.parse(self.shape)
        return KernelKey(self.direction, shape, Layout.CONTIGUOUS, 1, KNOWN["h100"].fingerprint)

    @property
    def variant(self) -> CudaVariant:
        """The kernel."""
        common = {"vector": 1, "threads_c": 1, "threads_x": SHAPES[self.shape], "threads_y": 8, "rows": 2, "pad": 0}
        further = {"tap_rows": 3, "split_k": 64} if self.direction is Direction.WEIGHT_GRADIENT else {"hold_taps": 1}
        parameters = common | further | {"columns": self.columns, "virtual": self.virtual, "phases": int(self.apart)}
        return CudaVariant(self.key, parameters)

    @property
    def phases(self) -> str:
        """How its phases lie, in a word."""
        return "apart" if self.apart else "mixed"

    @property
    def file(self) -> str:
        """The name of its machine code."""
        return f"{self.shape.partition(' ')[0]}-{self.direction}-{self.virtual}-{self.phases}.cubin"


def cases() -> list[Case]:
    """Every case; phases lie apart or not only where there are several."""
    return [
        Case(shape, direction, columns, virtual, apart)
        for shape, direction, (columns, virtual), apart in itertools.product(SHAPES, DIRECTIONS, SPLITS, (True, False))
        if apart or " s2x2 " in shape
    ]


def prebuild(folder: Path, architecture: str) -> None:
    """Compile all cases, with TVM."""
    folder.mkdir(parents=True, exist_ok=True)
    with Builder(1) as builder, (folder / LIST).open("w") as file:
        for case in cases():
            variant = case.variant
            if reason := reject(case.key, variant.parameters):
                raise SystemExit(f"{case}: {reason}")
            conflicts = bank_conflicts(variant.tiling)
            (folder / case.file).write_bytes(compile_unspilled(builder.build(variant.request).image, architecture))
            file.write(json.dumps({"file": case.file, "conflicts": conflicts}) + "\n")
            print(case.file, f"{conflicts:.2f}", flush=True)


def measure(pack: Pack, folder: Path) -> bool:
    """Check and time all cases that were compiled, and add rows to the table; whether none was wrong."""
    device, index = pack.device, pack.device.index or 0
    notes = [json.loads(line) for line in (folder / LIST).read_text().splitlines()]
    conflicts = {note["file"]: float(note["conflicts"]) for note in notes}
    wrong = 0
    for key, group in itertools.groupby(cases(), key=lambda case: case.key):
        chosen = [case for case in group if case.file in conflicts]
        if not chosen or not pack.has_time_for(f"tiling of {key.shape.text}, {key.direction}"):
            continue
        bench = ConvBench(key, 0, device)
        kernels = {case: load_cubin(case.variant, (folder / case.file).read_bytes(), index) for case in chosen}
        for case, kernel in kernels.items():
            baseline = kernels[replace(case, columns=4, virtual=1)]
            error = bench.error(kernel)
            wrong += error > most_error(key.direction)
            calls = functools.partial(bench.run, kernel), functools.partial(bench.run, baseline)
            pairs = time_pairs(*calls, SECONDS, 9, device=device)
            row = pack.facts() | {
                "shape": key.shape.text,
                "direction": str(key.direction),
                "layout": "contiguous",
                "dtype": "float32",
                "columns": case.columns,
                "virtual": case.virtual,
                "phases": case.phases,
                "conflicts": f"{conflicts[case.file]:.3f}",
                "ms": f"{pairs.ms:.5f}",
                "time_over_one_virtual": f"{pairs.ms / pairs.stock_ms:.3f}",
                "error": f"{error:.2e}",
            }
            append_dicts(pack.out / "tiling.csv", [row])
            print(*row.values(), flush=True)
    return not wrong
