"""The models of the sweep, each with the smallest input that it accepts unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn

_SMALL = (3, 64, 64)
_VIDEO = (3, 4, 64, 64)

#: Classification models at 64x64.
_CLASSIFICATION = (
    "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet1_0", "shufflenet_v2_x1_0",
    "efficientnet_b0", "regnet_x_400mf", "regnet_y_400mf", "googlenet", "resnet18", "resnet34", "resnet50",
    "resnext50_32x4d", "swin_t", "swin_v2_t", "convnext_tiny", "efficientnet_v2_s", "vgg11_bn", "densenet121",
)  # fmt: skip
_OTHERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "lraspp_mobilenet_v3_large": (_SMALL, {"weights_backbone": None}),
    "deeplabv3_mobilenet_v3_large": (_SMALL, {"weights_backbone": None}),
    "fcn_resnet50": (_SMALL, {"weights_backbone": None}),
    "vit_b_16": (_SMALL, {"image_size": 64}),
    "r3d_18": (_VIDEO, {}),
    "mc3_18": (_VIDEO, {}),
    "r2plus1d_18": (_VIDEO, {}),
    "inception_v3": ((3, 299, 299), {"init_weights": False}),
    "maxvit_t": ((3, 224, 224), {}),
}
_OPTIONS: dict[str, dict[str, Any]] = {"googlenet": {"init_weights": False}}

#: Checked in float64: their BatchNorms normalise over very few values at this size (two, in DeepLab's pooled branch),
#: and amplify a changed order of float32 additions to some percent; Inception, with its many branches, to 1.8e-5. In
#: float64 the same amplification stays below 1e-7.
_DOUBLE = ("densenet121", "deeplabv3_mobilenet_v3_large", "inception_v3")

SWEEP: tuple[str, ...] = (*_CLASSIFICATION, *_OTHERS)


def sweep_model(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model of the sweep with fresh weights, and a micro-batch of two."""
    shape, options = _OTHERS.get(name, (_SMALL, _OPTIONS.get(name, {})))
    build: Callable[..., nn.Module] = torchvision.models.get_model
    dtype = torch.float64 if name in _DOUBLE else torch.float32
    return build(name, weights=None, **options).to(dtype), torch.randn(2, *shape, dtype=dtype)
