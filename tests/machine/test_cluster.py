from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from hybridpar.formats.cache import cache_directory, measurement_file
from hybridpar.machine import cluster as module
from hybridpar.machine.cluster import (
    Cluster,
    Device,
    Link,
    default_backend,
    default_workers,
    gpu_count,
    has_gpu,
    host_fingerprint,
    read_cluster,
    write_cluster,
)

HOST = {"host": "here", "torch": "2.11"}
CPU = Device(kind="cpu", name="a CPU", memory_bytes=8 << 30, cores=4, threads=4, bytes_per_second=2e10)
LINK = Link(backend="gloo", world_size=2, latency_ms=0.3, bytes_per_second=1e9)


def gpu(index: int) -> Device:
    return Device(kind="cuda", index=index, name="a GPU", memory_bytes=80 << 30, bytes_per_second=3e12)


def cluster(*devices: Device, **fields: object) -> Cluster:
    return Cluster.model_validate(
        {"host": HOST, "measured_at": 0.0, "load": 0.0, "devices": devices or (CPU,), "links": (LINK,), **fields}
    )


def kept(host: dict[str, str]) -> Path:
    return measurement_file(module.KIND, host, cache_directory())


def entry(text: str) -> bytes:
    return f'{{"key": {json.dumps(HOST)}, "data": {text}}}'.encode()


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(place))
    return place


def test_what_is_written_is_read():
    written = cluster(CPU, gpu(0), problems=("GPU 1 is broken",))
    write_cluster(written)
    assert read_cluster(HOST) == written


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        entry('{"version": 99}'),
        entry(cluster().model_dump_json().replace('"devices"', '"divices"')),
        entry(cluster().model_dump_json().replace("20000000000.0", "-1")),
    ],
    ids=["cut", "version", "unknown key", "negative rate"],
)
def test_a_damaged_file_is_one_log_line(damage, caplog):
    write_cluster(cluster())
    kept(HOST).write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert read_cluster(HOST) is None
    assert len(caplog.records) == 1
    assert "measuring again" in caplog.text


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda patch: patch.setenv("CUDA_VISIBLE_DEVICES", "1"), "visible"),
        (lambda patch: patch.setattr(module, "available_cores", lambda: [7]), "cores"),
        (lambda patch: patch.setattr(module, "usable_memory", lambda: 1 << 20), "memory"),
        (lambda patch: patch.setattr(module, "cpu_name", lambda: "another CPU"), "cpu"),
        (lambda patch: patch.setattr(module, "_version", lambda package: "9.9"), "torch"),
    ],
)
def test_the_fingerprint_follows_what_changes_the_result(monkeypatch, change, key):
    before = host_fingerprint()
    assert before == host_fingerprint(), "it must be the same from run to run"
    change(monkeypatch)
    after = host_fingerprint()
    assert after[key] != before[key]
    assert kept(after) != kept(before)


@pytest.mark.parametrize(
    ("devices", "workers", "backend"),
    [
        ((CPU,), 2, "gloo"),
        ((CPU.model_copy(update={"cores": 1}),), 1, "gloo"),
        ((CPU, gpu(0)), 1, "nccl"),
        ((CPU, gpu(0), gpu(1), gpu(2)), 3, "nccl"),
    ],
)
def test_defaults_from_what_was_measured(devices, workers, backend):
    assert default_workers(cluster(*devices)) == workers
    assert default_backend(cluster(*devices)) == backend


@pytest.mark.parametrize(("gpus", "cores", "workers"), [(0, 1, 1), (0, 2, 2), (0, 64, 2), (1, 64, 1), (4, 2, 4)])
def test_defaults_without_measuring(monkeypatch, gpus, cores, workers):
    monkeypatch.setattr(module, "gpu_count", lambda: gpus)
    monkeypatch.setattr(module, "available_cores", lambda: list(range(cores)))
    assert default_workers() == workers
    assert default_backend() == ("nccl" if gpus else "gloo")
    assert has_gpu() == (gpus > 0)


def test_a_machine_without_a_driver_is_told_without_importing_torch():
    program = (
        "import sys; from hybridpar.machine import cluster; cluster._GPU_DRIVERS = ('/nonexistent',);"
        "print(cluster.gpu_count(), 'torch' in sys.modules)"
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
