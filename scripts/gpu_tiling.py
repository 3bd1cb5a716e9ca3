"""Shows what the second level of tiling is worth on a GPU: virtual threads, and phases that lie apart.

    python scripts/gpu_tiling.py --prebuild DIR --gpu h100    # anywhere with TVM: compile
    python scripts/gpu_tiling.py --prebuilt DIR               # with a GPU; needs neither TVM nor a compiler

A block's tile is the same in every row: `columns` results side by side in a thread, `virtual` times, are 4. With one
virtual thread a thread has all 4 side by side, so that neighbouring threads begin 4 columns apart, and a warp's lanes
wait for each other's banks of shared memory. With 4, each has a result in four places. At stride 2 every other column
is read; where phases lie apart in shared memory, columns that are read together lie side by side.

Conflicts are predicted from the schedule's own index expressions: accesses of shared memory for each one without.
Rows are added to `benchmarks/gpu/results/tiling.csv`, times as medians of alternating pairs against one virtual thread.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.rig.records import append_dicts  # noqa: E402
from benchmarks.rig.rows import commit, now  # noqa: E402
from hybridpar.codegen.compile_pool import Builder  # noqa: E402
from hybridpar.tvm_kernels.conv_bench import ConvBench  # noqa: E402
from hybridpar.tvm_kernels.cuda_kernel import CudaVariant, compile_unspilled, load_cubin  # noqa: E402
from hybridpar.tvm_kernels.cuda_space import bank_conflicts  # noqa: E402
from hybridpar.tvm_kernels.database import most_error  # noqa: E402
from hybridpar.tvm_kernels.machine import KNOWN, gpu_at  # noqa: E402
from hybridpar.tvm_kernels.measure import time_pairs  # noqa: E402
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout  # noqa: E402
from hybridpar.tvm_kernels.space import reject  # noqa: E402

RESULTS = ROOT / "benchmarks" / "gpu" / "results" / "tiling.csv"
LIST = "tiling.jsonl"
NO_GPU = 3
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


def measure(folder: Path, path: Path) -> int:
    """Check and time all cases on the GPU of this machine, and add rows to the table."""
    device = torch.device("cuda", 0)
    gpu = gpu_at(0)
    notes = [json.loads(line) for line in (folder / LIST).read_text().splitlines()]
    conflicts = {note["file"]: float(note["conflicts"]) for note in notes}
    wrong = 0
    for key, group in itertools.groupby(cases(), key=lambda case: case.key):
        bench = ConvBench(key, 0, device)
        kernels = {case: load_cubin(case.variant, (folder / case.file).read_bytes(), 0) for case in group}
        for case, kernel in kernels.items():
            baseline = kernels[replace(case, columns=4, virtual=1)]
            error = bench.error(kernel)
            wrong += error > most_error(key.direction)
            calls = functools.partial(bench.run, kernel), functools.partial(bench.run, baseline)
            pairs = time_pairs(*calls, SECONDS, 9, device=device)
            row = {
                "date": now(),
                "commit": commit(),
                "device": gpu.name,
                "torch": torch.__version__,
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
            append_dicts(path, [row])
            print(*row.values(), flush=True)
    return 1 if wrong else 0


def main() -> int:
    """See the module header."""
    parser = argparse.ArgumentParser(description="Time virtual threads and phases of the depthwise kernels on a GPU.")
    parser.add_argument("--prebuild", type=Path, metavar="DIR", help="compile into DIR, and do nothing else")
    parser.add_argument("--gpu", choices=sorted(KNOWN), default="h100", help="what --prebuild compiles for")
    parser.add_argument("--prebuilt", type=Path, metavar="DIR", help="use machine code from DIR")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="the table that rows are added to")
    options = parser.parse_args()
    if options.prebuild is not None:
        prebuild(options.prebuild, KNOWN[options.gpu].architecture)
        return 0
    if options.prebuilt is None or not torch.cuda.is_available():
        print("there is no GPU here, or no --prebuilt: nothing was timed")
        return NO_GPU
    return measure(options.prebuilt, options.out)


if __name__ == "__main__":
    sys.exit(main())
