"""Buckets of gradients, which must be the same, in the same order, on all workers.

A bucket is what is sent while the backward pass still computes. Small tensors are fused into one flat buffer, because
a collective's latency costs more than the copy; a tensor that fills a bucket alone is sent as it is, without a copy.
The cut is a pure function of the order and the sizes, so that agreeing on the order is agreeing on the cut.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view, is_dense


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter's place in a bucket, and how far its gradient has come.

    Attributes:
        name: The parameter's name in the model.
        parameter: The parameter.
        offset: Elements from the start of the bucket.
        seen: Number of the last step in which autograd gave it a gradient.
        ready: Number of the last step in which its gradient was complete.
    """

    name: str
    parameter: nn.Parameter
    offset: int
    seen: int = 0
    ready: int = 0


def cut_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Cut a sequence of tensors into buckets, in order."""
    done: list[list[int]] = []
    open_bucket: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if size >= limit:
            done.append([index])
            continue
        open_bucket.append(index)
        filled += size
        if filled >= limit:
            done.append(open_bucket)
            open_bucket, filled = [], 0
    if open_bucket:
        done.append(open_bucket)
    return sorted(done, key=lambda bucket: bucket[-1])


class Bucket:
    """Gradients that are sent together: equal dtype and device, in one flat tensor."""

    def __init__(self, index: int, slots: Sequence[Slot]) -> None:
        self.index = index
        self.slots = tuple(slots)
        #: Gradients that are still to come in the step under way.
        self.pending = len(slots)
        first = slots[0].parameter
        self.numel = sum(slot.parameter.numel() for slot in slots)
        self.dtype = first.dtype
        self.bytes = self.numel * first.element_size()
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []

    def collect(self) -> Tensor:
        """Bring the gradients together; from then on each `.grad` is a view of the flat tensor.

        A bucket of one parameter hands over the gradient as it is. A parameter without a gradient gets zeros.
        """
        with torch.no_grad():
            if len(self.slots) == 1:
                parameter = self.slots[0].parameter
                gradient = parameter.grad
                parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.resolve_conj()
                return as_real(flat_view(parameter.grad))
            if self._buffer is None:
                first = self.slots[0].parameter
                self._buffer = torch.zeros(self.numel, dtype=first.dtype, device=first.device)
                self._views = [view_like(self._buffer, slot) for slot in self.slots]
            views, gradients = [], []
            for slot, view in zip(self.slots, self._views, strict=True):
                gradient = slot.parameter.grad
                if gradient is None:
                    view.zero_()
                else:
                    views.append(view)
                    gradients.append(gradient.resolve_conj())
                slot.parameter.grad = view
            if views:
                torch._foreach_copy_(views, gradients)
            return as_real(self._buffer)


def as_real(tensor: Tensor) -> Tensor:
    """A tensor, or if it is complex its real and imaginary parts, 1-D; of what is contiguous a view."""
    return torch.view_as_real(tensor.resolve_conj()).flatten() if tensor.is_complex() else tensor


def view_like(buffer: Tensor, slot: Slot) -> Tensor:
    """A parameter's place in the flat tensor of its bucket, in the parameter's shape and memory format."""
    parameter = slot.parameter
    if is_dense(parameter):
        return buffer.as_strided(parameter.shape, parameter.stride(), slot.offset)
    return buffer[slot.offset : slot.offset + parameter.numel()].view(parameter.shape)


def make_buckets(order: Sequence[tuple[str, nn.Parameter]], limit: int) -> list[Bucket]:
    """Buckets for parameters in the order in which their gradients become ready.

    Parameters of different dtypes or devices never share a bucket.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, (_, parameter) in enumerate(order):
        kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
    cuts: list[list[int]] = []
    for members in kinds.values():
        sizes = [order[index][1].numel() * order[index][1].element_size() for index in members]
        cuts += [[members[number] for number in cut] for cut in cut_buckets(sizes, limit)]
    buckets = []
    for number, cut in enumerate(sorted(cuts, key=lambda cut: cut[-1])):
        slots, offset = [], 0
        for index in cut:
            name, parameter = order[index]
            slots.append(Slot(name, parameter, offset))
            offset += parameter.numel()
        buckets.append(Bucket(number, slots))
    return buckets


def layout_fingerprint(buckets: Sequence[Bucket]) -> int:
    """A 16-bit number over names, shapes, strides and order; workers compare it, because layouts must be equal."""
    digest = hashlib.sha256()
    for bucket in buckets:
        for slot in bucket.slots:
            parameter = slot.parameter
            digest.update(f"{bucket.index}:{slot.name}:{tuple(parameter.shape)}:{parameter.stride()}".encode())
    return int.from_bytes(digest.digest()[:2], "big")


def sum_of_squares(flat: Tensor) -> Tensor:
    """Sum of squares of a 1-D tensor, 0-d float64; not finite exactly where an element is not.

    One pass at the speed of memory in float32. Where that overflows, as it does from a norm of 1.8e19 on, the sum is
    taken again in float64; on a GPU it stays infinite, because asking would stall it.
    """
    values = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    total = torch.dot(values, values).double()
    if flat.device.type == "cpu" and not math.isfinite(total.item()):
        total = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    return total
