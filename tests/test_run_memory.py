"""The most memory that training needs is measured from a moment on, and what was freed before does not count."""

from __future__ import annotations

import sys

import pytest
import torch

from hybridpar import run_memory
from hybridpar.run_memory import MemoryMeter

BIG = 200 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="procfs tells it")
def test_the_peak_is_that_since_the_restart():
    meter = MemoryMeter(torch.device("cpu"))
    held = torch.ones(BIG // 4)
    grown = meter.peak_bytes()
    if grown is None:
        pytest.skip("this system does not let the peak be reset")
    assert grown > 0.9 * BIG
    del held
    meter.restart()
    assert meter.peak_bytes() < 0.5 * BIG


def test_a_system_that_does_not_tell_gives_none(tmp_path, monkeypatch):
    monkeypatch.setattr(run_memory, "_STATUS", tmp_path / "none")
    assert MemoryMeter(torch.device("cpu")).peak_bytes() is None
    monkeypatch.setattr(run_memory, "_PEAK_RESET", tmp_path / "no" / "such" / "place")
    assert MemoryMeter(torch.device("cpu")).peak_bytes() is None
