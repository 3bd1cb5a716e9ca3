"""What came of a parameter's gradients: a sum over the workers that is written to memory only where it must be.

An optimizer that reads what was received in its own pass saves a pass over memory: SGD has compiled kernels for plain
sums, for signs and levels, and for products of two factors. Every other optimizer, and every processor without compiled
kernels, gets the written sum.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridpar.codegen import LANES
from hybridpar.comm.transport import flat_view

if TYPE_CHECKING:
    from hybridpar.codegen.build import Function


@dataclass(frozen=True)
class Sgd:
    """A step of SGD on multiples of sums, with the options of torch.

    Attributes:
        lr: Learning rate.
        momentum: Of the momentum buffer; 0 where there is none.
        weight_decay: What parameters are multiplied with and added to their gradients.
        nesterov: Use Nesterov's momentum.
        maximize: Step up the gradient.
        factor: What sums are multiplied with.
    """

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    factor: float = 1.0

    def step(self, part: Tensor, gradient: Tensor, buffer: Tensor | None) -> None:
        """Step some elements, whose gradients have been multiplied."""
        torch._fused_sgd_(
            [part],
            [gradient],
            [] if buffer is None else [buffer],
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            maximize=self.maximize,
            dampening=0.0,
            is_first_step=False,
        )

    @functools.cached_property
    def kernels(self) -> dict[str, Function]:
        """The compiled kernels of this step, by the kind of sums; for parameters in float32."""
        return self._of_this_step(functions())

    @functools.cached_property
    def coded_kernels(self) -> dict[str, Function]:
        """The same where codecs are used."""
        return self._of_this_step(functions(coded=True))

    def _of_this_step(self, kernels: dict[str, Function]) -> dict[str, Function]:
        kind = "nesterov" if self.nesterov else "momentum" if self.momentum else "plain"
        ending = f"_{kind}_decay" if self.weight_decay else f"_{kind}"
        return {name.removesuffix(ending): kernel for name, kernel in kernels.items() if name.endswith(ending)}

    @functools.cached_property
    def rates(self) -> tuple[float, ...]:
        """The last arguments of a kernel."""
        factor = -self.factor if self.maximize else self.factor  # the decay still makes parameters smaller
        return factor, -self.lr, self.weight_decay, self.momentum, 1.0


class Received(ABC):
    """The sum of a parameter's gradients over the workers, not yet written; valid until the next step begins."""

    #: Whether some elements can be written without the others.
    in_pieces = False

    @abstractmethod
    def write(self, out: Tensor, start: int = 0) -> None:
        """Write elements of the sum.

        Args:
            out: 1-D in memory order; as large as the parameter where the sum has no pieces.
            start: The first element that is written.
        """

    @abstractmethod
    def is_finite(self) -> bool:
        """Whether all elements are finite."""

    def sgd(self, weight: Tensor, momentum: Tensor | None, options: Sgd, squares: Tensor) -> bool:
        """Take a step of SGD on a multiple of the sum, in one pass; False where there is no kernel for it.

        Args:
            weight: The parameter, dense in memory.
            momentum: Its momentum buffer, if it has one; with the same strides.
            options: Of the step.
            squares: Where the sum of squares of the multiple goes, 0-d float64.
        """
        return False


class Sum(Received):
    """A sum of tensors that lie in memory as they are, each as far from the next."""

    in_pieces = True

    def __init__(self, terms: Sequence[Tensor]) -> None:
        self._terms = terms

    def write(self, out: Tensor, start: int = 0) -> None:
        first, *others = (term[start : start + out.numel()] for term in self._terms)
        if others:
            torch.add(first, others[0], out=out)
        else:
            out.copy_(first)
        for other in others[1:]:
            out.add_(other)

    def is_finite(self) -> bool:
        return all([bool(torch.isfinite(term).all()) for term in self._terms])  # noqa: C419 - a call for each otherwise

    def sgd(self, weight: Tensor, momentum: Tensor | None, options: Sgd, squares: Tensor) -> bool:
        kernel, first = options.kernels.get("sgd"), self._terms[0]
        if kernel is None or weight.dtype != torch.float32:
            return False
        count = weight.numel() // LANES * LANES
        apart = self._terms[1].data_ptr() - first.data_ptr() if len(self._terms) > 1 else 0
        addresses = weight.data_ptr(), 0 if momentum is None else momentum.data_ptr(), first.data_ptr()
        numbers = count, len(self._terms), apart // first.element_size()
        kernel(*addresses, squares.data_ptr(), *numbers, *options.rates)
        if count < weight.numel():  # elements that fill no vector
            rest = torch.empty(weight.numel() - count, dtype=weight.dtype)
            self.write(rest, count)
            rest.mul_(options.factor)
            squares += torch.dot(rest, rest)
            buffer = None if momentum is None else flat_view(momentum)[count:]
            options.step(flat_view(weight)[count:], rest, buffer)
        return True


