"""How gradients are clipped where parameter servers update the parameters.

By their norm: with a barrier the sum over all workers is clipped, as in a run without servers. Every shard knows the
squares of its own stripe, worker 0 adds them up, and the shards update when they have the norm. Without a barrier no
gradient waits for another, so each is clipped by its own norm before it is added to an update.

By value, and adaptively: each shard clips the sum of an update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hybridpar.config import OptimizerConfig
from hybridpar.sync.clipping import clip_each, clip_factor


@dataclass(frozen=True)
class Clipping:
    """Limits of gradients.

    Attributes:
        limit: What `--clip-norm` says; None for no limit.
        mode: What it limits, as `--clip-mode`.
        own: The global norm to which the optimizer clips by itself, as LAMB does; None where it does not.
        unclipped: Names of parameters that are not clipped adaptively.
    """

    limit: float | None = None
    mode: str = "norm"
    own: float | None = None
    unclipped: Sequence[str] = ()

    @classmethod
    def of(cls, config: OptimizerConfig, model: nn.Module, optimizer: torch.optim.Optimizer) -> Clipping:
        """What a run asks for."""
        names = [name for name, _ in model.named_parameters()]
        return cls(config.clip_norm, config.clip_mode, optimizer.defaults.get("max_grad_norm"), tuple(names[-2:]))

    @property
    def by_norm(self) -> bool:
        """Whether an update needs the norm of a whole gradient."""
        return self.own is not None or (self.limit is not None and self.mode == "norm")

    def factor(self, squares: float) -> float:
        """What a gradient is multiplied with."""
        factor = 1.0
        if self.limit is not None and self.mode == "norm":
            shrink = clip_factor(torch.tensor(squares, dtype=torch.float64), self.limit)
            factor = 1.0 if shrink is None else float(shrink)
        return factor if self.own is None else factor / max(1.0, math.sqrt(squares) * factor / self.own)

    def clip_pieces(self, pieces: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Clip the gradients of pieces, in place, by what is known of each of them."""
        if self.limit is not None and self.mode != "norm":
            unclipped = self.unclipped if self.mode == "agc" else ()
            clip_each([piece for name, piece in pieces if name not in unclipped], self.mode, self.limit)
