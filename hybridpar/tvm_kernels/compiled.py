"""Why: a record is text; the op needs machine code, from the cache of this machine or built for it."""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.kernel_cache import KernelsUnavailable
from hybridpar.tvm_kernels.choice import AnyKernel, TunedKernel
from hybridpar.tvm_kernels.cuda_compiled import make_cuda_kernels
from hybridpar.tvm_kernels.cuda_device import is_gpu
from hybridpar.tvm_kernels.database import KernelRecord
from hybridpar.tvm_kernels.kernel import Variant, load_variants
from hybridpar.tvm_kernels.shapes import ConvShape
from hybridpar.tvm_kernels.space import reject


def make_kernels(records: Sequence[KernelRecord]) -> list[AnyKernel | KernelsUnavailable]:
    """The kernels of some records, together: what is not in the cache is built.

    Returns:
        For each record its kernel, or why there is none, for instance because its parameters are no kernel's: a
        database may come from anywhere, and only what the space allows is compiled.
    """
    made: dict[int, AnyKernel | KernelsUnavailable] = {}
    variants: dict[int, Variant] = {}
    on_gpu = [place for place, record in enumerate(records) if is_gpu(record.device)]
    made |= zip(on_gpu, make_cuda_kernels([records[place] for place in on_gpu]), strict=True)
    for place, record in enumerate(records):
        if place in made:
            continue
        shape = ConvShape.parse(record.shape)
        numbers = {name: value for name, value in record.parameters.items() if type(value) is int}
        reason = reject(shape, record.direction, record.layout, numbers)
        if reason is not None or len(numbers) < len(record.parameters):
            made[place] = KernelsUnavailable(reason or "its parameters are not whole numbers")
        else:
            variants[place] = Variant(shape, record.direction, record.layout, numbers)
    for (place, _), kernel in zip(variants.items(), load_variants([*variants.values()]), strict=True):
        if isinstance(kernel, KernelsUnavailable):
            made[place] = kernel
        else:
            record = records[place]
            made[place] = TunedKernel(
                kernel.phases, kernel.scratch_bytes, record.align, record.threads, variants[place].align_out
            )
    return [made[place] for place in range(len(records))]
