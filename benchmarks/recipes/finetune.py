"""Digits from scratch, and from weights that were trained on photographs, in a third of the epochs.

    python -m benchmarks.recipes.finetune

ResNet-18 is trained on the data set `photos` at 32 pixels; digits are then trained from scratch for 9 epochs, and from
these weights for 3, in several ways. One worker; a seed stands for weights, order and augmentation.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.rig.records import append_dicts
from benchmarks.rig.rows import commit, device

RESULTS = Path(__file__).parent / "results" / "finetune.csv"
EPOCHS = 9

#: Options of each way beside the number of epochs; {weights} is where the weights are.
WAYS = {
    "scratch": "",
    "all layers": "--weights {weights}",
    "small rates near the inputs": "--weights {weights} --layer-decay 0.8 --head-lr-scale 3",
    "adamw": "--weights {weights} --optimizer adamw --lr 1e-3 --weight-decay 0.05 --layer-decay 0.8",
    "moving average": "--weights {weights} --model-ema 0.9,warmup",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare training from scratch with fine-tuning."""

    seeds: int = 3
    """Seeds of each way."""
    source_epochs: int = 20
    """Epochs on photographs."""
    output: Path = RESULTS
    """Table to add rows to."""


def train(run: Path, data: str, epochs: int, seed: int, more: str) -> float:
    """Test accuracy of a run."""
    words = (
        f"train resnet18 --data {data} --image-size 32 --epochs {epochs} --seed {seed} --workers 1 --plan none {more}"
    )
    subprocess.run(
        [sys.executable, "-m", "hybridpar", *words.split(), "--run-dir", str(run)], check=True, capture_output=True
    )
    summary = json.loads((run / "summary.json").read_text())
    return float(summary["ema_test_accuracy"] or summary["test_accuracy"])


def main(options: Options) -> int:
    """Measure and add rows."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "photos"
        told = train(source, "photos", options.source_epochs, 0, "")
        print(f"photos: {told:.4f}", flush=True)
        for name, more in WAYS.items():
            epochs = EPOCHS if name == "scratch" else EPOCHS // 3
            found = []
            for seed in range(1, options.seeds + 1):
                run = Path(place) / f"{name} {seed}".replace(" ", "-")
                found.append(train(run, "digits", epochs, seed, more.format(weights=source)))
            rows.append(
                {
                    "commit": commit(),
                    "device": device(),
                    "way": name,
                    "epochs": epochs,
                    "accuracies": " ".join(f"{one:.4f}" for one in found),
                    "mean": round(statistics.mean(found), 4),
                    "options": more,
                }
            )
            print(rows[-1], flush=True)
    append_dicts(options.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
