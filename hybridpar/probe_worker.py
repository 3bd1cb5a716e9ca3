"""Why: rates of devices and links are measured here, in processes that `hybridpar.probe` starts.

The functions without `measure` in their name are what such a process is started for; they answer in JSON.

Every rate comes from repeating one operation for a set time after a warm-up. For devices the fastest repeat counts,
as in the STREAM benchmark (McCalpin 1995): other load only ever slows a repeat down. For links the median counts,
because waiting for each other is part of what a collective costs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybridpar.cluster import Device, Link, cpu_name, ring_factor
from hybridpar.process import available_cores, usable_memory

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
    """Be one worker of a link measurement.

    Args:
        rank: Which worker; with NCCL also which GPU.
        world_size: Number of workers.
        backend: Backend of torch.distributed.
        store: Path of a file, not there yet, in which the workers find each other.
        seconds: As for `measure_link`.
        timeout: Seconds after which a worker that does not answer is an error.

    Returns:
        The `Link` as JSON.
    """
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )
    try:
        return measure_link(None, seconds).model_dump_json()
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
    memory = usable_memory()
    return Device(
        kind="cpu",
        name=cpu_name(),
        memory_bytes=memory,
        cores=len(available_cores()),
        threads=torch.get_num_threads(),
        bytes_per_second=_copy_rate(torch.device("cpu"), min(256 << 20, memory // 16), seconds),
        flops={
            "float32": _matrix_rate(torch.device("cpu"), torch.float32, seconds),
            "bfloat16": _matrix_rate(torch.device("cpu"), torch.bfloat16, seconds),
        },
    )


def measure_gpu(index: int, seconds: float) -> Device:
    """Measure one GPU.

    Raises:
        RuntimeError: The GPU cannot be used: no memory is left, or this torch has no kernels for it.
    """
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        free, total = torch.cuda.mem_get_info()
        types = [torch.float32, torch.float16]
        if torch.cuda.is_bf16_supported(including_emulation=False):
            types.append(torch.bfloat16)
        measured = Device(
            kind="cuda",
            index=index,
            name=torch.cuda.get_device_name(),
            memory_bytes=total,
            bytes_per_second=_copy_rate(device, min(1 << 30, free // 8), seconds),
            flops={str(dtype).removeprefix("torch."): _matrix_rate(device, dtype, seconds) for dtype in types},
        )
        torch.cuda.empty_cache()
    return measured


def _copy_rate(device: torch.device, size: int, seconds: float) -> float:
    """Bytes per second read and written by a copy of `size` bytes, which should be far more than the caches hold."""
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source), device, seconds)


def _matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Floating-point operations per second of the product of two square matrices, the best over growing sizes."""
    best, size, elapsed = 0.0, 256, 0.0
    # A product of this many seconds fills the device; slow devices get there with smaller matrices.
    while size <= 8192 and elapsed < 50e-3:
        a = torch.randn(size, size, dtype=torch.float32, device=device).to(dtype)
        b, out = a.t().contiguous(), torch.empty_like(a)
        elapsed = _fastest(partial(torch.mm, a, b, out=out), device, seconds / 2)
        best = max(best, 2 * float(size) ** 3 / elapsed)
        size *= 2
    return best


def _fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest of several runs, after one to warm up; at least 3 runs, for about `seconds` in all."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    return min(times)


@torch.no_grad()
def measure_link(group: dist.ProcessGroup | None, seconds: float) -> Link:
    """Measure a process group with all-reduces. Every rank of the group must call this; all get the same answer.

    Args:
        group: The group; None for the default group.
        seconds: Time to spend on latency, and again on bandwidth. A very slow link takes longer: the large message is
            1 MiB at least, and is sent four times.

    Raises:
        ValueError: The group has only one worker.
    """
    world_size = dist.get_world_size(group)
    if world_size < 2:
        raise ValueError("a link needs two workers, but the group has one")
    backend = dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    small = _all_reduce_time(_SMALL_BYTES, group, device, repeats=10)
    small = _all_reduce_time(_SMALL_BYTES, group, device, _repeats(seconds, small, 20, 1000))
    size = 1 << 20
    large = _all_reduce_time(size, group, device, repeats=1)
    # Larger messages come closer to the link's bandwidth, as long as a few of the next size fit into the time.
    while size < _LARGE_BYTES and 4 * large * 4 < seconds:
        size *= 4
        large = _all_reduce_time(size, group, device, repeats=1)
    large = _all_reduce_time(size, group, device, _repeats(seconds, large, 3, 100))
    # What the small message took is the latency's part of the large one; on a noisy machine it may seem to be all.
    moving = large - small if large > 2 * small else large
    return Link(
        backend=backend,
        world_size=world_size,
        latency_ms=small * 1e3,
        bytes_per_second=ring_factor(world_size) * size / moving,
    )


def _repeats(seconds: float, each: float, least: int, most: int) -> int:
    return max(least, min(most, int(seconds / each)))


def _all_reduce_time(size: int, group: dist.ProcessGroup | None, device: torch.device, repeats: int) -> float:
    """Median seconds of an all-reduce of `size` bytes on the slowest rank, after one to warm up."""
    tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    # All ranks go on from the same number: it decides how many collectives follow.
    median = torch.tensor(statistics.median(times[1:]), dtype=torch.float64, device=device)
    dist.all_reduce(median, op=dist.ReduceOp.MAX, group=group)
    return float(median)
