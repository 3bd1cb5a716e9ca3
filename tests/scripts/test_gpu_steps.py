"""A dry run of the script that times whole steps on a GPU, on a CPU and without a clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from benchmarks.rig.paired import Paired
from scripts import gpu_steps


def test_all_methods_of_a_setting_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def called_once(methods: Mapping[str, Callable[[], object]], warmup: int) -> Paired:
        for method in methods.values():
            method()
        return Paired(dict.fromkeys(methods, (10.0,) * 20), dropped=0, load=0.0, loaded=False)

    monkeypatch.setattr(gpu_steps, "paired", called_once)
    monkeypatch.setattr(gpu_steps, "BURST", 2)
    setting = replace(gpu_steps.TINY[0], samples=2, size=16)
    rows = {row.method: row for row in gpu_steps.time_setting(setting, torch.device("cpu"), compiled=False)}
    assert set(rows) == {"plain loop", "plain loop, channels_last", "hybridpar"}
    assert rows["hybridpar"].extra["loss"] == rows["plain loop"].extra["loss"]
    assert rows["hybridpar"].median_ms == 5.0  # of one step, not of a round of two
    assert rows["hybridpar"].extra["images_per_second"] == 400.0
