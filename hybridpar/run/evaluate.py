"""A trained model at work: `hybridpar evaluate` on one worker, and `hybridpar predict`.

A test gives each worker its share of the test set. Accuracy and loss are those of `hybridpar.train.results`, as in a
run; what else a test tells is noted image by image and gathered on worker 0, so that nothing depends on the number of
workers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridpar.comm.replicate import broadcast_state
from hybridpar.comm.world import World, default_device
from hybridpar.config import TrainConfig
from hybridpar.data import ImageData, load_dataset
from hybridpar.data.file_sets import named_images
from hybridpar.data.sources import ImageFacts
from hybridpar.errors import check, shortened
from hybridpar.machine.launch import record_failure
from hybridpar.models import autocast
from hybridpar.models.outputs import OutputLoss, main_output
from hybridpar.observe.progress import progress_bar
from hybridpar.observe.results import TestResult
from hybridpar.optim.losses import make_loss
from hybridpar.run.data import batches_to_test
from hybridpar.run.directory import before_the_start
from hybridpar.run.trained import Trained, build_trained, image_facts, images_of_model, load_trained
from hybridpar.run.worker import tune_worker
from hybridpar.train.results import Evaluation, evaluate

#: How many classes the second accuracy looks at.
_TOP = 5

#: Fewer files are decoded by the calling process: loader processes would only have to be started.
_FEW = 64


def evaluate_trained(trained: Trained) -> TestResult | None:
    """Test a trained model as one of the workers of this job; the result is on worker 0."""
    world = World.join(lanes=1, timeout=trained.config.timeout)
    try:
        tune_worker(trained.config, world)
        with before_the_start():
            config = images_of_model(trained)
            data = world.on_all(lambda: _by_name(load_dataset(config), ImageFacts.read(trained.images)))
            # Weights on worker 0 alone: others need not see the checkpoint.
            build = load_trained if world.is_main else build_trained
            model = world.on_all(lambda: build(trained, data.classes, channels_last=config.uses_channels_last))
        # Autocast keeps a copy in its precision of each parameter that requires a gradient.
        model.to(world.device).requires_grad_(False)
        if world.size > 1:
            broadcast_state(model, 0, world)
        batches = batches_to_test(data, config, world.device, world.rank, world.size)
        loss = OutputLoss(make_loss(config, several_labels=data.multi_label, mixed=config.mixing.is_on))
        noted: list[dict[str, Tensor]] = []
        with (
            progress_bar("images", batches.samples, shown=world.is_main) as show,
            autocast(config.amp, world.device),
        ):

            def note(outputs: Any, targets: Tensor) -> None:
                noted.append(_noted(outputs, targets, data.classes, config))
                show(advance=len(targets))

            evaluation = evaluate(model, loss.of_scores, batches, world, note)
        parts = world.gather_on_main(_joined(noted), range(world.size))
        return None if parts is None else _put_together(parts, data, evaluation, batches.total)
    except BaseException as error:
        record_failure(error, debug=trained.config.debug)
        raise
    finally:
        world.close()


def _joined(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What was noted of images, one after the other; of no image nothing."""
    known = [part for part in parts if part]
    return {name: torch.cat([part[name] for part in known]) for name in (known[0] if known else ())}


def _noted(outputs: Any, targets: Tensor, classes: int, config: TrainConfig) -> dict[str, Tensor]:
    """What is noted of each image of a batch; of images with several classes for which ones it was right."""
    scores = main_output(outputs).float()
    if targets.ndim > 1:
        return {"right": ((scores > 0) == (targets > 0)).cpu()}
    check(
        scores.ndim == 2 and scores.shape[1] == classes,
        f"the model returned scores of shape {tuple(scores.shape)}",
        f"The data have {classes:,} classes, and each image needs a score for each.",
        "Name the model and the data that the weights were trained with.",
    )
    predictions = scores.argmax(dim=1)
    probabilities = _probabilities(scores, several=config.criterion.of_each_class(False))
    best = scores.topk(min(_TOP, classes), dim=1).indices
    noted = {
        "targets": targets,
        "predictions": predictions,
        "confidences": probabilities.gather(1, predictions[:, None])[:, 0],
        "in_top5": (best == targets[:, None]).any(dim=1) | (predictions == targets),
    }
    return {name: values.cpu() for name, values in noted.items()}


