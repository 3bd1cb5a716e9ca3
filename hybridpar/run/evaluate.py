"""`hybridpar evaluate` on one worker: tests a trained model on its share of the test set, and puts the shares together.

Accuracy and loss are those of `hybridpar.train.results`, as in a run; what else a test tells is noted image by image
and gathered on worker 0, so that nothing depends on the number of workers.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridpar.comm.replicate import broadcast_state
from hybridpar.comm.world import World
from hybridpar.data import ImageData, TestBatches, load_dataset
from hybridpar.data.sources import ImageFacts
from hybridpar.errors import CheckpointError, UsageError, shortened
from hybridpar.machine.launch import record_failure
from hybridpar.models import autocast
from hybridpar.models.outputs import OutputLoss, main_output
from hybridpar.observe.progress import counting
from hybridpar.observe.results import TestResult
from hybridpar.optim.losses import make_loss
from hybridpar.run.directory import before_the_start
from hybridpar.run.trained import Trained, build_trained, images_of_model, load_trained
from hybridpar.run.worker import tune_worker
from hybridpar.train.checkpoint_files import digest_of
from hybridpar.train.results import Evaluation, evaluate

#: How many classes the second accuracy looks at.
_TOP = 5


def evaluate_trained(trained: Trained) -> tuple[Trained, TestResult | None]:
    """Test a trained model as one of the workers of this job."""
    world = World.join(lanes=1, timeout=trained.config.timeout)
    try:
        tune_worker(trained.config, world)
        with before_the_start():
            config = images_of_model(trained)
            data = world.on_all(lambda: _by_name(load_dataset(config), ImageFacts.read(trained.images)))
            trained, model = _load_on_all(trained, data.classes, config.uses_channels_last, world)
        batches = TestBatches(
            data,
            batch_size=max(2, config.samples_per_step // world.size),
            rank=world.rank,
            workers=world.size,
            loader_workers=config.loader_workers,
            device=world.device,
            channels_last=config.uses_channels_last,
        )
        loss = OutputLoss(make_loss(config, several_labels=data.multi_label, mixed=config.mixing.is_on))
        notes = _Notes(data.classes, several=data.multi_label or config.loss == "bce")
        with counting("images", batches.samples, shown=world.is_main) as count, autocast(config.amp, world.device):

            def note(outputs: Any, targets: Tensor) -> None:
                notes.add(outputs, targets)
                count(len(targets))

            found = evaluate(model, loss.of_scores, batches, world, note)
        parts = world.gather_on_main(notes.tensors(), range(world.size))
        if parts is None or not world.is_main:
            return trained, None
        return trained, _put_together(parts, data, found, batches.total)
    except BaseException as error:
        record_failure(error, debug=trained.config.debug)
        raise
    finally:
        world.close()


def _load_on_all(trained: Trained, classes: int, channels_last: bool, world: World) -> tuple[Trained, nn.Module]:
    """The model on the device of every worker, and on worker 0 where it was; a collective.

    Worker 0 decides which checkpoint counts: a run that still trains may delete it meanwhile. Workers that see it read
    it, too. If one does not, all are sent the weights.
    """
    first = world.on_all(lambda: load_trained(trained, classes, channels_last=channels_last) if world.is_main else None)
    trained, mine = first or (trained, None)
    checkpoint, digest = world.from_main(lambda: (trained.checkpoint, digest_of(trained.checkpoint)))

    def find() -> nn.Module | None:
        if not digest or digest_of(checkpoint) != digest:
            return None
        try:
            found, same = load_trained(replace(trained, checkpoint=checkpoint), classes, channels_last=channels_last)
        except CheckpointError:
            return None
        return same if found.checkpoint == checkpoint else None

    mine = world.on_all(lambda: mine if world.is_main else find())
    alike = all(world.gather(mine is not None))
    model = world.on_all(lambda: build_trained(trained, classes, channels_last=channels_last) if mine is None else mine)
    # Autocast keeps a copy in its precision of each parameter that requires a gradient.
    model.to(world.device).requires_grad_(False)
    if not alike:
        broadcast_state(model, 0, world)
    return trained, model


def _put_together(parts: list[dict[str, Tensor]], data: ImageData, found: Evaluation, total: int) -> TestResult:
    """The result, from what every worker noted of its share."""
    noted: dict[str, Any] = {}
    if data.multi_label:
        right = torch.stack([part["right"] for part in parts]).sum(dim=0).numpy()
        images = np.full(data.classes, found.samples)
    else:
        noted = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0] if name != "right"}
        targets, predictions = noted["targets"], noted["predictions"]
        right = np.bincount(targets[targets == predictions], minlength=data.classes)
        images = np.bincount(targets, minlength=data.classes)
    return TestResult(
        tuple(map(str, data.class_names)),
        *(found.accuracy, found.loss, found.samples, total - found.samples),
        *(right, images),
        **noted,
    )


class _Notes:
    """What is noted of each image of one worker's share."""

    def __init__(self, classes: int, *, several: bool) -> None:
        self._several = several
        self._right = torch.zeros(classes, dtype=torch.int64)
        self._parts: dict[str, list[Tensor]] = {"targets": [], "predictions": [], "confidences": [], "in_top5": []}

    def add(self, outputs: Any, targets: Tensor) -> None:
        """Note a batch."""
        scores = main_output(outputs).float()
        if targets.ndim > 1:
            self._right += ((scores > 0) == (targets > 0)).sum(dim=0).cpu()
            return
        if scores.ndim != 2 or scores.shape[1] != len(self._right):
            raise UsageError(
                f"the model returned scores of shape {tuple(scores.shape)}",
                f"The data have {len(self._right):,} classes, and each image needs a score for each.",
                "Name the model and the data that the weights were trained with.",
            )
        probabilities = scores.double().sigmoid() if self._several else scores.double().softmax(dim=1)
        predictions = scores.argmax(dim=1)
        best = scores.topk(min(_TOP, scores.shape[1]), dim=1).indices
        noted = {
            "targets": targets,
            "predictions": predictions,
            "confidences": probabilities.gather(1, predictions[:, None])[:, 0],
            "in_top5": (best == targets[:, None]).any(dim=1) | (predictions == targets),
        }
        for name, values in noted.items():
            self._parts[name].append(values.cpu())

    def tensors(self) -> dict[str, Tensor]:
        """All notes, each image by image; and how often each class was right, where images may have several."""
        empty = {"confidences": torch.float64, "in_top5": torch.bool}
        parts = {
            name: torch.cat([torch.empty(0, dtype=empty.get(name, torch.int64)), *values])
            for name, values in self._parts.items()
        }
        return {**parts, "right": self._right}


def _by_name(data: ImageData, known: ImageFacts | None) -> ImageData:
    """The data set with its classes numbered as the model knows them, by their names."""
    names = tuple(map(str, data.class_names))
    if known is None or known.class_names == names:
        return data
    strange = [name for name in names if name not in known.class_names]
    if strange:
        raise UsageError(
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
