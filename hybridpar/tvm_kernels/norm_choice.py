"""Why: a fused norm is used only where it was measured to be faster than torch, on this device and these threads.

What decides is the number of rows (pixels of all images), of channels, and the activation. A measurement is paired:
both sides run by turns, forward and backward through autograd, on tensors that take turns so that none is still in the
caches; ratios are taken within turns, and their median decides.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpar.errors import UsageError
from hybridpar.tvm_kernels.batch_norm_act import STOCK, batch_norm_then, fusable
from hybridpar.tvm_kernels.norm_swap import NormPair, find_norms
from hybridpar.tvm_kernels.schedules.norm_rows import ACTIVATIONS

#: Turns of a measurement: at least, and at most.
_LEAST, _MOST = 7, 41

#: Bytes of input over which tensors take turns.
_COLD = 64 << 20

#: Values on which the error is taken.
_CHECKED = 1 << 20

_TEXT = re.compile(r"(\d+)x(\d+) (\w+)")
_EPS = 1e-5


@dataclass(frozen=True, order=True)
class NormShape:
    """What a norm's time depends on.

    Attributes:
        rows: Pixels of all images, N * H * W.
        channels: C.
        act: The activation.
    """

    rows: int
    channels: int
    act: str

    @property
    def text(self) -> str:
        """As "100352x96 relu6"."""
        return f"{self.rows}x{self.channels} {self.act}"

    @classmethod
    def parse(cls, text: str) -> NormShape:
        """From its text.

        Raises:
            UsageError: It is none.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[3] not in ACTIVATIONS or not int(match[1]) * int(match[2]):
            raise UsageError(
                f"{text!r} is no shape of a norm",
                f"It is rows x channels and one of {', '.join(ACTIVATIONS)}.",
                'Write it as "100352x96 relu6".',
            )
        return cls(int(match[1]), int(match[2]), match[3])


@dataclass(frozen=True)
class NormTime:
    """A measurement of forward and backward together.

    Attributes:
        ms: Of the kernels; the median of torch's times over the median of the paired ratios.
        stock_ms: Of torch, its median.
        error: The largest error of the result and the three gradients against float64, each relative to its largest
            value.
    """

    ms: float
    stock_ms: float
    error: float

    @property
    def faster(self) -> bool:
        """Whether the kernels were faster than torch."""
        return self.ms < self.stock_ms


@dataclass
class NormTimes:
    """Measurements of one device, by shape and threads; called, it is the `choice` of `fuse_norms`.

    Attributes:
        times: What was measured.
    """

    times: dict[tuple[NormShape, int], NormTime] = field(default_factory=dict)

    def __call__(self, rows: int, channels: int, act: str, threads: int) -> bool:
        """Whether the kernels were measured, and were faster."""
        found = self.times.get((NormShape(rows, channels, act), threads))
        return found is not None and found.faster

    def measure(self, shapes: Mapping[str, NormShape], threads: int, seconds: float = 1.0) -> None:
        """Measure what has not been measured.

        Args:
            shapes: Shapes by layer, as `norm_shapes` gives them; each is measured once.
            threads: Of torch.
            seconds: At most for one shape, but for its smallest number of turns.
        """
        for shape in sorted(set(shapes.values())):
            if (shape, threads) not in self.times:
                found = measure_norm(shape.rows, shape.channels, shape.act, threads, seconds)
                self.times[shape, threads] = NormTime(*found)


