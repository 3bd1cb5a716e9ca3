"""Checks before the first step that the outputs of a model fit the classes of the data.

The command line trains with cross-entropy, so a model must turn a batch of images into scores of shape
(batch, classes): a tensor, or one among other outputs (`hybridpar.models.outputs`). Torch trains a head of 1,000
outputs on 10 classes without a word, and answers other misfits with an error in the middle of the loss.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError, user_error
from hybridpar.models import article, autocast
from hybridpar.models.deferred import MEASURED_BYTES, imagined, is_deferred, without_values
from hybridpar.models.outputs import main_output
from hybridpar.models.state import untouched

#: Images of the batch that the model is tried on: BatchNorm needs two.
SAMPLES = 2


def check_outputs(
    model: nn.Module,
    name: str,
    classes: int,
    sample_shape: Sequence[int],
    config: TrainConfig,
    device: torch.device,
) -> None:
    """Refuse a model that does not turn images into one score per class.

    It is tried on two random images, in training and in evaluation mode; of a large model only shapes are computed.
    Parameters, buffers, attributes of modules and the states of random generators are afterwards what they were.
    """
    if not is_deferred(model):
        model.to(device)
        if sum(param.nbytes for param in model.parameters()) > MEASURED_BYTES:
            with contextlib.suppress(UsageError, RuntimeError, NotImplementedError):  # where values are needed
                light = without_values(model)
                if is_deferred(light):  # else, as of a scripted module, it is a whole copy
                    return check_outputs(light, name, classes, sample_shape, config, device)
    images = torch.randn(SAMPLES, *sample_shape, generator=torch.Generator().manual_seed(0)).to(device)
    for training in (True, False):
        try:
            outputs = _outputs(model, images, config, training=training)
        except Exception as error:
            fix = "" if ":" in name else "Choose another --image-size, or another model."
            shape = ", ".join(map(str, images.shape))
            raise user_error(f"{name} failed on images of shape ({shape})", error, fix=fix) from error
        _require_scores(outputs, name, classes, "" if training else " in evaluation mode")


def _outputs(model: nn.Module, images: Tensor, config: TrainConfig, *, training: bool) -> Any:
    with (
        warnings.catch_warnings(),
        untouched(model, training=training),
        torch.no_grad(),
        autocast(config.amp, images.device),
    ):
        warnings.simplefilter("ignore")  # about passes without gradients; the real ones come in training
        if not is_deferred(model):
            return model(images)
        with imagined(model, images.device) as mode:
            return model(mode.from_tensor(images))


def _require_scores(outputs: Any, name: str, classes: int, when: str) -> None:
    wanted = f"a tensor of shape (batch, {classes}) is needed"
    try:
        scores: Tensor = main_output(outputs)
    except UsageError as error:
        fix = "Wrap it, or use Trainer with your own loss."
        raise UsageError(f"{name} returned {article(outputs)}{when}; {wanted}", error.why, fix) from error
    shape = tuple(scores.shape)
    if len(shape) != 2 or shape[0] != SAMPLES or not scores.is_floating_point():
        dtype = str(scores.dtype).removeprefix("torch.")
        raise UsageError(
            f"{name} returned a tensor of shape {shape} and type {dtype} for {SAMPLES} images{when}; {wanted}",
            "Each image has one score per class.",
            "Wrap it, or use Trainer with your own loss.",
        )
    if shape[1] != classes:
        raise UsageError(
            f"{name} has {shape[1]:,} outputs{when}, and the data has {classes:,} classes",
            "Each output is the score of one class. A factory is given their number where it takes num_classes= or "
            "**kwargs.",
            "Let the factory take num_classes, and make the last layer of that size.",
        )
