from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridpar.errors import UsageError
from hybridpar.machine import devices as module
from hybridpar.machine.devices import default_workers, gpu_count, require_gpu


@pytest.mark.parametrize(("gpus", "cores", "workers"), [(0, 1, 1), (0, 2, 2), (0, 64, 2), (1, 64, 1), (4, 2, 4)])
def test_defaults_without_measuring(monkeypatch, gpus, cores, workers):
    monkeypatch.setattr(module, "gpu_count", lambda: gpus)
    monkeypatch.setattr(module, "available_cores", lambda: list(range(cores)))
    assert default_workers() == workers


def test_a_machine_without_a_driver_is_told_without_importing_torch():
    program = (
        "import sys; from hybridpar.machine import devices; devices._GPU_DRIVERS = ('/nonexistent',);"
        "print(devices.gpu_count(), 'torch' in sys.modules)"
    )
    place = Path(module.__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=place, capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.split() == ["0", "False"]


def test_with_a_driver_torch_is_asked(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(module, "_GPU_DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert gpu_count() == 3


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 1), ("auto", 0), ("cpu", 0)])
def test_a_device_that_is_there_is_accepted(monkeypatch, device, gpus):
    monkeypatch.setattr(module, "gpu_count", lambda: gpus)
    require_gpu(device)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(module, "gpu_count", lambda: 0)
    with pytest.raises(UsageError, match="--device cuda without a GPU"):
        require_gpu("cuda")
