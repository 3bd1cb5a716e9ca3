from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hybridpar.commands.doctor import checkup
from hybridpar.commands.doctor.checkup import Finding, check_places, check_software
from hybridpar.errors import LaunchError

TORCH = {
    "torch": "2.14.1+cu130",
    "torchvision": "0.29.1",
    "cuda_build": "13.0",
    "cuda_error": "Found no NVIDIA driver on your system.",
    "gpus": [],
    "backends": {"gloo": True, "nccl": True, "mpi": False},
}
TVM = {"version": "0.27.0", "llvm": 22, "cuda_build": True, "cuda_device": False}


class Answer:
    """Stands for a probe that has its answer, or the error it ended with."""

    def __init__(self, answer: dict[str, Any] | str) -> None:
        self._answer = answer

    def answer(self) -> str:
        if isinstance(self._answer, str):
            raise LaunchError(self._answer)
        return json.dumps(self._answer)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


@pytest.fixture
def software(monkeypatch):
    """Findings of `check_software` by name, on a machine with other answers than this one."""
    monkeypatch.setattr(checkup, "_version", lambda package: "1.0")
    monkeypatch.setattr(checkup.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def look(torch: dict[str, Any] | str = TORCH, tvm: dict[str, Any] | str = TVM) -> dict[str, Finding]:
        answers = {"importing torch": torch, "importing tvm": tvm}
        monkeypatch.setattr(checkup, "Programs", lambda programs, what, **options: Answer(answers[what]))
        findings, gpus = check_software()
        assert gpus == (-1 if isinstance(torch, str) else len(torch["gpus"]))
        return {finding.name: finding for finding in findings}

    return look


def test_torch_that_cannot_be_imported_fails_with_the_reason(software):
    found = software("importing torch failed: ImportError: libcudart.so.13")
    assert found["torch"].status == "failed"
    assert "libcudart.so.13" in found["torch"].value
    assert "pip install" in found["torch"].fix
    assert found["TVM"].status == "ok", "the rest is looked at all the same"


@pytest.mark.parametrize(("version", "status"), [("2.10.1", "failed"), ("2.11.0", "ok"), ("3.0.0a0+git1", "ok")])
def test_torch_must_be_new_enough(software, version, status):
    found = software({**TORCH, "torch": version})["torch"]
    assert found.status == status
    assert bool(found.fix) == (status == "failed")


def test_training_needs_torchvision_and_gloo(software):
    found = software({**TORCH, "torchvision": None, "backends": {"gloo": False, "nccl": True, "mpi": False}})
    assert found["torchvision"].status == found["backends"].status == "failed"
    assert found["torchvision"].fix
    assert found["backends"].fix


def test_no_driver_is_no_fault(software):
    assert software()["CUDA"].status == "absent"


@pytest.mark.parametrize(
    ("facts", "variable", "value", "fix"),
    [
        ({"cuda_error": "driver too old"}, None, "driver too old", "nvidia-smi"),
        ({"cuda_build": None, "cuda_error": None}, None, "built for the CPU only", "pip install"),
        ({"cuda_error": None}, "", "CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES"),
        ({"cuda_error": None}, None, "torch sees no device", "nvidia-smi"),
    ],
)
def test_a_driver_that_torch_cannot_use_is_a_warning(software, monkeypatch, facts, variable, value, fix):
    monkeypatch.setattr(checkup.shutil, "which", lambda name: f"/usr/bin/{name}")
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    found = software({**TORCH, **facts})["CUDA"]
    assert found.status == "warning"
    assert value in found.value
    assert fix in found.fix


def test_a_gpu_that_cannot_be_used_is_a_warning(software):
    found = software({**TORCH, "cuda_error": None, "gpus": [("a GPU", None), ("another", "out of memory")]})
    assert found["CUDA"] == Finding("software", "CUDA", "ok", "a GPU, another")
    assert found["GPU 1"] == Finding(
        "software", "GPU 1", "warning", "another cannot be used: out of memory", "nvidia-smi"
    )
    assert "GPU 0" not in found


def test_training_runs_without_tvm_but_says_so(software, monkeypatch):
    broken = software(tvm="importing tvm failed: the process was killed by signal 11")["TVM"]
    assert broken.status == "warning"
    assert "signal 11" in broken.value
    assert "stock kernels" in broken.value
    assert "apache-tvm" in broken.fix
    assert software(tvm={**TVM, "llvm": None})["TVM"].status == "warning"
    monkeypatch.setattr(checkup, "_version", lambda package: None)
    assert "apache-tvm-ffi-orcjit is missing" in software()["TVM"].value


def test_missing_packages_name_their_purpose_and_their_command(software, monkeypatch):
    monkeypatch.setattr(checkup, "_version", lambda package: None)
    found = software()
    assert found["scikit-learn"].status == "warning", "the default data set needs it"
    assert found["lightning"].status == "absent"
    for name in ("scikit-learn", "matplotlib", "tensorboard", "lightning", "accelerate"):
        assert found[name].fix == f"python -m pip install {name}"
        assert found[name].value.startswith("for ")


@pytest.fixture
def places(monkeypatch, tmp_path):
    """Findings of `check_places` by name, run in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "new" / "cache"))
    return lambda: {finding.name: finding for finding in check_places()}


def room(monkeypatch, free: int, only: str = "") -> None:
    real = shutil.disk_usage

    def usage(place: Path) -> Any:
        return real(place)._replace(free=free if only in str(place) else 1 << 40)

    monkeypatch.setattr(checkup.shutil, "disk_usage", usage)


def test_directories_that_can_be_written(places, monkeypatch, tmp_path):
    room(monkeypatch, 1 << 40)
    found = places()
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["here"].value == f"{tmp_path}, 1,024.0 GiB free"
    assert (tmp_path / "new" / "cache").is_dir()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "the trial leaves nothing behind"


def test_a_full_disk_is_a_warning(places, monkeypatch):
    room(monkeypatch, 1 << 20)
    found = places()
    assert found["here"].status == found["cache"].status == "warning"
    assert found["here"].fix


def test_little_shared_memory_is_a_warning(places, monkeypatch):
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    room(monkeypatch, 64 << 20, only="/dev/shm")
    assert "64 MiB free" in places()["/dev/shm"].value


def test_directories_that_cannot_be_written(places, monkeypatch, tmp_path):
    def refuse(**options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(checkup.tempfile, "TemporaryFile", refuse)
    found = places()
    assert found["here"].status == "failed"
    assert "Read-only file system" in found["here"].value
    assert found["cache"].status == "warning", "training runs without a cache"
    assert "HYBRIDPAR_CACHE" in found["cache"].fix
