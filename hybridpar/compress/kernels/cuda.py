"""Loads and launches the compiled kernels of a CUDA device.

How many blocks there are follows from the number of values alone, so that sums come out the same on every GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

#: The kernels' source.
SOURCE = Path(__file__).with_name("codec.cu")

# As in the source.
THREADS = 256
MOST_PARTS = 512
MOST_PLACES = 896

#: Groups that a block encodes at a time where each is a warp's.
WARPS = THREADS // 32

#: Groups of up to so many values are encoded by a warp, longer ones by a block.
WARP_VALUES = 768

#: Blocks of a kernel that loops over what there is: enough to fill a GPU several times.
MOST_BLOCKS = 2048

#: Parts of sums of magnitudes, in float64, each with the largest behind it.
PARTS_ROOM = 2 * MOST_PARTS

_LAYOUT = "IIII"
_ENCODE = f"PPPP{_LAYOUT}IIII{4 * MOST_PLACES}s"
_READ = f"PPP{_LAYOUT}If"

#: What each kernel takes, in the format of `struct`.
PARAMETERS = {
    **dict.fromkeys(("onebit_encode_warp", "onebit_encode_block"), "PPPPPPIIf"),
    **dict.fromkeys(("onebit_decode", "onebit_add"), "PPPPII"),
    "twobit_magnitudes": "PPPIf",
    "twobit_codes": "PPPPPPIIffff",
    **dict.fromkeys(("twobit_decode", "twobit_add"), "PPPI"),
    "qsgd_scale": "PPI",
    **{f"qsgd_encode_{kind}": _ENCODE for kind in (8, 32, 64)},
    **{f"qsgd_{name}_{kind}": _READ for name in ("decode", "add") for kind in (8, 32, 64)},
}


class CudaKernels:
    """The kernels of one CUDA device."""

    #: Values that a tensor may have.
    most_values = (1 << 31) - 1

    def __init__(self, functions: Mapping[str, Callable[..., None]]) -> None:
        self.functions = functions

    def launch(self, kernel: str, blocks: int, *arguments: int | float | bytes) -> None:
        """Launch a kernel on the current stream; of no blocks there is nothing to launch."""
        if blocks:
            self.functions[kernel]((blocks, 1, 1), (THREADS, 1, 1), *arguments)
