"""Random numbers for stochastic rounding, independent between workers and steps.

Each worker draws from a generator that is seeded anew at every step by the job's seed, the parameter's name, the rank
and the number of steps that counted. So a step that did not count can be repeated.

Drawing takes long. So one chunk is drawn per message and used again, from another offset, for the next chunk: each
value's own noise stays uniform and independent of the value.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from hybridpar.compress.codec import CHUNK, TensorSpec
from hybridpar.compress.memory import Scratch

#: Noise is a multiple of 1 / GRAINS, so that adding it to a whole number of up to 255 is exact in float32.
GRAINS = 1 << 16


class Noise:
    """What a worker draws to round the values of a parameter up or down; with the rounding `zero` nothing."""

    def __init__(self, spec: TensorSpec, rounding: str = "random") -> None:
        self._spec = spec
        #: Whether values are rounded at random.
        self.random = rounding == "random"
        self._generator: torch.Generator | None = None  # a coder of which only the bytes are asked draws nothing
        self._offsets = random.Random()
        #: What `draw` drew last.
        self.ring = torch.empty(0)

    def begin(self, step: int) -> None:
        """Start the draws of a step, which follow from its number."""
        seed = self._spec.draw_seed("noise", self._spec.rank, step)
        if self._generator is None:
            self._generator = torch.Generator(device=self._spec.device)
        self._generator.manual_seed(seed)
        self._offsets.seed(seed)

    def draw(self, count: int, scratch: Scratch) -> None:
        """Draw for a message of so many values, into memory that is borrowed until it is written."""
        if not self.random:
            return
        self.ring = scratch.take("noise", min(count, CHUNK) * 5 // 4 + 1)
        # 64 bits at a time are four grains; a draw of a float would cost as much as all of them.
        drawn = scratch.take("drawn", -(-self.ring.numel() // 4), torch.int64)
        grains = drawn.random_(-(1 << 63), None, generator=self._generator).view(torch.int16)
        self.ring.copy_(grains[: self.ring.numel()]).add_(GRAINS // 2).div_(GRAINS)

    def offset(self, count: int) -> int:
        """Where in the ring the noise of so many values begins, at most a chunk; each call draws anew."""
        return self._offsets.randrange(self.ring.numel() - count + 1)

    def round_(self, values: Tensor) -> None:
        """Round at most a chunk of values in place: up or down at random so that the mean stays, or towards zero."""
        if self.random:
            start = self.offset(values.numel())
            values.add_(self.ring[start : start + values.numel()]).floor_()
        else:
            values.trunc_()
