"""Compressed gradients for Accelerate, by one line: `prepare` of hybridpar in the place of `accelerator.prepare`.

accelerate launch --cpu --num_processes 2 examples/accelerate_hook.py --codec onebit:warmup=10
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hybridpar.integrations.accelerate import prepare


def train(codec: str, epochs: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float() / 16
    set_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), 16, shuffle=True)
    # Returns hybridpar.DataParallel, which is DDP, the optimizer, and this process's share of the data.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, loader = prepare(accelerator, net, optimizer, loader, compress=codec)
    for _ in range(epochs):
        for batch, targets in loader:
            with accelerator.accumulate(model):  # nothing is sent before the second of two micro-batches
                accelerator.backward(nn.functional.cross_entropy(model(batch), targets))
                optimizer.step()
                optimizer.zero_grad()
    accuracy = (net(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    full = 4 * sum(parameter.numel() for parameter in net.parameters())
    state = getattr(model, "compression", None)  # None in one process, and with --codec none
    sent = state.traffic.payload if state is not None else full
    accelerator.print(f"test accuracy {accuracy:.1%}; {full} bytes of gradients are sent as {sent}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="onebit:warmup=10")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    train(options.codec, options.epochs)
