"""Times a step of a finished run's net under torch's DistributedDataParallel, beside the run's own.

    python scripts/beside_ddp.py runs/demo

trains the same net on as many workers with batches of the same size, as a plain script does: SGD in float32, one
gradient exchange per step, and cores divided among the workers. The median of 5 to 20 steps, as many as take about 3 s,
is shown beside the run's median, without the time that the run waited for data. Both are of this machine, one after the
other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from hybridpar.models import build_model

WARM_UP, LEAST_TIMED, MOST_TIMED, TIMED_MS = 3, 5, 20, 3000.0


def median_step_ms(rank: int, run: dict[str, Any], folder: str) -> None:
    """Train for some steps as worker `rank`; worker 0 writes the median of a step, in ms, into the folder."""
    workers, on_gpu = run["workers"], run["device"] == "cuda"
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    # Left alone, gloo takes the interface that the host's name resolves to, which need not reach this host.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", workers)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=workers, timeout=timedelta(seconds=60)
    )
    try:
        model = build_model(run["model"], classes=run["classes"]).to(device)
        ddp = DistributedDataParallel(model, device_ids=[rank] if on_gpu else None)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9, fused=True)
        images = torch.randn(max(1, run["batch_size"] // workers), *run["shape"], device=device)
        labels = torch.randint(0, run["classes"], images.shape[:1], device=device)
        times = []
        for _ in range(WARM_UP + run["timed"]):
            begun = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begun))
        if rank == 0:
            Path(folder, "median").write_text(str(statistics.median(times[WARM_UP:])))
    finally:
        dist.destroy_process_group()


def read_run(directory: Path) -> dict[str, Any]:
    """What the baseline needs to know of a run."""
    summary, run = (json.loads((directory / name).read_text()) for name in ("summary.json", "run.json"))
    step_ms = summary["step_ms_median"] - (summary["data_ms"] or 0)
    return {
        "model": summary["model"],
        "workers": summary["workers"],
        "batch_size": summary["batch_size"],
        "classes": len(run["images"]["class_names"]),
        "shape": run["images"]["sample_shape"],
        "device": "cuda" if torch.cuda.is_available() and run["options"]["device"] != "cpu" else "cpu",
        "step_ms": step_ms,
        "timed": min(MOST_TIMED, max(LEAST_TIMED, round(TIMED_MS / step_ms))),
    }


def compared(run: dict[str, Any], baseline_ms: float) -> str:
    """The line that is shown."""
    ratio = baseline_ms / run["step_ms"]
    faster = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times as slow"
    return f"a step: {run['step_ms']:.0f} ms, under DistributedDataParallel {baseline_ms:.0f} ms: this run is {faster}"


def main() -> None:
    """Time the baseline, and show both."""
    parser = argparse.ArgumentParser(description="A step of a run beside one of DistributedDataParallel.")
    parser.add_argument("run", type=Path, help="directory of a finished run")
    run = read_run(parser.parse_args().run)
    with tempfile.TemporaryDirectory() as folder:
        spawn(median_step_ms, (run, folder), nprocs=run["workers"])
        print(compared(run, float(Path(folder, "median").read_text())))


if __name__ == "__main__":
    main()
