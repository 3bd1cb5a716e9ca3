"""Draws the picture of two-level tiling in docs/kernels.md, from the schedules' own numbers.

python scripts/tiling_picture.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from hybridpar.tvm_kernels.cuda_space import bank_conflicts, lane_addresses  # noqa: E402
from hybridpar.tvm_kernels.schedules.cuda import Tile, Tiling  # noqa: E402
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout  # noqa: E402

SHAPE = ConvShape.parse("1x8x64x256 k3x3 s1x1 p1x1 d1x1")
#: Threads that are drawn, of the 32 of a row.
DRAWN = 8


def on_gpu(columns: int, virtual: int) -> list[str]:
    """Which thread computes which columns of a block's tile, and which banks a warp reads at once."""
    tile = Tile(1, 1, 32, 8, virtual, columns, 2, 0)
    tiling = Tiling(SHAPE, Direction.FORWARD, Layout.CONTIGUOUS, "float32", tile)
    across = [column // columns % 32 for column in range(tiling.block[1])]
    drawn = "".join(str(thread) if thread < DRAWN else "." for thread in across)
    banks = [address // 4 % 32 for address in lane_addresses(tiling)[:DRAWN]]
    return [
        f"  columns={columns}, virtual={virtual}",
        f"    thread of each column   {drawn}",
        f"    banks of threads 0 to {DRAWN - 1}  {' '.join(map(str, banks))} ...: "
        f"{bank_conflicts(tiling):.0f} access(es) of shared memory for a read of a warp",
    ]


def on_cpu(rows: int, columns: int, strip: int) -> list[str]:
    """Which register tile computes which pixels of a strip."""
    names = "ABCDEFGHIJKLMNOP"
    width = 16 // columns
    lines = ["".join(names[row // rows * width + column // columns] for column in range(16)) for row in range(strip)]
    return [f"    {'strip' if row == 0 else '     '}  {line}" for row, line in enumerate(lines)]


def picture() -> str:
    """The picture as text."""
    return "\n".join(
        [
            "GPU: a row of the tile of one block (first level), and who computes what in it (second level)",
            *on_gpu(2, 1),
            *on_gpu(1, 2),
            "CPU: a strip of 4 rows (first level); each letter is a tile in registers (second level),",
            "tile_rows=2, tile_columns=4, and as many channels side by side as `lanes` says",
            *on_cpu(2, 4, 4),
        ]
    )


if __name__ == "__main__":
    print(picture())
