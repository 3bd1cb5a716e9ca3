"""`Cluster`: the devices and links of this machine as they were measured, and the cache that keeps them.

A `Cluster` is devices with their memory bandwidth, and links between workers with latency and
bandwidth. `hybridpar.machine.probe` measures it; this module says what it is and keeps it in the user's cache
directory, one file per host, set of devices and set of versions.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from hybridpar.formats.cache import cache_directory, load_measurement, measurement_file, store_measurement
from hybridpar.machine.process import available_cores, threads_per_worker, usable_memory

CLUSTER_VERSION: Literal[1] = 1

#: Name of the measurement in the cache.
KIND = "cluster"

#: Where Linux shows a driver that torch's `cuda` devices need: NVIDIA's, the one of WSL, AMD's.
_GPU_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")

#: Load per core above which a measurement is not to be trusted.
BUSY_LOAD = 0.5

_log = logging.getLogger(__name__)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Device(_Record):
    """What one device can do, or all CPU cores of the machine together."""

    kind: Literal["cpu", "cuda"]
    index: int = Field(default=0, ge=0)
    name: str
    memory_bytes: int = Field(gt=0)
    cores: int | None = Field(default=None, ge=1, description="logical cores this process may use; of CPUs")
    threads: int | None = Field(default=None, ge=1, description="threads the rates were measured with; of CPUs")
    bytes_per_second: float = Field(gt=0, description="memory bandwidth: bytes read and written by a large copy")
    host_bytes_per_second: float | None = Field(
        default=None, gt=0, description="of copies to pinned memory of the host; of GPUs"
    )
    noise: float = Field(0.0, ge=0, description="how far the two fastest repeats of a rate lay apart at most, relative")


class Link(_Record):
    """What lies between the workers of one process group."""

    backend: str
    world_size: int = Field(ge=2)
    latency_ms: float = Field(ge=0, description="median time of an all-reduce of 4 KB")
    bytes_per_second: float = Field(gt=0, description="bytes each worker sends per second in a large all-reduce")
    noise: float = Field(0.0, ge=0, description="how far two halves of the large all-reduces lay apart, relative")


class Cluster(_Record):
    """The devices of this machine and the links between its workers."""

    version: Literal[1] = CLUSTER_VERSION
    host: dict[str, str] = Field(description="what the measurement holds for; see `host_fingerprint`")
    measured_at: float = Field(description="seconds since the epoch")
    load: float = Field(ge=0, description="other programs' CPU load per core before measuring; see `machine_load`")
    devices: tuple[Device, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    problems: tuple[str, ...] = Field(default=(), description="what could not be measured, and why")

    @property
    def busy(self) -> bool:
        """Whether other programs took so much of the CPU that the rates may be far too low."""
        return self.load > BUSY_LOAD

    @property
    def noise(self) -> float:
        """The largest of all devices and links."""
        return max([one.noise for one in self.devices] + [one.noise for one in self.links])

    def of_kind(self, kind: Literal["cpu", "cuda"]) -> tuple[Device, ...]:
        """The devices of one kind, by index."""
        return tuple(device for device in self.devices if device.kind == kind)

    def link(self, backend: str) -> Link | None:
        """The link that was measured with this backend."""
        return next((link for link in self.links if link.backend == backend), None)


def ring_factor(world_size: int) -> float:
    """Times a tensor's size that each of K workers sends in an all-reduce, 2(K-1)/K."""
    return 2 * (world_size - 1) / world_size


def gpu_count() -> int:
    """GPUs that torch can use. Torch is imported only on a machine that has a GPU's driver; no GPU is touched."""
    if not has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def has_gpu_driver() -> bool:
    """Whether there may be a GPU, as far as that can be told without torch."""
    return sys.platform != "linux" or any(Path(place).exists() for place in _GPU_DRIVERS)


def has_gpu() -> bool:
    """Whether torch can use a GPU."""
    return gpu_count() > 0


def default_workers(cluster: Cluster | None = None) -> int:
    """Workers that a run starts unless told otherwise: one per GPU, else 2 on the CPU, or 1 on a single core."""
    if cluster is None:
        return gpu_count() or min(2, len(available_cores()))
    return len(cluster.of_kind("cuda")) or min(2, max(device.cores or 1 for device in cluster.devices))


def default_backend(cluster: Cluster | None = None) -> str:
    """The backend that the default workers talk over."""
    gpus = gpu_count() if cluster is None else len(cluster.of_kind("cuda"))
    return "nccl" if gpus else "gloo"


def read_cluster(host: dict[str, str]) -> Cluster | None:
    """What was measured on this host before."""
    data = load_measurement(KIND, host, cache_directory())
    try:
        return None if data is None else Cluster.model_validate(data)
    except ValueError:  # not a cluster of this version
        _log.warning("%s is damaged; measuring again", measurement_file(KIND, host, cache_directory()))
        return None


def write_cluster(cluster: Cluster) -> None:
    """Keep a cluster for the next time, where the directory can be written."""
    store_measurement(KIND, cluster.host, cluster.model_dump(mode="json"), cache_directory())


def machine_load() -> float:
    """How many processes wanted to run in the last minute, per core that this process may use."""
    return os.getloadavg()[0] / len(available_cores())


def host_fingerprint() -> dict[str, str]:
    """What a measurement holds for: the host, its devices as this process may use them, and the versions."""
    gpus = "".join(_read_text(path) for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")))
    driver = _read_text(Path("/proc/driver/nvidia/version"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cores = available_cores()
    return {
        "host": platform.node(),
        "cpu": cpu_name(),
        "cores": f"{len(cores)}, {threads_per_worker(1, cores)} threads",
        "memory": str(usable_memory()),
        "gpus": _digest(gpus + driver) if gpus or driver else "none",
        "visible": "all" if visible is None else visible,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "hybridpar": _version("hybridpar"),
    }


def cpu_name() -> str:
    """The CPU's model name as the system tells it, else the architecture."""
    for line in _read_text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
