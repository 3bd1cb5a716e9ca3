"""Why: a record of a GPU is text; the op needs machine code, loaded on whichever of the machine's GPUs calls it.

Sources are written together, in child processes; machine code is made and loaded on a device when it is first called
there, since a process uses one GPU of many and loading takes memory of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.machine.process import available_cores
from hybridpar.tvm_kernels.cuda_kernel import CudaKernel, CudaVariant, cubin_of, load_cubin, sources_of
from hybridpar.tvm_kernels.cuda_space import reject
from hybridpar.tvm_kernels.database import KernelRecord
from hybridpar.tvm_kernels.schedules.cuda_tile import ITEM
from hybridpar.tvm_kernels.shapes import ConvShape


class TunedCudaKernel:
    """A kernel of one record. It checks nothing: what it is given must be dense, of its dtype, aligned, on one GPU.

    Args:
        variant: What it computes, and how.
        source: CUDA C.
        architecture: Of the GPUs that the record is for, as in `sm_90`.
    """

    def __init__(self, variant: CudaVariant, source: str, architecture: str) -> None:
        self.variant = variant
        self.scratch_bytes = variant.tile.scratch_bytes
        #: What all addresses are multiples of.
        self.align = variant.tile.vector * ITEM[variant.dtype]
        self._source, self._architecture = source, architecture
        self._loaded: dict[int, CudaKernel] = {}
        self._loading = threading.Lock()

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the addresses are aligned as they must be."""
        return all(tensor.data_ptr() % self.align == 0 for tensor in tensors)

    def prepare(self, index: int) -> None:
        """Load it on a device.

        Raises:
            KernelsUnavailable: It does not compile, or the driver refuses it.
        """
        with self._loading:
            if index not in self._loaded:
                try:
                    code = cubin_of(self._source, self._architecture)
                    self._loaded[index] = load_cubin(self.variant, code, index)
                except (RuntimeError, OSError) as error:
                    raise KernelsUnavailable(str(error)) from None

    def __call__(self, first: Tensor, second: Tensor, third: Tensor | None, out: Tensor) -> None:
        """Compute, on torch's current stream.

        Args:
            first: Input, or the output's gradient where the input's is computed.
            second: Weights, or the output's gradient where theirs is computed.
            third: Bias, or None.
            out: The result.
        """
        index = out.device.index or 0
        kernel = self._loaded.get(index)
        if kernel is None:
            self.prepare(index)
            kernel = self._loaded[index]
        # Freed while it is still in use on the stream, and given out again only to what comes later on it.
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=out.device) if self.scratch_bytes else None
        kernel(
            first.data_ptr(),
            second.data_ptr(),
            0 if third is None else third.data_ptr(),
            out.data_ptr(),
            0 if scratch is None else scratch.data_ptr(),
        )


def make_cuda_kernels(records: Sequence[KernelRecord]) -> list[TunedCudaKernel | KernelsUnavailable]:
    """The kernels of some records of GPUs, together: sources that are not in the cache are written.

    Returns:
        For each record its kernel, or why there is none; only what the space allows is compiled.
    """
    made: dict[int, TunedCudaKernel | KernelsUnavailable] = {}
    variants: dict[int, CudaVariant] = {}
    for place, record in enumerate(records):
        shape = ConvShape.parse(record.shape)
        numbers = {name: value for name, value in record.parameters.items() if type(value) is int}
        reason = reject(shape, record.direction, record.layout, record.dtype, numbers)
        if reason is not None or len(numbers) < len(record.parameters):
            made[place] = KernelsUnavailable(reason or "its parameters are not whole numbers")
        else:
            variants[place] = CudaVariant(shape, record.direction, record.layout, record.dtype, numbers)
    sources = sources_of([*variants.values()], len(available_cores()))
    for (place, variant), source in zip(variants.items(), sources, strict=True):
        made[place] = source if isinstance(source, KernelsUnavailable) else _made(variant, source, records[place])
    return [made[place] for place in range(len(records))]


def _made(variant: CudaVariant, source: str, record: KernelRecord) -> TunedCudaKernel | KernelsUnavailable:
    """A kernel that is known to compile and to load: on the current device, which the first call will be for."""
    kernel = TunedCudaKernel(variant, source, record.device.rpartition(" ")[2])
    try:
        kernel.prepare(torch.cuda.current_device())
    except (KernelsUnavailable, RuntimeError, AssertionError) as error:
        return KernelsUnavailable(str(error) or "there is no GPU")
    return kernel
