"""Tests how layers and their shapes are found without computing, against a pass with values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridpar.errors import UsageError
from hybridpar.tvm_kernels import layers
from hybridpar.tvm_kernels.layers import DepthwiseLayer, NormLayer, tunable_layers
from hybridpar.tvm_kernels.shapes import Direction, Layout


class Net(nn.Module):
    """What a rule about sizes and layouts could get wrong: strides, names of paddings, slices, frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.first = nn.Conv2d(8, 8, (3, 5), (2, 1), (1, 2), (1, 2), groups=8)
        self.norm = nn.BatchNorm2d(8)
        self.same = nn.Conv2d(8, 8, 3, padding="same", groups=8)
        self.halves = nn.Conv2d(8, 12, 1, groups=4, bias=False)
        self.turned = nn.Conv2d(12, 12, 7, padding=3, groups=12).to(memory_format=torch.channels_last)
        self.last = nn.Conv2d(12, 12, 3, groups=12)
        self.stem.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(self.stem(x))).relu_()
        x = torch.cat([self.same(x[:, :, 1:]), x[:, :, :1]], 2)
        y: Tensor = self.last(self.turned(self.halves(x)).transpose(2, 3))
        return y


def with_values(
    model: nn.Module, layout: Layout, monkeypatch: pytest.MonkeyPatch, size: int = 32
) -> tuple[list[DepthwiseLayer], list[NormLayer]]:
    def refuse() -> None:
        raise RuntimeError("no fake tensors")

    with monkeypatch.context() as patch:
        patch.setattr(layers, "FakeTensorMode", refuse)
        return tunable_layers(model, (2, 3, size, size), layout=layout)


@pytest.mark.parametrize("layout", Layout)
def test_what_is_found_is_what_a_pass_with_values_finds(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    one, other = tunable_layers(net, (2, 3, 32, 32), layout=layout), with_values(net, layout, monkeypatch)
    assert one == other
    assert [layer.name for layer in one[0]] == ["first", "same", "turned", "last"]
    assert one[0][0].needs == (Direction.FORWARD, Direction.WEIGHT_GRADIENT)
    assert one[0][1].needs == tuple(Direction)
    assert [norm.name for norm in one[1]] == ["norm"]
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())


def test_a_layer_that_does_not_fit_is_refused() -> None:
    for sizes in ((1, 4, 9, 9), (1, 3, 1, 1)):
        with pytest.raises(UsageError, match="does not run on an input"):
            tunable_layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1, groups=8)), sizes)
