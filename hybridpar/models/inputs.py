"""The images that a model and its weights are for, as data sets must give them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridpar.models.pretrained import find_torchvision_weights
from hybridpar.models.timm_models import PREFIX, check_tag, check_timm_name
from hybridpar.models.torchvision_models import model_names
from hybridpar.models.weight_files import DEFAULT, HUB, is_published

#: Networks whose weights of torchvision are for values in [-1, 1], to which they scale images themselves only where
#: torchvision loads the weights.
_SYMMETRIC = ("googlenet", "inception_v3")

#: Side of the images that torchvision builds a vision transformer for where no argument says another, in pixels.
_BUILT_FOR = 224


@dataclass(frozen=True)
class ModelInput:
    """The images that a model is for.

    Attributes:
        size: Side of the square images, in pixels.
        mean: Of each channel of pixels in [0, 1], taken off first.
        std: Of each channel, divided by.
        interpolation: How images are resized: `bilinear`, `bicubic`, ...
        crop_ratio: `size` as a part of the shorter side that test images are resized to before their centre is cut out.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_ratio: float


def model_input(name: str, weights: str | None, args: Mapping[str, object] | None = None) -> ModelInput | None:
    """The images that a model is for, from the configuration of its published weights or of the model.

    Without weights, and with weights from elsewhere, a model of timm is given the images of its own configuration
    (`pretrained_cfg`), as timm's training script does. A model of torchvision with a file of weights is given those of
    the weights that torchvision publishes under the file's name, else those of its default weights.
    """
    published = weights is not None and is_published(weights)
    if name.startswith(PREFIX):
        return _of_timm(name, weights if published else None, args or {})
    if weights is None:
        return None
    if (published and "_Weights." in weights) or name in model_names():
        return _of_torchvision(name, weights, published, args or {})
    return None


def _of_torchvision(name: str, weights: str, published: bool, args: Mapping[str, object]) -> ModelInput:
    entry = find_torchvision_weights(weights if published else DEFAULT, name)
    if not published:
        entry = next((one for one in type(entry) if Path(one.url).name == Path(weights).name), entry)
    preset: Any = entry.transforms()
    ratio = int(preset.crop_size[0]) / int(preset.resize_size[0])
    size = args.get("image_size", _BUILT_FOR if name.startswith("vit_") and not published else None)
    mean, std = tuple(preset.mean), tuple(preset.std)
    if name in _SYMMETRIC and not args.get("transform_input"):
        mean, std = (0.5,) * 3, (0.5,) * 3
    side = size if isinstance(size, int) else int(preset.crop_size[0])
    return ModelInput(side, mean, std, str(preset.interpolation.value), ratio)


def _of_timm(name: str, weights: str | None, args: Mapping[str, object]) -> ModelInput | None:
    own = name.removeprefix(PREFIX)
    if own.startswith(HUB):
        return None  # its configuration is on the hub
    check_timm_name(name)
    resolve = importlib.import_module("timm.data").resolve_data_config

    full = own if weights in (None, DEFAULT) else f"{own.partition('.')[0]}.{weights}"
    check_tag(full)
    configuration: Any = importlib.import_module("timm.models").get_pretrained_cfg(full)
    if configuration is None:
        return None  # a former name
    size = args.get("img_size")
    found = resolve({"img_size": size} if isinstance(size, int) else {}, configuration.to_dict())
    return ModelInput(
        int(found["input_size"][-1]),
        tuple(found["mean"]),
        tuple(found["std"]),
        str(found["interpolation"]),
        float(found["crop_pct"]),
    )
