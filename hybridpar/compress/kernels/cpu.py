"""Loads the compiled kernels of a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.codegen.build import Function, load_kernels
from hybridpar.compress.codec import Residual
from hybridpar.compress.feedback import KeptResidual

_KERNELS = ("onebit", "twobit", "qsgd", "powersgd")
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

    def encode(self, name: str, values: Tensor, residual: Residual, *arguments: int | float) -> None:
        """Call the one of several encoders that keeps what the residual does."""
        if isinstance(residual, KeptResidual):
            kept, pending = residual.halves()
            way = "keep" if kept.dtype == torch.float32 else "short"
            self.functions[f"{name}_{way}"](
                values.data_ptr(), kept.data_ptr(), pending.data_ptr(), *arguments, residual.factor
            )
        else:
            self.functions[name](values.data_ptr(), 0, 0, *arguments)
