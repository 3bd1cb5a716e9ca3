"""Codec `powersgd`: low-rank factors of the gradient, from one step of the power method.

PowerSGD: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithm 1. With M = G + E as a matrix of n rows and m columns and Q of m rows and r columns:

    P = mean of M Q;  P <- orthonormal columns of P;  Q = mean of M^T P;  result = P Q^T;  E = M - P Q^T

One step of the power method: Q is kept for the next step, in which it starts where this one ended. Only P and Q are
sent, r (n + m) numbers instead of n m.

Q is made orthonormal before it is used, as PyTorch's hook does. That does not change the space that P spans, and keeps
P as large as M, so that neither overflows. A factor of lower rank is completed by other orthonormal columns: a parameter
whose gradient was zero once is not stuck at zero, as it is after plain Gram-Schmidt. All workers compute it from the
same bits; that they get the same bits takes equal processors and libraries.

What a step costs is passes over memory as large as the gradient. There are three: one writes M where the residual will
be and multiplies it with Q, one multiplies it with P, one writes P Q^T and subtracts it from M. Factors lie transposed,
as r long rows, in memory and in messages: BLAS multiplies a large matrix with a few long rows three times as fast as
with many rows of a few numbers. On a CPU a pass takes a matrix in pieces that fit in its cache. On a GPU a pass is one
product for all matrices of a shape: `Exchange` calls `LowRank.write_together` for all that it has, and residuals of one
shape are moved together once, so that they are one tensor of three dimensions without a copy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import (
    CODECS,
    NO_RESIDUAL,
    WORKER,
    Codec,
    Coder,
    Collective,
    Residual,
    Round,
    TensorSpec,
)
from hybridpar.compress.feedback import lay_together, stacked
from hybridpar.errors import CheckpointError, UsageError

#: Elements that a CPU works on at a time: 512 KB, half of a common second-level cache.
PIECE = 1 << 17
#: The largest rank for which a GPU makes factors orthonormal row by row, all of them at once.
_FEW = 8
#: A row of which projections leave no larger part than this depends on the rows before it.
_DEPENDENT = 1e-5


@CODECS.register("powersgd", "PowerSGD: two factors of low rank, one step of the power method per step")
@dataclass(frozen=True)
class PowerSgd(Codec):
    """An approximation of low rank that is improved at every step.

    Attributes:
        rank: Columns of the factors.
        gain: A parameter is compressed where that makes it more than so many times smaller.
    """

    rank: int = 2
    gain: float = 2.0
    name = "powersgd"
    biased = True
    stateful = True
    feedback = True
    castable = True
    kernels = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"rank={self.rank}", "It is a number of columns.", "Use 1, 2 or 4.")
        if self.gain < 0:
            raise UsageError(f"gain={self.gain:g}", "It is a ratio of sizes.", "Use 2, or 0 to compress everything.")

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the factors are so many times smaller."""
        if len(shape) < 2 or math.prod(shape) == 0:
            return False
        return (shape[0] + math.prod(shape[1:])) * self.rank * self.gain < math.prod(shape)

    def bind(self, spec: TensorSpec) -> LowRank:
        return LowRank(spec, self.rank)


