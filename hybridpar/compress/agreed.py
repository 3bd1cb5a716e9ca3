"""Exchange of codes on a scale that all workers agree on before they send: such codes can be added on the way.

QSGD-MaxNorm on a single grid or on several, TernGrad and GRandK-MN begin alike: a round in which the largest magnitude
of all workers is reduced by maximum. Where there are several grids a round follows that says which elements are small
on all workers. Then codes are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hybridpar.compress import kernels
from hybridpar.compress.codec import Coder, Collective, Round, TensorSpec
from hybridpar.compress.levels import write_scale
from hybridpar.compress.memory import WORKER
from hybridpar.compress.noise import Noise
from hybridpar.compress.packing import Fields, bits_size, pack_bits, slices, unpack_bits
from hybridpar.errors import check
from hybridpar.spec import between

#: What bits of grids must be; see `steps_of`.
BITS = between(1, 16)


def check_grids(codec: str, bits: Sequence[int]) -> None:
    """Refuse grids of so many bits that a codec was given, unless they come coarsest first."""
    ascending = all(left < right for left, right in pairwise(bits))
    what = f"codec {codec!r}: grids of {'/'.join(map(str, bits))} bits"
    check(ascending and bits[0] <= 8, what, "They go from coarse to fine, the first of 8 at most.", "Use 4 and 8 bits.")


def steps_of(bits: Sequence[int]) -> tuple[int, ...]:
    """Steps from zero to the scale of grids of so many bits."""
    return tuple(2**width - 1 for width in bits)


class GridsCoder(Coder):
    """Agrees on a scale, then on a grid for each element, then adds codes.

    Args:
        spec: The parameter.
        steps: From zero to the scale, of each grid, coarsest first.
        rounding: How values are rounded, see `hybridpar.compress.noise`.
        count: How many values are sent in a step; as many as the parameter has if it is not given.
    """

    def __init__(self, spec: TensorSpec, steps: Sequence[int], rounding: str = "random", count: int = 0) -> None:
        self._count = count or spec.count
        self._coarse, self._finer = steps[0], tuple(steps[1:])
        self._gains = [right - left for left, right in pairwise(steps)]
        self._fields = Fields.summable(self._count, 2 * self._coarse, spec.workers)
        planes = len(self._finer) * bits_size(self._count)
        agree = [Round(Collective.AND, torch.uint8, (planes,))] if planes else []
        scale = Round(Collective.MAX, torch.float32, (1,))
        super().__init__(spec, [scale, *agree, Round(Collective.SUM, self._fields.word, (self._fields.words,))])
        self.residuals = {WORKER: range(spec.count)}
        self._noise = Noise(spec, rounding)
        self._values = self._scale = self._divisor = self._planes = torch.empty(0)

    def _begin(self) -> None:
        """Take what is to be sent in the step."""
        self._noise.begin(self.steps)
        self._values = self.memory[WORKER].take(self.gradient)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        (out,) = parts
        if index == 0:
            self._begin()
            self._write_scale(out)
        elif index < len(self.rounds) - 1:
            self._write_what_is_small(out)
        else:
            self._noise.draw(self._fields.words, self.scratch)
            by_kernel = self._noise.random and not self.memory[WORKER].keeps and not self._finer
            numbers = self._noise, self._coarse, self._fields, out, self.scratch
            if not (by_kernel and kernels.qsgd_encode(self._values, self._scale, *numbers)):
                self._fields.pack(out, self._code, self.scratch)

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        if index == 0:
            self._scale = parts[0]
            # Dividing first makes the largest value exactly 1, and a denormal scale harmless.
            self._divisor = torch.where(self._scale > 0, self._scale, 1.0)
        elif index < len(self.rounds) - 1:
            self._planes = parts[0].view(len(self._finer), -1)
        else:
            super().read(index, parts)

    def finish(self, out: Tensor) -> None:
        zero, unit = self.spec.workers * self._coarse, self.spec.divisor * self._coarse
        (words,) = self.messages
        if not self._finer and kernels.qsgd_read(words, self._scale, self._fields, zero, unit, out, add=False):
            return

        def use(start: int, stop: int, sums: Tensor) -> None:
            sums.sub_(zero).div_(self._steps(start, stop).mul_(self.spec.divisor))
            torch.mul(sums, self._scale, out=out[start:stop])

        self._fields.unpack(words, use, self.scratch)

    def _write_scale(self, out: Tensor) -> None:
        """Write this worker's scale; infinite where a value is not finite."""
        write_scale(self._values, out)

    def _code(self, start: int, stop: int, into: Tensor) -> None:
        values, steps = self._values[start:stop], self._steps(start, stop)
        torch.div(values, self._divisor, out=into)
        self._noise.round_(into.mul_(steps))
        into.clamp_(max=self._coarse)
        if self.memory[WORKER].keeps:
            values.sub_(torch.div(into, steps).mul_(self._scale))
        into.add_(self._coarse)

    def _write_what_is_small(self, out: Tensor) -> None:
        planes = out.view(len(self._finer), -1)
        for part in slices(self._count):
            ratios = self._values[part] / self._divisor
            for plane, steps in zip(planes, self._finer, strict=True):
                small = (ratios * steps).abs_() <= self._coarse
                pack_bits(small, plane[part.start // 8 : bits_size(part.stop)])

    def _steps(self, start: int, stop: int) -> Tensor:
        """Steps of the grid that each element of a range uses, float32."""
        steps = self.scratch.take("steps", stop - start).fill_(self._coarse)
        first = start // 8 * 8
        for plane, gain in zip(self._planes, self._gains, strict=True):
            bits = unpack_bits(plane[first // 8 : bits_size(stop)], stop - first)
            steps.add_(bits[start - first :], alpha=gain)
        return steps
