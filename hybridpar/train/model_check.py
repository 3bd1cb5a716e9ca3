"""Checks before the first step that the outputs of a model fit the classes of the data.

The command line trains with cross-entropy, so a model must turn a batch of images into scores of shape
(batch, classes): a tensor, or one among other outputs (`hybridpar.models.outputs`). Torch trains a head of 1,000
outputs on 10 classes without a word, and answers other misfits with an error in the middle of the loss.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError, user_error
from hybridpar.models import article, autocast
from hybridpar.models.deferred import MEASURED_BYTES, imagined, is_deferred
from hybridpar.models.outputs import main_output
from hybridpar.models.state import untouched, without_values

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

    It is tried on two random images, in training and in evaluation mode. Parameters, buffers, attributes of modules
    and the states of random generators are afterwards what they were.
    """
    deferred = is_deferred(model)
    if not deferred:
        model.to(device)
    if not deferred and sum(parameter.nbytes for parameter in model.parameters()) > MEASURED_BYTES:
        with contextlib.suppress(UsageError, RuntimeError, NotImplementedError):  # where values are needed after all
            light = without_values(model)
            if is_deferred(light):  # else, as of a scripted module, it is a whole copy
                return check_outputs(light, name, classes, sample_shape, config, device)
    images = torch.randn(SAMPLES, *sample_shape, generator=torch.Generator().manual_seed(0)).to(device)
    _require_one_input(model, name, images)
    for training in (True, False):
        with (
            warnings.catch_warnings(),
            untouched(model, training=training),
            torch.no_grad(),
            autocast(config.amp, device),
        ):
            warnings.simplefilter("ignore")  # about passes without gradients; the real ones come in training
            try:
                if deferred:  # only shapes are looked at
                    with imagined(model, device) as mode:
                        outputs = model(mode.from_tensor(images))
                else:
                    outputs = model(images)
            except Exception as error:
                raise _failed(model, name, images, error) from error
        _require_scores(outputs, name, classes, "" if training else " in evaluation mode")


def _require_one_input(model: nn.Module, name: str, images: Tensor) -> None:
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # scripted modules and the like have none
        return
    try:
        signature.bind(images)
    except TypeError as error:
        raise UsageError(
            f"{name} cannot be called with a batch of images alone: {error}",
            f"A model is called with one tensor, here of shape (batch, {_shape(images.shape[1:])}).",
            "Give the other arguments of its forward defaults, or wrap it.",
        ) from error


def _require_scores(outputs: object, name: str, classes: int, when: str) -> None:
    wanted = f"a tensor of shape (batch, {classes}) is needed"
    try:
        outputs = main_output(outputs)
    except UsageError as error:
        raise UsageError(
            f"{name} returned {article(outputs)}{when}; {wanted}",
            error.why,
            "Wrap it, or use Trainer with your own loss.",
        ) from error
    assert isinstance(outputs, Tensor)
    shape = tuple(outputs.shape)
    if shape == (SAMPLES, classes) and outputs.is_floating_point():
        return
    if len(shape) == 2 and shape[0] == SAMPLES and outputs.is_floating_point():
        raise UsageError(
            f"{name} has {shape[1]:,} outputs{when}, and the data has {classes:,} classes",
            "Each output is the score of one class. A factory is given their number where it takes num_classes= or "
            "**kwargs.",
            "Let the factory take num_classes, and make the last layer of that size.",
        )
    told = f"a tensor of shape ({_shape(shape)}) and type {str(outputs.dtype).removeprefix('torch.')}"
    over_space = len(shape) == 4 and shape[:2] == (SAMPLES, classes)
    raise UsageError(
        f"{name} returned {told} for {SAMPLES} images{when}; {wanted}",
        "Each image has one score per class" + (", not one at every place of a map." if over_space else "."),
        ("Return its mean over height and width, outputs.mean((2, 3))" if over_space else "Wrap it")
        + ", or use Trainer with your own loss.",
    )


def _failed(model: nn.Module, name: str, images: Tensor, error: Exception) -> UsageError:
    """The error for a model whose forward pass failed; where no code of the user did, the layer is named."""
    where = _failing_layer(model, error)
    what = f"{name} failed on images of shape ({_shape(images.shape)})"
    fix = "" if ":" in name else "Choose another --image-size, or another model."
    return user_error(f"{what}{where}", error, fix=fix)


def _failing_layer(model: nn.Module, error: Exception) -> str:
    """The innermost module of the model that the error went through, as the end of a sentence."""
    paths = {id(module): path for path, module in model.named_modules() if path}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module: Any = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in paths:
            found = f", in its layer {paths[id(module)]} ({type(module).__name__})"
    return found


def _shape(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))
