"""Published weights by name, of torchvision, timm and the Hugging Face hub; and the images that they are for.

What was downloaded once is in the caches of torch (`TORCH_HOME`) and of the hub (`HF_HOME`), and is used from there
without a network.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.errors import HybridparError, UsageError, nearest, shortened
from hybridpar.models.build import HUB, PREFIX, check_model_name, create_timm_model, model_names, timm_module

if TYPE_CHECKING:
    from torch import nn

#: The weights that a library takes for the best of a model.
DEFAULT = "default"

#: What names of files of weights end in, whether or not there is such a file.
SUFFIXES = (".pt", ".pth", ".safetensors", ".bin", ".ckpt", ".tar")

#: Arguments of timm's models that their weights do not depend on.
_NOT_OF_WEIGHTS = ("num_classes", "drop_rate", "drop_path_rate")

#: Networks whose weights of torchvision are for values in [-1, 1], to which they scale images themselves only where
#: torchvision loads the weights.
_SYMMETRIC = ("googlenet", "inception_v3")

#: Side of the images that torchvision builds a vision transformer for where no argument says another, in pixels.
_BUILT_FOR = 224


def is_file(source: str) -> bool:
    """Whether what a user names as weights is a file or directory, and not a name of published weights."""
    if source == DEFAULT or source.startswith(HUB):
        return False
    return Path(source).suffix in SUFFIXES or os.sep in source or Path(source).exists()


def is_published(source: str) -> bool:
    """Whether what a user names as weights is a name of published weights of torchvision or timm."""
    return not is_file(source) and not source.startswith(HUB)


def published_weights(
    source: str, name: str | None, model: nn.Module, args: Mapping[str, object]
) -> tuple[str, Mapping[str, Any]]:
    """Weights by name: what they are called in full, and their tensors."""
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if name is None and architecture:
        name = PREFIX + architecture
    try:
        if source.startswith(HUB):
            return source, timm_module().models.load_state_dict_from_hf(source.removeprefix(HUB), weights_only=True)
        if "_Weights." in source or (name is not None and name in model_names()):
            weights = find_torchvision_weights(source, name)
            return str(weights), weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        if name is not None and name.startswith(PREFIX):
            return _of_timm(source, name, getattr(model, "_model_args", args))  # timm keeps them
    except HybridparError:
        raise
    except Exception as error:  # whatever the clients of torch and of the hub raise
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise UsageError(
            f"the weights {shortened(source)} cannot be had: {type(error).__name__}: {shortened(reason, 300)}",
            "Published weights are downloaded once, and then read from the caches of torch and of the hub.",
            "See that the network is up, or download them elsewhere, and name the file: --weights FILE.",
        ) from error
    raise UsageError(
        f"--weights {shortened(source)}{f' with {name}' if name else ''}: there is no such file",
        "Models of torchvision and timm have weights by name; others take a file, a checkpoint, a run directory, or "
        "hf-hub:OWNER/NAME.",
        "Name a file.",
    )


def find_torchvision_weights(source: str, name: str | None) -> Any:
    """The entry of torchvision's enumeration of weights."""
    import torchvision

    names = {DEFAULT}
    try:
        if "_Weights." in source:
            return torchvision.models.get_weight(source)
        weights = torchvision.models.get_model_weights(name or "")
        names |= weights.__members__.keys()
        return weights[source.upper()]
    except (ValueError, KeyError, AttributeError) as error:
        what = f"--weights {shortened(source)}: torchvision has no such weights of {name}, and there is no such file"
        raise UsageError(what, nearest(source.upper(), names)) from error


def _of_timm(source: str, name: str, args: Mapping[str, object]) -> tuple[str, Mapping[str, Any]]:
    full = name if source == DEFAULT or HUB in name else f"{name.partition('.')[0]}.{source}"
    check_model_name(full)
    same = {key: value for key, value in args.items() if key not in _NOT_OF_WEIGHTS}
    reference = create_timm_model(full, same, pretrained=True)
    config: Any = reference.pretrained_cfg
    label = ".".join(str(part) for part in (config.get("architecture") or full, config.get("tag")) if part)
    return PREFIX + label, reference.state_dict()


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
        return _input_of_timm(name, weights if published else None, args or {})
    if weights is not None and ((published and "_Weights." in weights) or name in model_names()):
        return _input_of_torchvision(name, weights, published, args or {})
    return None


def _input_of_torchvision(name: str, weights: str, published: bool, args: Mapping[str, object]) -> ModelInput:
    entry = find_torchvision_weights(weights if published else DEFAULT, name)
    if not published:
        entry = next((other for other in type(entry) if Path(other.url).name == Path(weights).name), entry)
    preset: Any = entry.transforms()
    ratio = int(preset.crop_size[0]) / int(preset.resize_size[0])
    size = args.get("image_size", _BUILT_FOR if name.startswith("vit_") and not published else None)
    mean, std = tuple(preset.mean), tuple(preset.std)
    if name in _SYMMETRIC and not args.get("transform_input"):
        mean, std = (0.5,) * 3, (0.5,) * 3
    side = size if isinstance(size, int) else int(preset.crop_size[0])
    return ModelInput(side, mean, std, str(preset.interpolation.value), ratio)


def _input_of_timm(name: str, weights: str | None, args: Mapping[str, object]) -> ModelInput | None:
    if name.startswith(PREFIX + HUB):
        return None  # its configuration is on the hub
    full = name if weights in (None, DEFAULT) else f"{name.partition('.')[0]}.{weights}"
    check_model_name(full)
    configuration = timm_module().models.get_pretrained_cfg(full.removeprefix(PREFIX))
    if configuration is None:
        return None  # a former name
    resolve = importlib.import_module("timm.data").resolve_data_config
    size = args.get("img_size")
    wanted = resolve({"img_size": size} if isinstance(size, int) else {}, configuration.to_dict())
    side, mean, std = wanted["input_size"][-1], tuple(wanted["mean"]), tuple(wanted["std"])
    return ModelInput(int(side), mean, std, str(wanted["interpolation"]), float(wanted["crop_pct"]))
