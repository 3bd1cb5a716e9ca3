"""Measurements of devices and links that run in the processes started by `hybridpar.machine.probe`.

The functions without `measure` in their name are what such a process is started for; they answer in JSON.

Every rate comes from repeating one operation for a set time after a warm-up. For devices the fastest repeat counts,
as in the STREAM benchmark (McCalpin 1995): other load only ever slows a repeat down. For links the median counts,
because waiting for each other is part of what a collective costs. Where repeats do not agree there are more of them,
within limits, and how far they lay apart in the end is told as `noise`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridpar.machine.cluster import Device, Link, cpu_name, ring_factor
from hybridpar.machine.process import available_cores, usable_memory
from hybridpar.machine.steady import MOST_NOISE, halves_apart, least_apart, repeat_until_steady

_SMALL_BYTES = 4 << 10
_LARGE_BYTES = 16 << 20


def devices(seconds: float) -> str:
    """The rates of the CPU and of every GPU as JSON: `devices`, and `problems` with those that failed."""
    found = [measure_cpu(seconds)]
    problems = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            found.append(measure_gpu(index, seconds))
        except RuntimeError as error:  # out of memory, or a GPU this build of torch has no kernels for
            first = str(error).strip().splitlines()[0]
            problems.append(f"GPU {index} ({torch.cuda.get_device_name(index)}) cannot be used: {first}")
    return json.dumps({"devices": [device.model_dump() for device in found], "problems": problems})


def link(rank: int, world_size: int, backend: str, store: str, seconds: float, timeout: float) -> str:
    """Be one worker of a link measurement."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )
    try:
        return measure_link(seconds).model_dump_json()
    finally:
        # A process that ends with an open group can abort inside the backend's threads.
        dist.destroy_process_group()


def torch_facts() -> str:
    """What the installed torch can do, as JSON.

    Keys: `torch` and `torchvision` (versions; None where torchvision cannot be imported), `cuda_build` (version of the
    CUDA toolkit torch was built with, or None), `cuda_error` (why CUDA cannot be used, or None), `gpus` (names),
    `backends` (name to whether torch.distributed has it).
    """
    cuda_error = None
    if torch.version.cuda is not None:
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError as error:
            cuda_error = str(error).strip().splitlines()[0]
    available = dist.is_available()
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "torchvision": _torchvision_version(),
        "cuda_build": torch.version.cuda,
        "cuda_error": cuda_error,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "backends": {
            "gloo": available and dist.is_gloo_available(),
            "nccl": available and dist.is_nccl_available(),
            "mpi": available and dist.is_mpi_available(),
        },
    }
    return json.dumps(facts)


def _torchvision_version() -> str | None:
    try:
        import torchvision
    except Exception:  # a build for another torch fails with RuntimeError, a missing one with ImportError
        return None
    return str(torchvision.__version__)


def measure_cpu(seconds: float) -> Device:
    """Measure all cores that this process may use, with as many threads as torch was started with."""
    memory, device = usable_memory(), torch.device("cpu")
    copies, noise = _copy_rate(device, min(256 << 20, memory // 16), seconds)
    return Device(
        kind="cpu",
        name=cpu_name(),
        memory_bytes=memory,
        cores=len(available_cores()),
        threads=torch.get_num_threads(),
        bytes_per_second=copies,
        noise=noise,
    )


def measure_gpu(index: int, seconds: float) -> Device:
    """Measure one GPU."""
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        free, total = torch.cuda.mem_get_info()
        copies, noise = _copy_rate(device, min(1 << 30, free // 8), seconds)
        measured = Device(
            kind="cuda",
            index=index,
            name=torch.cuda.get_device_name(),
            memory_bytes=total,
            bytes_per_second=copies,
            host_bytes_per_second=host_rate(device, seconds),
            noise=noise,
        )
        torch.cuda.empty_cache()
    return measured


def _copy_rate(device: torch.device, size: int, seconds: float) -> tuple[float, float]:
    """Bytes per second read and written by a copy of `size` bytes, far more than the caches should hold; and noise."""
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    elapsed, noise = _fastest(lambda: target.copy_(source), device, seconds)
    return 2 * source.nbytes / elapsed, noise


def host_rate(device: torch.device, seconds: float) -> float:
    """Bytes per second that a GPU copies to pinned memory of its host."""
    source = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=device.type == "cuda")
    return source.nbytes / _fastest(lambda: target.copy_(source, non_blocking=True), device, seconds)[0]


def _fastest(work: Callable[[], object], device: torch.device, seconds: float) -> tuple[float, float]:
    """Seconds of the fastest of several runs, after one to warm up, and how far the two fastest lie apart, relative.

    At least 3 runs, for about `seconds` in all; for three times as long where the two fastest do not agree.
    """

    def run() -> float:
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) / 1e3
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    work()
    begin = time.perf_counter()
    times = [run() for _ in range(3)]
    while time.perf_counter() < begin + seconds:
        times.append(run())
    while (noise := least_apart(times)) > MOST_NOISE and time.perf_counter() < begin + 3 * seconds:
        times.append(run())
    return min(times), noise


@torch.no_grad()
def measure_link(seconds: float) -> Link:
    """Measure the default process group with all-reduces. Every rank must call this; all get the same answer."""
    world_size, backend = dist.get_world_size(), dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    small, _ = _all_reduce_time(_SMALL_BYTES, device, repeats=10)
    small, _ = _all_reduce_time(_SMALL_BYTES, device, _repeats(seconds, small, 20, 1000))
    size = 1 << 20
    large, _ = _all_reduce_time(size, device, repeats=1)
    # Larger messages come closer to the link's bandwidth, as long as a few of the next size fit into the time.
    while size < _LARGE_BYTES and 4 * large * 4 < seconds:
        size *= 4
        large, _ = _all_reduce_time(size, device, repeats=1)
    repeats = _repeats(seconds, large, 3, 100)
    # All ranks know the same noise, so all repeat the same number of times.
    tries, noise = repeat_until_steady(
        lambda: _all_reduce_time(size, device, repeats), lambda done: min(apart for _, apart in done), MOST_NOISE
    )
    large = min(tries, key=lambda one: one[1])[0]
    # What the small message took is the latency's part of the large one; on a noisy machine it may seem to be all.
    moving = large - small if large > 2 * small else large
    return Link(
        backend=backend,
        world_size=world_size,
        latency_ms=small * 1e3,
        bytes_per_second=ring_factor(world_size) * size / moving,
        noise=noise,
    )


def _repeats(seconds: float, each: float, least: int, most: int) -> int:
    return max(least, min(most, int(seconds / each)))


def _all_reduce_time(size: int, device: torch.device, repeats: int) -> tuple[float, float]:
    """Median seconds of an all-reduce of `size` bytes on the slowest rank, after one to warm up; and noise."""
    tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    # All ranks go on from the same numbers: they decide how many collectives follow.
    found = [statistics.median(times[1:]), halves_apart(times[1:]) if repeats > 1 else 0.0]
    told = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told[0]), float(told[1])
