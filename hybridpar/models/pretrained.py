"""Published weights by name, of torchvision, timm and the Hugging Face hub; and the images that they are for.

What was downloaded once is in the caches of torch (`TORCH_HOME`) and of the hub (`HF_HOME`), and is used from there
without a network.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.errors import HybridparError, UsageError, nearest, not_installed, shortened
from hybridpar.models.libraries import HUB, PREFIX, build_timm_model, check_library_name, model_names, timm_module
from hybridpar.models.weight_files import DEFAULT, clean, is_published, read_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Files of a hub's repository that hold weights, the first that is there.
_HUB_FILES = ("model.safetensors", "pytorch_model.bin", "model.pt", "model.pth")

#: Arguments of timm's models that their weights do not depend on.
_NOT_OF_WEIGHTS = ("num_classes", "drop_rate", "drop_path_rate")

#: Networks whose weights of torchvision are for values in [-1, 1], to which they scale images themselves only where
#: torchvision loads the weights.
_SYMMETRIC = ("googlenet", "inception_v3")

#: Side of the images that torchvision builds a vision transformer for where no argument says another, in pixels.
_BUILT_FOR = 224


def published_weights(
    source: str, name: str | None, model: nn.Module, args: Mapping[str, object]
) -> tuple[str, dict[str, Tensor]]:
    """Weights by name: what they are called in full, and their tensors."""
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if name is None and architecture:
        name = PREFIX + architecture
    try:
        if source.startswith(HUB):
            return source, _from_hub(source)
        if "_Weights." in source or (name is not None and name in model_names()):
            weights = find_torchvision_weights(source, name)
            state = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
            return str(weights), clean(state, weights)
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


def _of_timm(source: str, name: str, args: Mapping[str, object]) -> tuple[str, dict[str, Tensor]]:
    full = name if source == DEFAULT or HUB in name else f"{name.partition('.')[0]}.{source}"
    same = {key: value for key, value in args.items() if key not in _NOT_OF_WEIGHTS}
    reference = build_timm_model(full, same, pretrained=True)
    config: Any = reference.pretrained_cfg
    label = ".".join(str(part) for part in (config.get("architecture") or full, config.get("tag")) if part)
    return PREFIX + label, reference.state_dict()


def _from_hub(source: str) -> dict[str, Tensor]:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise not_installed(f"--weights {shortened(source)} needs huggingface_hub", "timm") from error
    repository, _, revision = source.removeprefix(HUB).partition("@")
    problem: Exception = FileNotFoundError(f"it has none of {', '.join(_HUB_FILES)}")
    for file in _HUB_FILES:
        try:
            return read_weights(Path(hf_hub_download(repository, file, revision=revision or None)))
        except EntryNotFoundError as error:
            problem = error
    raise problem


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
    check_library_name(full)
    configuration = timm_module().models.get_pretrained_cfg(full.removeprefix(PREFIX))
    if configuration is None:
        return None  # a former name
    resolve = importlib.import_module("timm.data").resolve_data_config
    size = args.get("img_size")
    wanted = resolve({"img_size": size} if isinstance(size, int) else {}, configuration.to_dict())
    side, mean, std = wanted["input_size"][-1], tuple(wanted["mean"]), tuple(wanted["std"])
    return ModelInput(int(side), mean, std, str(wanted["interpolation"]), float(wanted["crop_pct"]))
