"""Reads weights from `.pt` and `.safetensors` files, and from checkpoints of hybridpar; no code in them runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.errors import UsageError, nearest, shortened
from hybridpar.formats.file_reader import Unreadable, read_torch
from hybridpar.formats.tensor_files import read_tensors, shards_of
from hybridpar.models.libraries import HUB

if TYPE_CHECKING:
    from torch import Tensor

#: What the weights are called in a checkpoint with other things beside them, averaged ones first, as in timm.
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")

#: What names of files of weights end in, whether or not there is such a file.
_SUFFIXES = (".pt", ".pth", ".safetensors", ".bin", ".ckpt", ".tar")

#: The weights that a library takes for the best of a model.
DEFAULT = "default"

#: What wrappers (DDP, torch.compile) put in front of names.
_WRAPPERS = ("module.", "_orig_mod.")

#: DenseNet files of torchvision have names such as norm.1, which its modules no longer have.
_DENSE = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")


def is_file(source: str) -> bool:
    """Whether what a user names as weights is a file or directory, and not a name of published weights."""
    if source == DEFAULT or source.startswith(HUB):
        return False
    return Path(source).suffix in _SUFFIXES or os.sep in source or Path(source).exists()


def is_published(source: str) -> bool:
    """Whether what a user names as weights is a name of published weights of torchvision or timm."""
    return not is_file(source) and not source.startswith(HUB)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of weights, or of a checkpoint."""
    check_file(path)
    folder = _checkpoint_of(path) if path.is_dir() else path.parent
    files = [folder / name for name in shards_of("model", os.listdir(folder))] if path.is_dir() else [path]
    try:
        if files[0].suffix != ".safetensors":
            return clean(read_torch(path), path)
        return clean({name: tensor for file in files for name, tensor in read_tensors(file).items()}, path)
    except (Unreadable, OSError) as error:
        raise UsageError(
            f"--weights {shortened(path)} cannot be read: {shortened(error)}",
            "It must be a file of torch.save with tensors and plain values alone, or one of safetensors.",
            "Copy or download it again, or save the weights alone: torch.save(model.state_dict(), file).",
        ) from error


def check_file(path: Path) -> None:
    """Refuse a file or directory that is not there; nothing is imported."""
    if not path.exists():
        there = [other.name for other in path.parent.glob("*") if other.suffix in _SUFFIXES]
        raise UsageError(
            f"--weights {shortened(path)}: there is no such file",
            nearest(path.name, there) if there else f"No file of weights is in {shortened(path.parent.resolve())}.",
            "Name a .pt, .pth or .safetensors file, a checkpoint, a run directory, `default`, or weights by name.",
        )


def _checkpoint_of(directory: Path) -> Path:
    """A `step-N` directory, or the newest one of a run directory."""
    steps = [step for step in directory.glob("checkpoints/step-*") if step.name.removeprefix("step-").isdigit()]
    steps.sort(key=lambda step: int(step.name.removeprefix("step-")), reverse=True)
    for folder in (directory, *steps):
        if (folder / "manifest.json").is_file():  # else it is not whole
            return folder
    raise UsageError(
        f"--weights {shortened(directory)}: the directory is no checkpoint and no run",
        "A checkpoint is a directory step-N with a manifest.json, and a run has these under checkpoints/.",
        "Name one of these, or a file.",
    )


def clean(loaded: Any, source: object) -> dict[str, Tensor]:
    """Tensors by name from what a file held."""
    import torch

    held = loaded
    if isinstance(held, Mapping):
        held = next((held[key] for key in _NESTED if isinstance(held.get(key), Mapping)), held)
    state = _State()
    for name, value in held.items() if isinstance(held, Mapping) else ():
        if isinstance(name, str) and isinstance(value, torch.Tensor):
            while name.startswith(_WRAPPERS):
                name = name.partition(".")[2]
            state[_DENSE.sub(r"\1\2", name)] = value
    if not state:
        keys = ", ".join(map(repr, list(held)[:5])) if isinstance(held, Mapping) else type(held).__name__
        raise UsageError(
            f"--weights {shortened(source)} holds no weights",
            f"Tensors by name, or under {', '.join(_NESTED)}, are wanted; it has {shortened(keys) or 'nothing'}.",
            "Save them: torch.save(model.state_dict(), file).",
        )
    state._metadata = getattr(held, "_metadata", None)
    return state


class _State(dict[str, "Tensor"]):
    """Tensors by name, with the versions of the modules that they are of, where these are known."""

    _metadata: Any = None
