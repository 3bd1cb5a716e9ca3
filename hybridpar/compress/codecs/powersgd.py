"""Codec `powersgd`: low-rank factors of the gradient, from one step of the power method.

PowerSGD: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithm 1. With M = G + E as a matrix of n rows and m columns and Q of m rows and r columns:

    P = mean of M Q;  P <- orthonormal columns of P;  Q = mean of M^T P;  result = P Q^T;  E = M - P Q^T

One step of the power method: Q is kept for the next step, in which it starts where this one ended. Only P and Q are
sent, r (n + m) numbers instead of n m.

Q is made orthonormal before it is used, as PyTorch's hook does. That does not change the space that P spans, and keeps
P as large as M, so that neither overflows. A factor of lower rank is completed by other orthonormal columns, so that a
parameter whose gradient was zero once is not stuck at zero, as it is after plain Gram-Schmidt. All workers compute it
from the same bits; that they get the same bits takes equal processors and libraries, and kernels on all or none.

What a step costs is passes over memory as large as the gradient. There are three: one writes M where the residual will
be and multiplies it with Q, one multiplies it with P, one writes P Q^T, or steps the optimizer by it. That P Q^T is
subtracted from M is left to the first pass of the next step, which reads M anyway. Factors lie transposed, as r long
rows, in memory and in messages: BLAS multiplies a large matrix with a few long rows three times as fast as with many
rows of a few numbers.

* On a CPU each pass is a kernel that reads memory once (`hybridpar/compress/kernels/powersgd_source.py`). Without
  kernels, error feedback, for ranks above 4, or where rows are no multiple of 16 values, it is done by BLAS and further
  passes.
* On a GPU, where starting a kernel is what costs, matrices of one shape are multiplied together: `Exchange` calls
  `LowRank.write_together` for all that it has. It moves their residuals together once (`lay_together`), so that they
  are one tensor of three dimensions without a copy. Factors of all shapes are made orthonormal together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import CODECS, Codec, Coder, Collective, Round, TensorSpec
from hybridpar.compress.memory import WORKER, Product, Residual, lay_together, stacked
from hybridpar.compress.received import Factors, Received
from hybridpar.spec import AT_LEAST_0, AT_LEAST_1

#: The largest rank for which a GPU makes factors orthonormal row by row, all of them at once.
_FEW = 8
#: A row of which projections leave no larger part than this depends on the rows before it.
_DEPENDENT = 1e-5


class FactorProduct(Product):
    """The product of a step's factors."""

    def subtract_from(self, values: Tensor) -> None:
        matrix = values.view(self.left.shape[1], self.right.shape[1])
        if not kernels.powersgd_subtract(self.left, self.right, matrix):
            matrix.addmm_(self.left.t(), self.right, alpha=-1)


