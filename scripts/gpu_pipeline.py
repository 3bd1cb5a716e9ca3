"""Checks of pipelines on a GPU: streams, CUDA graphs, NCCL; a part of the pack `checks` of `scripts/gpu_check.py`.

Every check trains one small model twice on the same batches, in two ways that must give the same, and compares losses
and by how much all weights moved.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.compress import TorchGroup
from hybridpar.errors import HybridparError
from scripts.gpu_common import Outcome, SkippedCheck

#: More than the steps before a capture, so that some are replayed.
STEPS, SAMPLES = 8, 16

#: Largest relative differences. The kernels are the same, but some add in an order of their own; bf16 rounds more.
LIMITS = {"none": (1e-4, 1e-3), "bf16": (2e-2, 1e-1)}


class Net(nn.Module):
    """Eight layers with BatchNorm, a skip connection and, on request, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.left = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.right = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.dropout = nn.Dropout(dropout)
        self.deep = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = self.stem(x)
        x = torch.relu(x + self.right(self.left(x)))
        logits: Tensor = self.head(self.deep(self.dropout(x)).mean((2, 3)))
        return logits


def train(
    device: torch.device, config: TrainConfig, dropout: float = 0.0, *, uneven: bool = False
) -> tuple[Tensor, Tensor, str]:
    """Train `Net`.

    Returns:
        Loss of each step, and by how much the state moved, both float64 on the CPU; and what became of the CUDA graph.
    """
    torch.manual_seed(0)
    model = Net(dropout)
    before = _state(model)
    generator = torch.Generator().manual_seed(1)
    example = torch.zeros(SAMPLES // config.micro_batches, 3, 16, 16)
    with Trainer(model, config=config, world=World(device=device), example=example) as trainer:
        losses = []
        for number in range(STEPS):
            count = SAMPLES - 4 if uneven and number == STEPS - 2 else SAMPLES
            images = torch.randn(count, 3, 16, 16, generator=generator)
            labels = torch.randint(0, 10, (count,), generator=generator)
            losses.append(trainer.step((images, labels)).outcome)
        values = torch.tensor([outcome.loss for outcome in losses], dtype=torch.float64)
        graph = trainer.engine.graph
        said = "no graph" if graph is None else graph.reason or ("captured" if graph.captured else "not captured")
    return values, _state(model) - before, said


def _state(model: nn.Module) -> Tensor:
    tensors = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])


@contextmanager
def strict_streams() -> Iterator[None]:
    """Inside, a gradient that is added on another stream than it was made for is an error, where PyTorch can tell."""
    turn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*AccumulateGrad.*")
        if turn is not None:
            turn(True)
        try:
            yield
        finally:
            if turn is not None:
                turn(False)


BASE = TrainConfig(lr=0.01, micro_batches=4, cuda_graph="off")
PLAIN: dict[str, object] = {}


def same(
    device: torch.device,
    first: dict[str, object],
    second: dict[str, object],
    *,
    amp: str = "none",
    dropout: float = 0.0,
    uneven: bool = False,
) -> Outcome:
    """Train in two ways and compare; value, limit and whether it holds, of whichever is the nearer to its limit."""
    configs = [dataclasses.replace(BASE, amp=amp, **changes) for changes in (first, second)]  # type: ignore[arg-type]
    if any(config.cuda_graph != "off" for config in configs):
        if device.type != "cuda":
            raise SkippedCheck("needs a GPU")
        if configs[1].stages > 1 and torch.cuda.device_count() > 1:
            raise SkippedCheck("with several GPUs every stage has its own: set CUDA_VISIBLE_DEVICES=0")
    with strict_streams():
        (losses, moved, _), (losses_there, moved_there, said) = (
            train(device, config, dropout, uneven=uneven) for config in configs
        )
    if configs[1].cuda_graph != "off" and said != "captured":
        raise HybridparError(f"no step was captured: {said}")
    loss_limit, update_limit = LIMITS[amp]
    loss = float(((losses_there - losses) / losses).abs().max())
    update = float((moved_there - moved).norm() / moved.norm())
    passed = loss <= loss_limit and update <= update_limit
    return (loss, loss_limit, passed) if loss / loss_limit > update / update_limit else (update, update_limit, passed)


def sum_over_one(device: torch.device) -> Outcome:
    """NCCL with one worker: a sum as it is, and captured on a stream beside the first."""
    if device.type != "cuda" or not dist.is_nccl_available():
        raise SkippedCheck("needs a GPU and NCCL")
    if dist.is_initialized():
        raise SkippedCheck("there is a process group already")
    torch.cuda.set_device(device)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        made = dist.new_group([0])
        assert isinstance(made, dist.ProcessGroup)
        group, tensor, graph = TorchGroup(made), torch.ones(1024, device=device), torch.cuda.CUDAGraph()
        beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for _ in range(11):
            group.all_reduce(tensor)
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            tensor.add_(1)
            beside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(beside):
                group.all_reduce(tensor)
            torch.cuda.current_stream(device).wait_stream(beside)
        for _ in range(3):
            graph.replay()
        difference = float((tensor - 4).abs().max())
        del graph
        return difference, 0.0, difference == 0.0
    finally:
        dist.destroy_process_group()


def all_checks(device: torch.device) -> dict[str, Callable[[], Outcome]]:
    """The checks by name."""
    checks: dict[str, Callable[[], Outcome]] = {}

    def add(name: str, first: dict[str, object], second: dict[str, object], **options: object) -> None:
        checks[name] = lambda: same(device, first, second, **options)  # type: ignore[arg-type]

    for stages in (2, 4):
        for schedule in ("1f1b", "gpipe", "greedy"):
            add(f"{stages} stages, {schedule}", PLAIN, {"stages": stages, "schedule": schedule})
    two: dict[str, object] = {"stages": 2, "schedule": "1f1b"}
    four: dict[str, object] = {"stages": 4, "schedule": "1f1b"}
    add("dropout, 2 and 4 stages", two, four, dropout=0.3)
    add("dropout and recomputation", two, {**two, "recompute": (0, 1)}, dropout=0.3)
    add("recomputation", PLAIN, {**two, "recompute": (0, 1)})
    add("bf16", PLAIN, two, amp="bf16")
    add("clipping", {"clip_grad": 0.5}, {**two, "clip_grad": 0.5})
    for name, way in {"plain step": PLAIN, "2 stages": two, "4 stages": four}.items():
        add(f"CUDA graph, {name}", way, {**way, "cuda_graph": "on"})
        add(f"CUDA graph, {name}, a smaller step between", way, {**way, "cuda_graph": "on"}, uneven=True)
    add("CUDA graph by default", PLAIN, {"cuda_graph": "auto"})
    add("CUDA graph, dropout", PLAIN, {"cuda_graph": "on"}, dropout=0.3)
    add("CUDA graph, bf16", two, {**two, "cuda_graph": "on"}, amp="bf16")
    adamw: dict[str, object] = {**two, "optimizer": "adamw", "lr": 1e-3, "clip_grad": 0.5}
    add("CUDA graph, AdamW, clipping", adamw, {**adamw, "cuda_graph": "on"})
    checks["NCCL, one worker"] = lambda: sum_over_one(device)
    return checks
