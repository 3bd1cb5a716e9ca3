"""Why: a record is text; the op needs machine code, from the cache of this machine or built for it."""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.kernel_build import KernelsUnavailable
from hybridpar.tvm_kernels.choice import TunedKernel
from hybridpar.tvm_kernels.database import KernelRecord
from hybridpar.tvm_kernels.kernel import Variant, load_variants
from hybridpar.tvm_kernels.shapes import ConvShape


def make_kernels(records: Sequence[KernelRecord]) -> list[TunedKernel | KernelsUnavailable]:
    """The kernels of some records, together: what is not in the cache is built.

    Returns:
        For each record its kernel, or why there is none, for instance because its parameters are no kernel's.
    """
    made: list[TunedKernel | KernelsUnavailable] = []
    variants: dict[int, Variant] = {}
    for index, record in enumerate(records):
        numbers = {name: value for name, value in record.parameters.items() if isinstance(value, int)}
        if len(numbers) == len(record.parameters):
            variants[index] = Variant(ConvShape.parse(record.shape), record.direction, record.layout, numbers)
    loaded = dict(zip(variants, load_variants([*variants.values()]), strict=True))
    for index, record in enumerate(records):
        kernel = loaded.get(index, KernelsUnavailable(f"{dict(record.parameters)} are no kernel's parameters"))
        if not isinstance(kernel, KernelsUnavailable):
            kernel = TunedKernel(kernel.phases, kernel.scratch_bytes, record.align, record.threads)
        made.append(kernel)
    return made