def measure_norm(rows: int, channels: int, act: str, threads: int, seconds: float = 1.0) -> tuple[float, float, float]:
    """Time the kernels against torch, forward and backward of one training step.

    Args:
        rows: Pixels of all images, at least 2.
        channels: Channels.
        act: Activation.
        threads: Of torch, on both sides.
        seconds: After which no further turn is begun, but for the least number of them.

    Returns:
        ms, stock_ms and error, as in `NormTime`.

    Raises:
        UsageError: Kernels cannot be had here, or there are not two rows.
    """
    images = _images(rows, channels)
    if not fusable(images, None, None, None, None, True):
        raise UsageError(
            f"no kernel can norm {rows} rows of {channels} channels here",
            "There must be two values per channel, and kernels.",
            "See the log for why there are none; HYBRIDPAR_KERNELS must not be off.",
        )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours, stock = _Side(channels, act, fused=True), _Side(channels, act, fused=False)
        turns = max(2, min(8, math.ceil(_COLD / (4 * rows * channels))))
        inputs = [_images(rows, channels).requires_grad_() for _ in range(turns)]
        gradients = [_images(rows, channels) for _ in range(turns)]
        times: list[tuple[float, float]] = []
        began = time.perf_counter()
        for turn in range(_MOST + 2):
            x, gradient = inputs[turn % turns], gradients[turn % turns]
            y, other = inputs[(turn + 1) % turns], gradients[(turn + 1) % turns]
            if turn % 2:
                first = ours.run(x, gradient)
                times.append((first, stock.run(y, other)))
            else:
                first = stock.run(x, gradient)
                times.append((ours.run(y, other), first))
            if turn >= _LEAST + 1 and time.perf_counter() - began > seconds:
                break
        times = times[2:]
        stock_ms = statistics.median(own for _, own in times) * 1e3
        ratio = statistics.median(own / fused for fused, own in times)
        return stock_ms / ratio, stock_ms, _error(min(rows, max(2, _CHECKED // channels)), channels, act)
    finally:
        torch.set_num_threads(before)


class _Side:
    """A layer's parameters, and one way to compute it."""

    def __init__(self, channels: int, act: str, fused: bool) -> None:
        self.parameters = [torch.ones(channels, requires_grad=True), torch.zeros(channels, requires_grad=True)]
        self.running = torch.zeros(channels), torch.ones(channels)
        self.act, self.fused = act, fused

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.parameters
        if self.fused:
            return batch_norm_then(x, weight, bias, *self.running, True, 0.1, _EPS, self.act)
        z = functional.batch_norm(x, *self.running, weight, bias, True, 0.1, _EPS)
        # As torchvision's networks have it: in place.
        place = {"relu": functional.relu_, "relu6": _relu6_, "silu": _silu_}
        return place[self.act](z) if self.act in place else z

    def run(self, x: Tensor, gradient: Tensor) -> float:
        """Seconds of forward and backward."""
        began = time.perf_counter()
        torch.autograd.grad(self.forward(x), (x, *self.parameters), gradient)
        return time.perf_counter() - began


def _relu6_(z: Tensor) -> Tensor:
    return functional.relu6(z, inplace=True)


def _silu_(z: Tensor) -> Tensor:
    return functional.silu(z, inplace=True)


def _images(rows: int, channels: int) -> Tensor:
    """One random image of so many pixels, channels last."""
    height = next(one for one in range(math.isqrt(rows), 0, -1) if rows % one == 0)
    return torch.randn(1, channels, height, rows // height).contiguous(memory_format=torch.channels_last)


def _error(rows: int, channels: int, act: str) -> float:
    x, gradient = _images(rows, channels), _images(rows, channels)
    weight, bias = torch.rand(channels) + 0.5, torch.randn(channels)

    def results(dtype: torch.dtype) -> list[Tensor]:
        own = [one.to(dtype).requires_grad_() for one in (x, weight, bias)]
        if dtype == torch.float64:
            y = STOCK[act](functional.batch_norm(own[0], None, None, own[1], own[2], True, 0.0, _EPS))
        else:
            y = batch_norm_then(own[0], own[1], own[2], None, None, True, 0.0, _EPS, act)
        return [y.detach(), *torch.autograd.grad(y, own, gradient.to(dtype))]

    pairs = zip(results(torch.float32), results(torch.float64), strict=True)
    return max(float((one - true).abs().max() / true.abs().max().clamp(min=1e-30)) for one, true in pairs)


def norm_shapes(model: nn.Module, *inputs: Tensor) -> dict[str, NormShape]:
    """The shapes that a model's norms see, by the layer's name.

    Args:
        model: Any model; it is run once, in evaluation mode, and left as it was.
        inputs: What it takes: a micro-batch, as in training.
    """
    pairs: dict[str, NormPair] = {pair.norm: pair for pair in find_norms(model)}
    shapes: dict[str, NormShape] = {}
    hooks = []
    flags = [(module, module.training) for module in model.modules()]
    try:
        for name, pair in pairs.items():

            def look(_: nn.Module, given: tuple[Tensor, ...], name: str = name, act: str = pair.act) -> None:
                (x,) = given
                shapes[name] = NormShape(x.numel() // x.shape[1], x.shape[1], act)

            hooks.append(model.get_submodule(name).register_forward_pre_hook(look))
        model.eval()
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, flag in flags:
            module.training = flag
    return shapes
