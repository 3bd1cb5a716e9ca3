"""The tables of the recipe: every method can be made, and what is concluded follows from what was noted."""

from __future__ import annotations

import csv
import json

import torch

from benchmarks.asynchronous import ablation, buffering, workers
from hybridpar.compress import parse_codec
from hybridpar.config import TrainConfig


def test_methods_of_the_ablation_name_codecs():
    for method in ablation.METHODS:
        if method.codec is not None:
            parse_codec(method.codec.format(warm=3) + ",momentum=0.9")
    assert len({method.name for method in ablation.METHODS}) == len(ablation.METHODS)


def test_one_worker_of_the_ablation_learns():
    torch.manual_seed(0)
    first = ablation.train(ablation.METHODS[0], 0.1, seed=1, epochs=1)
    torch.manual_seed(1)
    assert first == ablation.train(ablation.METHODS[0], 0.1, seed=1, epochs=1), "a row says the same every time"
    assert ablation.train(ablation.METHODS[0], 0.1, seed=1, epochs=4)[0] > 0.5


def test_methods_of_double_buffering_are_options():
    for options in buffering._METHODS.values():
        TrainConfig(compress=buffering.CODEC, **options).check()


def test_best_worker_counts_stand_beside_what_was_measured(tmp_path):
    sample_s = workers.SAMPLE_S[0]
    share = workers.SAMPLES * sample_s
    for ranks in (2, 3):
        steps = {"sync_s": share / 2, "update_s": 0.0, "step_s": share / ranks + share / 2}
        steps["buffered_s"] = max(share / ranks, share / 2)
        times = {name: [value] * 4 for name, value in steps.items()}
        told = {f"{text} {sample_s}": times for text in ("none", workers.CODEC)}
        (tmp_path / f"{ranks}.json").write_text(json.dumps(told))
    workers.conclude(tmp_path, False, str(tmp_path / "table.csv"))
    rows = [row for row in csv.DictReader((tmp_path / "table.csv").open()) if workers.CODEC in row["setting"]]
    assert [float(row["value"]) for row in rows] == [1.0, 2.0, 2.0]
    assert all("K-hat 2.00 (speed-up 2.00), best of those measured 2" in row["extra"] for row in rows)
