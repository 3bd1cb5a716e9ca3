"""`Trainer` in a training loop of your own, for the four lines that compute a step.

Alone, and on two workers:

    python examples/own_loop.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py

Data set, loader, number of epochs and what is printed are this file's own. A step sees 64 samples whatever the number
of workers, each of which divides its share into two micro-batches.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from user_model import small_net

from hybridpar import TrainConfig, Trainer

CLASSES = 10
BATCH = 64


def make_images(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """A fixed pattern per class under noise: (samples, 3, 16, 16) and their classes."""
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(samples) % CLASSES
    noise = torch.randn(samples, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return patterns[labels] + 2 * noise, labels


def train(epochs: int, samples: int) -> float:
    """Train, and return the last test accuracy."""
    train_set = TensorDataset(*make_images(samples, seed=2))
    test_images, test_labels = make_images(samples // 4, seed=3)
    steps_per_epoch = samples // BATCH

    # Different seeds on the workers would do no harm: all of them start from rank 0's weights.
    torch.manual_seed(0)
    config = TrainConfig(lr=0.05, micro_batches=2, clip_grad=5.0)
    trainer = Trainer(small_net(CLASSES), config=config, total_steps=epochs * steps_per_epoch)
    with trainer:
        rank, workers = trainer.world.rank, trainer.world.size
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train_set, workers, rank)
        loader = DataLoader(train_set, BATCH // workers, sampler=sampler, drop_last=True)
        # Shares of the test set must not overlap; they may differ in size.
        mine = test_images[rank::workers].split(BATCH), test_labels[rank::workers].split(BATCH)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                result = trainer.step((images, labels))
            evaluation = trainer.evaluate(zip(*mine, strict=True))
            if trainer.world.is_main:
                print(
                    f"epoch {epoch + 1}: step {result.step}, loss {result.loss:.3f}, "
                    f"gradient norm {result.grad_norm:.2f}, test accuracy {evaluation.accuracy:.1%}"
                )
        path = trainer.save("runs/own-loop")
        if trainer.world.is_main:
            print(f"{workers} {'worker' if workers == 1 else 'workers'}; checkpoint: {path}")
    return evaluation.accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1280)
    options = parser.parse_args()
    train(options.epochs, options.samples)
