"""Compressed gradients for DistributedDataParallel, by one line.

    torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py --codec onebit:warmup=10

The line is `hybridpar.DataParallel` in the place of DistributedDataParallel. Everything else is a plain DDP loop; the
checkpoint shows where the state of the codecs goes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from own_loop import BATCH, CLASSES, make_images
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from user_model import small_net

from hybridpar import DataParallel


def train(codec: str, epochs: int, samples: int) -> float:
    """Train, and return the accuracy on all test images."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = small_net(CLASSES)
    ddp = DataParallel(model, compress=codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    train_set = TensorDataset(*make_images(samples, seed=2))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train_set, workers, rank)
    loader = DataLoader(train_set, BATCH // workers, sampler=sampler, drop_last=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(images), labels)
            loss.backward()
            optimizer.step()
    full = 4 * sum(parameter.numel() for parameter in model.parameters())
    sent = ddp.compression.traffic.payload if ddp.compression is not None else full
    # Every worker keeps what it did not send, so every worker saves a file of its own.
    Path("runs").mkdir(exist_ok=True)
    torch.save({"model": model.state_dict(), "codec": ddp.compression_state_dict()}, f"runs/ddp-hook-{rank}.pt")
    images, labels = make_images(samples // 4, seed=3)
    model.eval()
    with torch.no_grad():
        accuracy = float((model(images).argmax(1) == labels).float().mean())
    if rank == 0:
        print(f"{codec}: {full} bytes of gradients as {sent}; loss {float(loss):.3f}, test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="onebit:warmup=10")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1280)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(options.codec, options.epochs, options.samples)
    finally:
        dist.destroy_process_group()
