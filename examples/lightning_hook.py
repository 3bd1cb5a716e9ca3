"""Compressed gradients for Lightning Fabric, by a strategy of one method.

python examples/lightning_hook.py --codec onebit:warmup=10
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hybridpar import DataParallel


class CodecStrategy(DDPStrategy):
    """DDP whose gradients are sent as a codec says."""

    codec = "onebit"
    model: DataParallel

    def setup_module(self, module: nn.Module) -> nn.parallel.DistributedDataParallel:
        """Wrap the model, and register the hook."""
        self.model = DataParallel.adopt(super().setup_module(module), compress=self.codec)
        return self.model


def train(fabric: Fabric, epochs: int) -> None:
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float() / 16
    fabric.seed_everything(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    # Fabric gives each process its share of every epoch.
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(images[:1400], labels[:1400]), 32, shuffle=True))
    for _ in range(epochs):
        for batch, targets in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(batch), targets))
            optimizer.step()
    accuracy = (net(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    full = 4 * sum(parameter.numel() for parameter in net.parameters())
    state = fabric.strategy.model.compression  # None in one process, and with --codec none
    sent = state.traffic.payload if state is not None else full
    fabric.print(f"test accuracy {accuracy:.1%}; {full} bytes of gradients are sent as {sent}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="onebit:warmup=10")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    CodecStrategy.codec = options.codec
    Fabric(accelerator="cpu", devices=2, strategy=CodecStrategy()).launch(train, options.epochs)
