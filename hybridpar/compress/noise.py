"""Random numbers for stochastic rounding, independent between workers and steps.

Each worker draws from a generator that is seeded anew at every step by the job's seed, the parameter's name, the rank
and the number of steps that counted. So the state is that one number, and a step that did not count can be repeated.

Drawing takes long. So one chunk is drawn per message and used again, from another place, for the next chunk: each
value's own noise stays uniform and independent of the value.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress.codec import CHUNK, NO_RESIDUAL, Coder, Residual, Scratch, TensorSpec
from hybridpar.errors import check_choice

#: Noise is a multiple of 1 / GRAINS, so that adding it to a whole number of up to 255 is exact in float32.
GRAINS = 1 << 16

#: How values are rounded: up or down at random, which has no bias; or towards zero.
ROUNDINGS = ("random", "zero")


def check_rounding(rounding: str) -> None:
    """Check the option `rounding`."""
    check_choice("rounding", rounding, ROUNDINGS, "It says how values are rounded.")


class Noise:
    """What a worker draws to round the values of one parameter.

    Args:
        spec: The parameter.
        rounding: One of `ROUNDINGS`. With `zero` nothing is drawn.
    """

    def __init__(self, spec: TensorSpec, rounding: str = "random") -> None:
        self._spec = spec
        #: Whether values are rounded at random.
        self.random = rounding == "random"
        self._generator: torch.Generator | None = None  # a coder of which only the bytes are asked draws nothing
        self._places = random.Random()
        self._ring = torch.empty(0)
        self._steps = 0

    def begin(self) -> None:
        """Start the draws of a step; they are the same until it is committed."""
        seed = self._spec.draw_seed("noise", self._spec.rank, self._steps)
        if self._generator is None:
            self._generator = torch.Generator(device=self._spec.device)
        self._generator.manual_seed(seed)
        self._places.seed(seed)

    def draw(self, count: int, scratch: Scratch) -> None:
        """Draw for a message.

        Args:
            count: Values of the message.
            scratch: Memory to borrow until the message is written.
        """
        if not self.random:
            return
        self._ring = scratch.take("noise", min(count, CHUNK) * 5 // 4 + 1)
        # 64 bits at a time are four grains; a draw of a float would cost as much as all of them.
        drawn = scratch.take("drawn", -(-self._ring.numel() // 4), torch.int64)
        grains = drawn.random_(-(1 << 63), None, generator=self._generator).view(torch.int16)
        self._ring.copy_(grains[: self._ring.numel()]).add_(GRAINS // 2).div_(GRAINS)

    def take(self, count: int) -> Tensor:
        """Noise for so many values, at most a chunk: uniform in [0, 1), to be read only.

        Args:
            count: Of values.
        """
        start = self.place(count)
        return self._ring[start : start + count]

    def round_(self, values: Tensor) -> None:
        """Round values in place to whole numbers: up or down at random so that the mean stays, or towards zero.

        Args:
            values: At most a chunk.
        """
        if self.random:
            values.add_(self.take(values.numel())).floor_()
        else:
            values.trunc_()

    @property
    def ring(self) -> Tensor:
        """What `draw` drew last."""
        return self._ring

    def place(self, count: int) -> int:
        """Where in the ring the noise of so many values begins; each call draws anew, as `take` does.

        Args:
            count: Of values, at most a chunk.
        """
        return self._places.randrange(self._ring.numel() - count + 1)

    def commit(self) -> None:
        """The step counts; the next one draws anew."""
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """How many steps counted."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: What `state_dict` returned.
        """
        self._steps = int(state["steps"])


class NoisyCoder(Coder):
    """A coder whose state is what it draws. A step that does not count needs no putting back: it is drawn again."""

    #: Set by subclasses.
    _noise: Noise

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        super().begin(gradient, residuals)
        self._noise.begin()

    def commit(self) -> None:
        self._noise.commit()

    def state_dict(self) -> dict[str, Any]:
        return self._noise.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._noise.load_state_dict(state)
