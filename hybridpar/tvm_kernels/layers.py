"""Finds the layers of a model that can be tuned, with the shapes and layouts that reach them.

A forward pass on torch's fake tensors, which have no values, costs a fraction of a second, and shows every convolution
and every norm with the shape and the layout that reach it. A model that needs values is run for real.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridpar.errors import user_error
from hybridpar.tvm_kernels.conv_bench import FORMATS
from hybridpar.tvm_kernels.norm_swap import find_norms, fused_norms
from hybridpar.tvm_kernels.op import layout_of
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout, NormShape


@dataclass(frozen=True)
class DepthwiseLayer:
    """A depthwise convolution in a model.

    Attributes:
        name: Of the module.
        shape: With the batch that the model was run with.
        layout: Of its input.
        needs: What a training step computes; a layer behind nothing trainable has no input gradient to compute.
    """

    name: str
    shape: ConvShape
    layout: Layout
    needs: tuple[Direction, ...] = tuple(Direction)


@dataclass(frozen=True)
class NormLayer:
    """A BatchNorm layer in a model, with the activation that can be done with it.

    Attributes:
        name: Of the norm's module.
        shape: With the rows that the model was run with.
        layout: Of its input.
    """

    name: str
    shape: NormShape
    layout: Layout


def is_depthwise(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a module is a convolution with one filter per channel that the operation can replace.

    Subclasses, parametrised and lazy layers have a forward of their own and are left as they are.
    """
    return (
        (type(module) is nn.Conv2d or getattr(type(module), "fx_leaf", False) is True)
        and isinstance(module, nn.Conv2d)
        and module.groups == module.in_channels == module.out_channels > 1
        and module.padding_mode == "zeros"
        and module._reversed_padding_repeated_twice[::2] == module._reversed_padding_repeated_twice[1::2]
    )


def number_padding(module: nn.Conv2d) -> tuple[int, int]:
    """The padding of a layer in numbers, which it may have by name."""
    left, _, top, _ = module._reversed_padding_repeated_twice
    return top, left


def tunable_layers(
    model: nn.Module, sizes: Sequence[int], *, layout: Layout = Layout.CHANNELS_LAST
) -> tuple[list[DepthwiseLayer], list[NormLayer]]:
    """The depthwise convolutions and the norms of a training step, one entry for each time that one runs."""
    convolutions, norms = list[DepthwiseLayer](), list[NormLayer]()
    acts = {pair.norm: pair.act for pair in find_norms(model)} | fused_norms(model)

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if x.ndim == 4 and is_depthwise(module):
            convolutions.append(_depthwise_layer(name, module, x))
        elif x.ndim == 4 and x.numel() > x.shape[1]:
            # Kernels take images of one pixel, which lie either way, too.
            last = x.is_contiguous(memory_format=torch.channels_last)
            shape = NormShape(x.numel() // x.shape[1], int(x.shape[1]), acts[name])
            norms.append(NormLayer(name, shape, Layout.CHANNELS_LAST if last else Layout.CONTIGUOUS))

    hooks = [
        module.register_forward_pre_hook(partial(note, name))
        for name, module in model.named_modules()
        if name in acts or is_depthwise(module)
    ]
    try:
        if hooks:
            _look(model, sizes, layout, convolutions, norms)
    finally:
        for hook in hooks:
            hook.remove()
    return convolutions, norms


def step_keys(
    model: nn.Module, sizes: Sequence[int], layout: Layout, threads: int, device: str, dtype: str = "float32"
) -> Counter[KernelKey]:
    """What can be tuned in a training step, and how often each of it runs."""
    convolutions, _ = tunable_layers(model, sizes, layout=layout)
    return Counter(
        KernelKey(direction, layer.shape, layer.layout, threads, device, dtype)
        for layer in convolutions
        for direction in layer.needs
    )


def _look(model: nn.Module, sizes: Sequence[int], layout: Layout, *noted: list[Any]) -> None:
    """Run the model's forward pass in the cheapest way that it allows; what a pass that failed noted is forgotten."""
    example = torch.zeros(tuple(sizes), device=next(model.parameters()).device)
    example = example.contiguous(memory_format=FORMATS[layout])
    try:
        fake = FakeTensorMode()
        named = [*model.named_parameters(), *model.named_buffers()]
        with fake:
            _run(model, {name: fake.from_tensor(tensor) for name, tensor in named}, fake.from_tensor(example))
        return
    except Exception:  # the model needs values; any other error is raised again below
        for layers in noted:
            layers.clear()
    try:
        _run(model, {name: tensor.detach().clone() for name, tensor in model.named_buffers()}, example)
    except Exception as error:
        what = f"{type(model).__name__} does not run on an input of {'x'.join(map(str, sizes))}"
        fix = "Name another input; what can be tuned is found by running the model."
        raise user_error(what, error, fix=fix) from error


def _depthwise_layer(name: str, module: nn.Conv2d, x: Tensor) -> DepthwiseLayer:
    pairs = (module.kernel_size, module.stride, number_padding(module), module.dilation)
    shape = ConvShape(*map(int, x.shape), *((rows, columns) for rows, columns in pairs))  # type: ignore[arg-type]
    wanted = (True, x.requires_grad, module.weight.requires_grad)
    needs = tuple(direction for direction, needed in zip(Direction, wanted, strict=True) if needed)
    # Images of one pixel lie either way; torch takes them for contiguous ones.
    return DepthwiseLayer(name, shape, layout_of(x) or Layout.CONTIGUOUS, needs)


def _run(model: nn.Module, state: dict[str, Tensor], example: Tensor) -> None:
    devices = [] if example.device.type != "cuda" else [example.device]
    with torch.random.fork_rng(devices=devices):
        torch.func.functional_call(model, state, (example,))
