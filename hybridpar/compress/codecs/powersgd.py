"""Codec `powersgd`: low-rank factors of the gradient, from one step of the power method.

PowerSGD: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithm 1. With M = G + E as a matrix of n rows and m columns and Q of m rows and r columns:

    P = mean of M Q;  P <- orthonormal columns of P;  Q = mean of M^T P;  result = P Q^T;  E = M - P Q^T

One step of the power method: Q is kept for the next step, in which it starts where this one ended. Only P and Q are
sent, r (n + m) numbers instead of n m.

Q is made orthonormal before it is used, as PyTorch's hook does. That does not change the space that P spans, and keeps
P as large as M, so that neither overflows. The factorisation by Householder reflections completes a matrix of lower
rank by other orthonormal columns: a parameter whose gradient was zero once is not stuck at zero, as it is after
Gram-Schmidt. All workers compute it from the same bits; that they get the same bits takes equal processors and
libraries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress.codec import (
    CHUNK,
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
from hybridpar.errors import CheckpointError, UsageError


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
        self._q = orthonormal(torch.randn(self._columns, self._rank, generator=draw, device="cpu").to(spec.device))
        self._next_q = self._q
        self._p = self._matrix = torch.empty(0)

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        super().begin(gradient, residuals)
        self._matrix = self._residual.take(gradient.view(self._rows, self._columns), 0)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        factor = self._matrix @ self._q if index == 0 else self._matrix.t() @ self._p
        torch.mul(factor.view(-1), self._share, out=parts[0])

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        factor = parts[0].to(torch.float32).view(-1, self._rank)
        if index == 0:
            self._p = orthonormal(factor)
        else:
            self._next_q = factor / (self._share * self.spec.workers)

    def finish(self, out: Tensor) -> None:
        result, right = out.view(self._rows, self._columns), self._next_q.t()
        step = max(CHUNK // self._columns, 1)
        for first in range(0, self._rows, step):
            left = self._p[first : first + step]
            decoded = self._scratch.take("product", len(left) * self._columns).view(len(left), self._columns)
            torch.mm(left, right, out=decoded)
            if self._residual.keeps:
                self._matrix[first : first + step].sub_(decoded)
            torch.mul(decoded, self.spec.workers / self.spec.divisor, out=result[first : first + step])

    def commit(self) -> None:
        self._q = orthonormal(self._next_q)

    def state_dict(self) -> dict[str, Any]:
        """The factor with which the next step starts."""
        return {"q": self._q.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["q"].shape != self._q.shape:
            raise CheckpointError(
                f"the factor of {self.spec.name!r} has shape {tuple(state['q'].shape)}, not {tuple(self._q.shape)}",
                "It depends on the parameter's shape and on the rank.",
                "Resume with the rank of the run that wrote the checkpoint.",
            )
        self._q = state["q"].to(self.spec.device, torch.float32).clone()


def orthonormal(matrix: Tensor) -> Tensor:
    """A matrix with orthonormal columns, which span what the columns of this one span.

    Where the matrix is not finite, all of the result is NaN.

    Args:
        matrix: Two-dimensional float32, at least as many rows as columns.
    """
    columns: Tensor = torch.linalg.qr(matrix).Q
    return columns.contiguous()
