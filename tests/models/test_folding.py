"""BatchNorm layers are folded where that is possible, and only there; the result is the same up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridpar.models.export import fold_batch_norm


def folded(net, *shape):
    """The net with statistics that are not trivial, folded; and how much a float64 copy differs from it."""
    with torch.no_grad():
        for name, tensor in (*net.named_buffers(), *net.named_parameters()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2.0) if "var" in name else tensor.normal_()
    net, images = net.double().eval(), torch.randn(3, *shape, dtype=torch.float64)
    program = torch.export.export(net, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    result = fold_batch_norm(program)
    for batch in (images, images[:1]):
        torch.testing.assert_close(result.module(batch), net(batch), rtol=1e-10, atol=1e-10)
    return result


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()), (3, 6, 6)),
        (nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1, groups=4), nn.BatchNorm2d(4, affine=False), nn.ReLU()), (4, 6, 6)),
        (nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4, eps=0.1)), (3, 6)),
        (nn.Sequential(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4)), (2, 4, 4, 4)),
        (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), (5,)),
    ],
)
def test_a_norm_behind_a_layer_is_folded(net, shape):
    result = folded(net, *shape)
    assert (result.folded, result.layers) == (1, 1)
    assert len(list(result.module.parameters())) == 2
    assert not list(result.module.buffers())


class TwoReaders(nn.Module):
    """Something else reads what the convolution gives."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, images):
        found = self.conv(images)
        return self.norm(found) + found


class SharedLayer(nn.Module):
    """One convolution in front of two norms."""

    def __init__(self):
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, images):
        return self.second(self.conv(self.first(self.conv(images))))


@pytest.mark.parametrize(
    ("net", "counts"),
    [
        (TwoReaders(), (0, 1)),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1)), (0, 1)),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)), (0, 1)),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4)), (0, 1)),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)), (0, 1)),
        (SharedLayer(), (2, 2)),
    ],
)
def test_other_norms_stay(net, counts):
    result = folded(net, 3, 6, 6)
    assert (result.folded, result.layers) == counts
