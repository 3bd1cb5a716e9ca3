"""Compiles the generated source of depthwise convolutions for the CPU, many variants in one library.

Compiling each variant alone would take a second.

`emulated_kernels` compiles the sources of some variants together. The kernels that it returns are launched by
hybridpar's own launcher, and take addresses of the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from hybridpar.codegen import cuda_driver
from hybridpar.codegen.compile_pool import Builder
from hybridpar.codegen.cuda_driver import CudaFunction, CudaModule
from hybridpar.codegen.cuda_source import PRELUDE
from hybridpar.tvm_kernels.cuda_kernel import CudaKernel, CudaVariant
from tests.emulated import IMAGE, emulated_driver

#: All libraries of a process register their kernels in one table, so no name may come twice.
_NUMBERS = itertools.count()


class _Numbered:
    """A module in which each kernel's name ends with a number."""

    def __init__(self, module: CudaModule, number: int) -> None:
        self.module, self.number = module, number

    def function(self, name: str, parameters: str) -> CudaFunction:
        return self.module.function(f"{name}_of_{self.number}", parameters)


def write_sources(variants: Sequence[CudaVariant], builder: Builder) -> list[str]:
    """CUDA C of variants."""
    return [builder.build(variant.request).image.decode() for variant in variants]


def emulated_kernels(variants: Sequence[CudaVariant], sources: Sequence[str], folder: Path) -> list[CudaKernel]:
    """Variants that run on the CPU; skips where there is no compiler."""
    parts, names = [PRELUDE], []
    numbers = [next(_NUMBERS) for _ in variants]
    for number, variant, source in zip(numbers, variants, sources, strict=True):
        text = source.removeprefix(PRELUDE)
        for name, *_ in variant.tiling.launches:
            text = text.replace(f" {name}(", f" {name}_of_{number}(")
            names.append(f"{name}_of_{number}")
        parts.append(text)
    file = folder / "kernels.cu"
    file.write_text("\n".join(parts))
    module = cuda_driver.Driver(str(emulated_driver(file, names, folder, "-O0"))).load(IMAGE, 0)
    numbered = [_Numbered(module, number) for number in numbers]
    return [
        CudaKernel(variant, lambda _, own=own: own)  # type: ignore[misc, arg-type]
        for variant, own in zip(variants, numbered, strict=True)
    ]