def _probabilities(scores: Tensor, several: bool) -> Tensor:
    """In float64; where an image may have several classes each has one of its own."""
    return scores.double().sigmoid() if several else scores.double().softmax(dim=1)


def _put_together(parts: list[dict[str, Tensor]], data: ImageData, evaluation: Evaluation, total: int) -> TestResult:
    """The result, from what every worker noted of its share."""
    noted: dict[str, Any] = {name: values.numpy() for name, values in _joined(parts).items()}
    if data.multi_label:
        right, images = noted.pop("right").sum(axis=0), np.full(data.classes, evaluation.samples)
    else:
        targets = noted["targets"]
        right = np.bincount(targets[targets == noted["predictions"]], minlength=data.classes)
        images = np.bincount(targets, minlength=data.classes)
    unreadable = total - evaluation.samples
    figures = evaluation.accuracy, evaluation.loss, evaluation.samples, unreadable, right, images
    return TestResult(tuple(map(str, data.class_names)), *figures, **noted)


def _by_name(data: ImageData, known: ImageFacts | None) -> ImageData:
    """The data set with its classes numbered as the model knows them, by their names."""
    names = tuple(map(str, data.class_names))
    if known is None or known.class_names == names:
        return data
    strange = [name for name in names if name not in known.class_names]
    check(
        not strange,
        f"the model does not know {len(strange)} of the classes of the data: {shortened(', '.join(strange))}",
        f"It was trained to tell apart {shortened(', '.join(known.class_names))}.",
        "Test it on data of these classes; classes of which there are no images may be left out.",
    )
    numbers, test = torch.tensor([known.class_names.index(name) for name in names]), copy.copy(data.test)
    if data.multi_label:
        test.labels = torch.zeros(len(test), len(known.class_names), dtype=torch.bool)
        test.labels[:, numbers] = data.test.labels
    else:
        test.labels = numbers[test.labels]
    return replace(data, class_names=known.class_names, test=test)


class Prediction(NamedTuple):
    """The most probable classes of an image, with their probabilities, the most probable first."""

    file: Path
    classes: tuple[tuple[str, float], ...]


class Predictor:
    """A trained model that classifies image files, on a GPU where there is one."""

    def __init__(self, trained: Trained, image_size: int | None = None) -> None:
        self._config, self._device = trained.config, default_device()
        with before_the_start():
            self.facts: ImageFacts = image_facts(trained, image_size)
            classes = len(self.facts.class_names)
            model = load_trained(trained, classes, channels_last=self._config.uses_channels_last)
        # Autocast keeps a copy in its precision of each parameter that requires a gradient.
        self._model = model.to(self._device).requires_grad_(False)

    def __call__(self, files: Sequence[Path], top: int = 1) -> Iterator[list[Prediction]]:
        """Classify files. Those that cannot be read are left out, with a warning."""
        config, names = self._config, self.facts.class_names
        if config.loader_workers is None and len(files) < _FEW:
            config = replace(config, loader_workers=0)
        several = self.facts.multi_label or config.criterion.of_each_class(False)
        for images, numbers in batches_to_test(named_images(files, self.facts, config), config, self._device):
            with torch.inference_mode(), autocast(config.amp, self._device):
                scores = main_output(self._model(images))
            best = _probabilities(scores, several).topk(min(top, len(names)))
            rows = zip(numbers.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
            yield [
                Prediction(files[number], tuple(zip([names[index] for index in classes], values, strict=True)))
                for number, classes, values in rows
            ]
