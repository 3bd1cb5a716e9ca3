"""Loads the compiled kernels of a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.codegen.build import Function, load_kernels
from hybridpar.compress.memory import Memory, Residual

_KERNELS = ("onebit", "twobit", "qsgd", "factors")
_SOURCES = [Path(__file__).with_name(f"{name}_source.py") for name in _KERNELS]


class CpuKernels:
    """The kernels of this CPU."""

    #: Values that a tensor may have.
    most_values = (1 << 63) - 1

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self.functions = functions

    @classmethod
    def load(cls) -> CpuKernels | None:
        """Built if need be; None where there are none."""
        functions = load_kernels("codec", _SOURCES)
        return cls(functions) if functions else None

    def encode(self, name: str, values: Tensor, memory: Memory, *arguments: int | float) -> None:
        """Call the encoder that leaves what is not sent in the type of the residual, or nowhere."""
        kept, factor = (0, 0), 0.0
        if isinstance(memory, Residual):
            left, pending = memory.halves()
            name += "_keep" if left.dtype == torch.float32 else "_short"
            kept, factor = (left.data_ptr(), pending.data_ptr()), memory.factor
        self.functions[name](values.data_ptr(), *kept, *arguments, factor)
