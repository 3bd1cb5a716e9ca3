"""Checks, before training, that a step can be captured as a CUDA graph; each error says what to change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridpar.comm.world import World
from hybridpar.errors import UsageError


def check_capturable(
    device: torch.device,
    world: World,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    positions: int = 1,
    devices: Sequence[str] = (),
    random_stages: Sequence[int] = (),
    compiled: bool = False,
) -> None:
    """Refuse what no step can be captured of.

    Args:
        device: Where the model is.
        world: All workers.
        optimizers: What steps the parameters.
        positions: Workers that share the stages of a replica.
        devices: Those that this worker drives, by lane, where it drives several.
        random_stages: Stages with random operations.
        compiled: Whether torch.compile is used.

    Raises:
        UsageError: With the rule that is broken.
    """
    if device.type != "cuda":
        raise UsageError(
            f"--cuda-graph on device {str(device)!r}",
            "A CUDA graph is a step as one launch, on a GPU.",
            "Leave out --cuda-graph, or train on a machine with a GPU.",
        )
    if positions > 1:
        raise UsageError(
            f"--cuda-graph with the stages of a replica on {positions} workers",
            "A graph is of one GPU; transfers between workers are issued by the host.",
            "Leave out --cuda-graph, or have all stages on one worker per replica: --replicas and --workers equal.",
        )
    if len(set(devices)) > 1:
        raise UsageError(
            f"--cuda-graph with stages on {', '.join(devices)}",
            "A graph is of one GPU.",
            "Leave out --cuda-graph, or show this process one GPU only: CUDA_VISIBLE_DEVICES=0.",
        )
    if world.size > 1 and "cuda:nccl" not in (backend := str(dist.get_backend_config(world.control))):
        raise UsageError(
            f"--cuda-graph with {world.size} workers over {backend!r}",
            "Only NCCL adds gradients on the GPU itself, where it can be captured.",
            "Leave out --cuda-graph, or initialise the job with NCCL for CUDA tensors.",
        )
    for optimizer in optimizers:
        fused = all(group.get("fused") for group in optimizer.param_groups)
        if not (fused and getattr(optimizer, "_step_supports_amp_scaling", False)):
            raise UsageError(
                f"--cuda-graph with {type(optimizer).__name__}, not fused",
                "In a graph only a fused optimizer reads its rate, and whether the step counts, from the device.",
                "Make it with fused=True (SGD, Adam and AdamW have that), or leave out --cuda-graph.",
            )
    if random_stages:
        raise UsageError(
            f"--cuda-graph with random operations, such as dropout, in stage {random_stages[0]}",
            "In a pipeline the host seeds them in every step; a graph would repeat the masks of one step for ever.",
            "Leave out --cuda-graph, or --stages.",
        )
    if compiled and _compiles_to_graphs():
        raise UsageError(
            "--cuda-graph with --compile, which was told to make CUDA graphs of its own",
            "A graph cannot be replayed while another one is captured.",
            "Set torch._inductor.config.triton.cudagraphs = False, or leave out --cuda-graph.",
        )


def _compiles_to_graphs() -> bool:
    from torch._inductor import config

    return bool(config.triton.cudagraphs)
