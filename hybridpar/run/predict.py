"""`hybridpar predict`: classifies image files with a trained model, and writes a row for each."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import torch

from hybridpar.comm.world import default_device
from hybridpar.data import TestBatches
from hybridpar.data.file_sets import named_images
from hybridpar.data.sources import ImageFacts
from hybridpar.models import autocast
from hybridpar.models.outputs import main_output
from hybridpar.run.directory import before_the_start
from hybridpar.run.trained import Trained, image_facts, load_trained

#: Fewer files are decoded by the calling process: loader processes would only have to be started.
_FEW = 64


@dataclass(frozen=True)
class Prediction:
    """The classes of one image.

    Attributes:
        file: The image.
        classes: The most probable classes, with their probabilities, the most probable first. They add up to 1 over all
            classes; where an image may have several classes, each has a probability of its own.
    """

    file: Path
    classes: tuple[tuple[str, float], ...]


class Predictor:
    """A trained model that classifies image files, on a GPU where there is one."""

    def __init__(self, trained: Trained, image_size: int | None = None) -> None:
        with before_the_start():
            self.facts: ImageFacts = image_facts(trained, image_size)
            self._config = trained.config
            classes, channels_last = len(self.facts.class_names), self._config.uses_channels_last
            self.trained, model = load_trained(trained, classes, channels_last=channels_last)
        self._device = default_device()
        # Autocast keeps a copy in its precision of each parameter that requires a gradient.
        self._model = model.to(self._device).requires_grad_(False)
        self._several = self.facts.multi_label or self._config.loss == "bce"

    def __call__(self, files: Sequence[Path], top: int = 1) -> Iterator[list[Prediction]]:
        """Classify files. Those that cannot be read are left out, with a warning."""
        workers = self._config.loader_workers
        batches = TestBatches(
            named_images(files, self.facts, self._config),
            batch_size=self._config.samples_per_step,
            rank=0,
            workers=1,
            loader_workers=0 if workers is None and len(files) < _FEW else workers,
            device=self._device,
            channels_last=self._config.uses_channels_last,
        )
        names = self.facts.class_names
        for images, places in batches:
            with torch.inference_mode(), autocast(self._config.amp, self._device):
                scores = main_output(self._model(images)).double()
            found = (scores.sigmoid() if self._several else scores.softmax(dim=1)).topk(min(top, len(names)), dim=1)
            rows = zip(places.tolist(), found.indices.tolist(), found.values.tolist(), strict=True)
            yield [
                Prediction(files[place], tuple(zip([names[one] for one in classes], values, strict=True)))
                for place, classes, values in rows
            ]


class Rows:
    """Writes predictions as CSV with a header, or as JSON lines."""

    def __init__(self, stream: IO[str], form: Literal["csv", "jsonl"], top: int) -> None:
        self._stream, self._form = stream, form
        self._csv = csv.writer(stream, lineterminator="\n")
        if form == "csv":
            numbers = ["", *(f"_{number}" for number in range(2, top + 1))]
            self._csv.writerow(["file", *(f"{key}{number}" for number in numbers for key in ("class", "probability"))])

    def write(self, predictions: Sequence[Prediction]) -> None:
        """Write a row for each."""
        for one in predictions:
            # Seven digits: what a float32 has.
            classes = [(name, float(f"{value:.7g}")) for name, value in one.classes]
            if self._form == "csv":
                self._csv.writerow([one.file, *(cell for pair in classes for cell in pair)])
                continue
            row: dict[str, Any] = {"file": str(one.file)}
            row["predictions"] = [{"class": name, "probability": value} for name, value in classes]
            self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()