class LowRank(Coder):
    """Approximates one parameter, as a matrix of its first dimension by the others.

    Args:
        spec: The parameter.
        rank: Columns of the factors, at most the smaller side of the matrix.
    """

    def __init__(self, spec: TensorSpec, rank: int) -> None:
        self._rows, self._columns = spec.shape[0], math.prod(spec.shape[1:])
        self._rank = min(rank, self._rows, self._columns)
        sides = self._rows, self._columns  # of P and of Q
        super().__init__(spec, [Round(Collective.SUM, spec.wire, (side * self._rank,)) for side in sides])
        self.residuals = {WORKER: spec.count}
        # Factors of 16 bits are sent divided by K, so that their sum is no larger than they are.
        self._share = 1 / spec.workers if spec.wire != torch.float32 else 1.0
        draw = torch.Generator().manual_seed(spec.draw_seed("factor"))
        first = torch.randn(self._columns, self._rank, generator=draw, device="cpu")
        # All factors are transposed. Q is kept as the mean that came, and is made orthonormal when it is used.
        self._q = self._next_q = first.t().contiguous().to(spec.device)
        self._p = torch.empty(0)
        # Rows of the matrix that are worked on at a time.
        self._step = min(max(_most(spec.device) // self._columns, 1), self._rows)

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        super().begin(gradient.contiguous().view(self._rows, self._columns), residuals)

    @property
    def _matrix(self) -> Tensor:
        """M, once it has been taken; then what is left of it."""
        return self._residual.again(self._gradient, 0)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        self.write_together([self], index, [parts])

    @classmethod
    def write_together(cls, coders: Sequence[Self], index: int, parts: Sequence[Sequence[Tensor]]) -> None:
        factors = orthonormal([coder._p if index else coder._q for coder in coders])
        for numbers, matrices in _groups(coders, fresh=index == 0):
            group = [coders[n] for n in numbers]
            first = group[0]
            left = torch.stack([factors[n] for n in numbers]).mul_(first._share)
            side = first._columns if index else first._rows
            product = first._scratch.take("factor", len(group) * first._rank * side).view(len(group), -1, side)
            if index:
                for n in numbers:
                    coders[n]._p = factors[n]
            if len(group) > 1:
                for coder in group if index == 0 else ():
                    coder._residual.take(coder._gradient, 0)
                torch.bmm(left, matrices if index else matrices.mT, out=product)
            elif index:
                if not kernels.powersgd_right(first._residual, left[0], product[0]):
                    torch.mm(left[0], matrices[0], out=product[0])
            elif not kernels.powersgd_left(first._gradient, first._residual, left[0], product[0]):
                taken = first._residual.take_rows(first._gradient, first._step)
                for piece, part in zip(taken, product[0].split(first._step, 1), strict=True):
                    torch.mm(left[0], piece.t(), out=part)
            torch._foreach_copy_([parts[n][0] for n in numbers], list(product.flatten(1)))

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        factor = parts[0].to(torch.float32).view(self._rank, -1)
        if index == 0:
            self._p = factor
        else:
            self._next_q = factor / (self._share * self.spec.workers)

    def finish(self, out: Tensor) -> None:
        result, scale = out.view(self._rows, self._columns), self.spec.workers / self.spec.divisor
        # A product that is written to memory of other strides may be rounded otherwise.
        product = result if out.is_contiguous() else torch.empty(result.shape, device=out.device)
        if not kernels.powersgd_product(self._p, self._next_q, self._residual, product, scale):
            pieces = [tensor.split(self._step) for tensor in (product, self._p.t(), self._matrix)]
            for piece, left, unsent in zip(*pieces, strict=True):
                piece.addmm_(left, self._next_q, beta=0, alpha=scale)
                if self._residual.keeps:
                    unsent.sub_(piece, alpha=1 / scale)
        if product is not result:
            result.copy_(product)

    def commit(self) -> None:
        self._q = self._next_q

    def state_dict(self) -> dict[str, Any]:
        """The factor with which the next step starts, one row per column of the matrix."""
        return {"q": self._q.t().contiguous().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved: Tensor = state["q"].t()
        if saved.shape != self._q.shape:
            raise CheckpointError(
                f"the factor of {self.spec.name!r} has shape {tuple(saved.t().shape)}, not {tuple(self._q.t().shape)}",
                "It depends on the parameter's shape and on the rank.",
                "Resume with the rank of the run that wrote the checkpoint.",
            )
        self._q = saved.to(self.spec.device, torch.float32).contiguous().clone()


def orthonormal(factors: Sequence[Tensor]) -> list[Tensor]:
    """For each matrix one with orthonormal rows, whose first rows span what the first rows of that one span.

    Where a matrix is not finite, its result is not finite.

    Args:
        factors: Of shape (r, n) with r <= n, float32.

    Returns:
        New ones, contiguous.
    """
    if factors[0].device.type == "cpu" or max(map(len, factors)) > _FEW:
        return [torch.linalg.qr(factor.t()).Q.t().contiguous() for factor in factors]
    return _row_by_row(factors)


def _row_by_row(factors: Sequence[Tensor]) -> list[Tensor]:
    """What `orthonormal` does, for all matrices at once by Gram-Schmidt with every projection done twice.

    A row that depends on those before it is replaced by a direction that does not, on the device, so that nothing waits.
    """
    sizes = [one.shape for one in factors]
    shape = len(factors), *(max(side) for side in zip(*sizes, strict=True))
    # Shorter rows end in zeros, which change no product; rows that a matrix does not have come last and are not used.
    rows, spare, done = (factors[0].new_zeros(shape) for _ in range(3))
    turns = torch.arange(1, shape[1] + 1, device=rows.device)[:, None] + 0.37
    directions = torch.cos(turns * torch.arange(1, shape[2] + 1, device=rows.device))
    for block, values in ((rows, factors), (spare, [directions[:r, :n] for r, n in sizes])):
        torch._foreach_copy_([one[:r, :n] for one, (r, n) in zip(block, sizes, strict=True)], list(values))
    rows /= rows.abs().amax(2, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)  # squares stay in range
    for turn in range(shape[1]):
        pair = torch.stack((rows[:, turn], spare[:, turn]), 1)
        length = torch.linalg.vector_norm(pair, dim=2, keepdim=True)
        for _ in range(2 if turn else 0):
            pair = pair.baddbmm_(pair @ done[:, :turn].mT, done[:, :turn], alpha=-1)
        left = torch.linalg.vector_norm(pair, dim=2, keepdim=True)
        own, other = (pair / left).unbind(1)
        done[:, turn] = torch.where(left[:, 0] <= _DEPENDENT * length[:, 0], other, own)  # NaN stays NaN
    return [one[:r, :n] for one, (r, n) in zip(done, sizes, strict=True)]


def _most(device: torch.device) -> int:
    """Elements that are worked on at a time."""
    return PIECE if device.type == "cpu" else sys.maxsize


def _groups(coders: Sequence[LowRank], fresh: bool) -> Iterator[tuple[list[int], Tensor]]:
    """Coders whose matrices are one tensor of three dimensions: their numbers, and that tensor, which is not a copy.

    Args:
        coders: At work on their parameters.
        fresh: Whether nothing was taken in this step, so that residuals can be moved.
    """
    shapes: dict[tuple[int, int, int], list[int]] = {}
    for number, coder in enumerate(coders):
        shapes.setdefault((coder._rank, coder._rows, coder._columns), []).append(number)
    for numbers in shapes.values():
        most = max(_most(coders[0].spec.device) // coders[numbers[0]].spec.count, 1)
        for start in range(0, len(numbers), most):
            group = numbers[start : start + most]
            if fresh:
                lay_together([coders[n]._residual for n in group])
            matrices = stacked([coders[n]._matrix for n in group])
            if matrices is not None:
                yield group, matrices
            else:
                yield from (([n], coders[n]._matrix[None]) for n in group)