class Decoded(Received):
    """What a coder decodes."""

    def __init__(self, coder: Any) -> None:
        self._coder = coder  # a `Coder`, whose module imports this one

    def write(self, out: Tensor, start: int = 0) -> None:
        self._coder.finish(out)

    def is_finite(self) -> bool:
        out = torch.empty(self._coder.spec.count, dtype=torch.float32, device=self._coder.spec.device)
        self._coder.finish(out)
        return bool(torch.isfinite(out).all())


#: Ranges along a parameter's first dimension, each with the messages whose sum it is, by rank.
Messages = list[tuple[int, int, list[Tensor]]]


class Signs(Decoded):
    """Signs, and two levels for each group of `length` values; messages are [a0 of each][a1 of each][bits]."""

    def __init__(self, coder: Any, length: int, parts: Messages) -> None:
        super().__init__(coder)
        self._length, self._parts = length, parts
        self._levels = [
            message[: 8 * (stop - start)].view(torch.float32) for start, stop, messages in parts for message in messages
        ]

    def is_finite(self) -> bool:
        """Infinity and NaN reach the levels of their group."""
        return bool(torch.isfinite(torch.cat(self._levels)).all()) if self._levels else True

    def sgd(self, weight: Tensor, momentum: Tensor | None, options: Sgd, squares: Tensor) -> bool:
        workers = len(self._parts[0][2]) if self._parts else 0
        if workers not in (1, 2) or self._length % LANES:
            return False
        kernel = options.coded_kernels.get(f"signs{workers}")
        if kernel is None or weight.dtype != torch.float32:
            return False
        sums = torch.empty(len(self._parts), dtype=torch.float64)
        for number, (start, stop, messages) in enumerate(self._parts):
            skipped = weight.element_size() * start * self._length
            addresses = weight.data_ptr() + skipped, 0 if momentum is None else momentum.data_ptr() + skipped
            signs = messages[0].data_ptr(), messages[-1].data_ptr()
            numbers = sums.data_ptr() + sums.element_size() * number, stop - start, self._length
            kernel(*addresses, *signs, *numbers, *options.rates)
        torch.sum(sums, 0, out=squares)
        return True


class Factors(Decoded):
    """A multiple of a matrix left^T right of two factors with a few rows each, those of the left of length 1."""

    def __init__(self, coder: Any, factors: Callable[[], tuple[Tensor, Tensor]], scale: float) -> None:
        super().__init__(coder)
        self._factors, self._scale = factors, scale

    def is_finite(self) -> bool:
        """No value is larger than the sum of those of the right factor. NaN in the left is in the right as well."""
        return bool(torch.isfinite(self._factors()[1].abs().sum()))

    def sgd(self, weight: Tensor, momentum: Tensor | None, options: Sgd, squares: Tensor) -> bool:
        left, right = self._factors()
        kernel = options.coded_kernels.get(f"product{left.shape[0]}")
        if kernel is None or weight.dtype != torch.float32 or right.shape[1] % LANES:
            return False
        addresses = weight.data_ptr(), 0 if momentum is None else momentum.data_ptr(), left.data_ptr(), right.data_ptr()
        kernel(*addresses, squares.data_ptr(), left.shape[1], right.shape[1], self._scale, *options.rates)
        return True


def hand_over(source: Tensor, target: Tensor, squares: Tensor) -> None:
    """Copy values, and add up their squares."""
    kernel = functions().get("hand_over")
    if kernel is None or source.dtype != torch.float32:
        target.copy_(source)
        squares.copy_(torch.dot(target, target))
        return
    count = source.numel() // LANES * LANES
    kernel(source.data_ptr(), target.data_ptr(), squares.data_ptr(), count)
    if count < source.numel():
        rest = source[count:]
        target[count:].copy_(rest)
        squares += torch.dot(rest, rest)


@functools.cache
def functions(coded: bool = False) -> dict[str, Function]:
    """The kernels of this processor by name, compiled where needed; none where that is not possible.

    Most runs need no `coded` ones, of what codecs wrote: they are many, and take seconds to compile.
    """
    from hybridpar.codegen.build import load_kernels

    source = Path(__file__).parent / "kernels" / "step_source.py"
    return load_kernels("step", [source], arguments=[{"coded": kind} for kind in {False, coded}]) or {}