@CODECS.register("powersgd", "PowerSGD: two factors of low rank, one step of the power method per step")
@dataclass(frozen=True, kw_only=True)
class PowerSgd(Codec):
    """An approximation of low rank that is improved at every step.

    Attributes:
        rank: Columns of the factors.
        gain: A parameter is compressed where that makes it more than so many times smaller.
    """

    rank: Annotated[int, AT_LEAST_1] = 2
    gain: Annotated[float, AT_LEAST_0] = 2.0
    feedback: bool = True
    castable = True
    decodes_by_kernels = True
    at_once = True

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the factors are so many times smaller."""
        if len(shape) < 2 or math.prod(shape) == 0:
            return False
        return (shape[0] + math.prod(shape[1:])) * self.rank * self.gain < math.prod(shape)

    def prepare(self, device: torch.device) -> bool:
        """On a CPU."""
        return device.type == "cpu" and kernels.table(device) is not None

    def coder(self, spec: TensorSpec) -> LowRank:
        return LowRank(spec, self.rank)


class LowRank(Coder):
    """Approximates one parameter, as a matrix of its first dimension by the others."""

    def __init__(self, spec: TensorSpec, rank: int) -> None:
        self._rows, self._columns = spec.shape[0], math.prod(spec.shape[1:])
        self._rank = min(rank, self._rows, self._columns)
        sides = self._rows, self._columns  # of P and of Q
        super().__init__(spec, [Round(Collective.SUM, spec.wire, (side * self._rank,)) for side in sides])
        self.residuals = {WORKER: range(spec.count)}
        self._scale = spec.workers / spec.divisor
        draw = torch.Generator().manual_seed(spec.draw_seed("factor"))
        first = torch.randn(self._columns, self._rank, generator=draw, dtype=torch.float32, device="cpu")
        # All factors are transposed. Q is stored as the mean that came, and is made orthonormal when it is used.
        self._q = self.register_state("q", first.t().contiguous().to(spec.device))
        self._p, self._is_orthonormal = torch.empty(0), False
        self._matrix = torch.empty(0)  # M, once it has been made

    def _begin(self) -> None:
        self._memory = self.memory[WORKER]
        self.gradient = self.gradient.view(self._rows, self._columns)
        if not self._memory.keeps:  # M is the gradient, which is not there any more in the second round
            self.gradient = self.gradient.clone()

    def received(self) -> Received:
        return Factors(self, lambda: (self._p, self._q.next), self._scale)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        self.write_together([self], index, [parts])

    @classmethod
    def write_together(cls, coders: Sequence[Self], index: int, parts: Sequence[Sequence[Tensor]]) -> None:
        for coder in () if index else coders:
            coder._begin()
        factors = orthonormal([coder._p if index else coder._q.now for coder in coders])
        groups: dict[tuple[object, ...], list[tuple[LowRank, Tensor, Tensor]]] = {}
        for coder, factor, (part,) in zip(coders, factors, parts, strict=True):
            if index:
                coder._p, coder._is_orthonormal = factor, True
            message = part.view(coder._rank, -1)
            if _one_by_one(coder.spec.device):
                coder._multiply(index, factor, message)
            else:
                groups.setdefault((factor.shape, part.shape, part.dtype), []).append((coder, factor, message))
        for group in groups.values():
            _multiply_together(index, *zip(*group, strict=True))

    def _multiply(self, index: int, factor: Tensor, message: Tensor) -> None:
        """Write Q^T M^T, and make M before, or P^T M."""
        left = factor if self.spec.share == 1 else factor * self.spec.share
        out = message if message.dtype == torch.float32 else torch.empty_like(message, dtype=torch.float32)
        if index == 0:
            memory = self._memory
            if kernels.powersgd_left(self.gradient, memory, left, out):
                assert isinstance(memory, Residual)
                self._matrix = memory.pending.view_as(self.gradient)
            else:
                self._matrix = memory.take(self.gradient)
                torch.mm(left, self._matrix.t(), out=out)
        elif not kernels.powersgd_right(self._matrix, left, out):
            torch.mm(left, self._matrix, out=out)
        if out is not message:
            message.copy_(out)

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        factor = parts[0].to(torch.float32).view(self._rank, -1)
        if index == 0:
            self._p, self._is_orthonormal = factor, False
        else:
            if not self._is_orthonormal:  # this coder has written nothing
                (self._p,) = orthonormal([self._p])
            self._q.next = factor / (self.spec.share * self.spec.workers)
            self.memory[WORKER].owe(FactorProduct(self._p, self._q.next))
            self._matrix = torch.empty(0)  # it may be a copy of the gradient

    def finish(self, out: Tensor) -> None:
        product = out.view(self._rows, self._columns)
        if not kernels.powersgd_product(self._p, self._q.next, product, self._scale):
            product.addmm_(self._p.t(), self._q.next, beta=0, alpha=self._scale)


def orthonormal(factors: Sequence[Tensor]) -> list[Tensor]:
    """For each matrix one with orthonormal rows, whose first rows span what the first rows of that one span.

    Where a matrix is not finite, its result is not finite.
    """
    if _one_by_one(factors[0].device) or max(factor.shape[0] for factor in factors) > _FEW:
        return [torch.linalg.qr(factor.t()).Q.t().contiguous() for factor in factors]
    return _row_by_row(factors)


def _row_by_row(factors: Sequence[Tensor]) -> list[Tensor]:
    """What `orthonormal` does, for all matrices at once by Gram-Schmidt with every projection done twice.

    A row that depends on those before it is replaced by a direction that does not; the device decides, nothing waits.
    """
    sizes = [matrix.shape for matrix in factors]
    shape = len(factors), *(max(side) for side in zip(*sizes, strict=True))
    # Shorter rows end in zeros, which change no product; rows that a matrix does not have come last and are not used.
    rows, spare, done = (factors[0].new_zeros(shape) for _ in range(3))
    down, across = (torch.arange(1, count + 1, dtype=rows.dtype, device=rows.device) for count in shape[1:])
    directions = torch.cos((down[:, None] + 0.37) * across)
    for block, values in ((rows, factors), (spare, [directions[:r, :n] for r, n in sizes])):
        torch._foreach_copy_([matrix[:r, :n] for matrix, (r, n) in zip(block, sizes, strict=True)], list(values))
    rows /= rows.abs().amax(2, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)  # squares stay in range
    for turn in range(shape[1]):
        pair = torch.stack((rows[:, turn], spare[:, turn]), 1)
        length = torch.linalg.vector_norm(pair, dim=2, keepdim=True)
        for _ in range(2 if turn else 0):
            pair = pair.baddbmm_(pair @ done[:, :turn].mT, done[:, :turn], alpha=-1)
        left = torch.linalg.vector_norm(pair, dim=2, keepdim=True)
        itself, other = (pair / left).unbind(1)
        done[:, turn] = torch.where(left[:, 0] <= _DEPENDENT * length[:, 0], other, itself)  # NaN stays NaN
    return [matrix[:r, :n] for matrix, (r, n) in zip(done, sizes, strict=True)]


def _one_by_one(device: torch.device) -> bool:
    """Whether matrices are worked on one after the other, as each is work enough."""
    return device.type == "cpu"


def _multiply_together(
    index: int, coders: Sequence[LowRank], factors: Sequence[Tensor], messages: Sequence[Tensor]
) -> None:
    """What `LowRank._multiply` does, for coders of one shape."""
    if index == 0:
        lay_together([coder._memory for coder in coders])
        for coder in coders:
            coder._matrix = coder._memory.take(coder.gradient)
    matrices = stacked([coder._matrix for coder in coders])
    if matrices is None:  # gradients themselves, which lie where they lie
        matrices = torch.stack([coder._matrix for coder in coders])
    products = list(torch.stack(list(factors)) @ (matrices if index else matrices.mT))
    if coders[0].spec.share != 1:
        torch._foreach_mul_(products, coders[0].spec.share)
    torch._foreach_copy_(list(messages), products)
