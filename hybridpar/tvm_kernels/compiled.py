"""Why: a record is text; the op needs machine code, from the cache of this machine or built for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridpar.codegen.cache import KernelsUnavailable
from hybridpar.tvm_kernels.cuda_compiled import make_cuda_kernels
from hybridpar.tvm_kernels.cuda_device import is_gpu
from hybridpar.tvm_kernels.database import KernelRecord
from hybridpar.tvm_kernels.kernel import AnyKernel, TunedKernel, Variant, load_variants
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.space import reject


@dataclass(frozen=True)
class Asked:
    """A kernel that a record asks for.

    Attributes:
        shape: What is computed.
        direction: Which of the three.
        layout: Of activations.
        parameters: Of the schedule, as the record has them.
        align: What the addresses of all tensors must be multiples of.
        threads: Threads that compute it.
    """

    shape: ConvShape
    direction: Direction
    layout: Layout
    parameters: Mapping[str, object]
    align: int
    threads: int


def compiled_kernels(kind: type[Variant], asked: Sequence[Asked]) -> list[TunedKernel | KernelsUnavailable]:
    """Kernels for the CPU, together: what is not in the cache is built.

    Args:
        kind: Of all of them.
        asked: What records ask for.

    Returns:
        For each its kernel, or why there is none, for instance because its parameters are no kernel's: a database may
        come from anywhere, and only what the space allows is compiled.
    """
    made: dict[int, TunedKernel | KernelsUnavailable] = {}
    variants: dict[int, Variant] = {}
    for place, one in enumerate(asked):
        numbers = {name: value for name, value in one.parameters.items() if type(value) is int}
        reason = reject(one.shape, one.direction, one.layout, numbers)
        if reason is not None or len(numbers) < len(one.parameters):
            made[place] = KernelsUnavailable(reason or "its parameters are not whole numbers")
        else:
            variants[place] = kind(one.shape, one.direction, one.layout, numbers)
    for (place, variant), kernel in zip(variants.items(), load_variants([*variants.values()]), strict=True):
        if isinstance(kernel, KernelsUnavailable):
            made[place] = kernel
        else:
            one = asked[place]
            made[place] = TunedKernel(kernel.phases, kernel.scratch_bytes, one.align, one.threads, variant.align_out)
    return [made[place] for place in range(len(asked))]


def make_kernels(records: Sequence[KernelRecord]) -> list[AnyKernel | KernelsUnavailable]:
    """The kernels of some records, together: what is not in the cache is built.

    Returns:
        For each record its kernel, or why there is none; see `compiled_kernels`.
    """
    made: dict[int, AnyKernel | KernelsUnavailable] = {}
    places: dict[bool, list[int]] = {True: [], False: []}
    for place, record in enumerate(records):
        places[is_gpu(record.device)].append(place)
    made |= zip(places[True], make_cuda_kernels([records[place] for place in places[True]]), strict=True)
    asked = [
        Asked(ConvShape.parse(one.shape), one.direction, one.layout, one.parameters, one.align, one.threads)
        for one in (records[place] for place in places[False])
    ]
    made |= zip(places[False], compiled_kernels(Variant, asked), strict=True)
    return [made[place] for place in range(len(records))]
