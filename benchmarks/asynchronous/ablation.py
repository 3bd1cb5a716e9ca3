"""Ablation of 1-bit SGD: final accuracy of a small network with each part of the method left out.

The paper measured these parts on speech; here they are measured on a task that fits this machine.

All workers live in one process and exchange with the coders of a real run, so a row
takes seconds and is reproducible. A small convolutional net on scikit-learn's digits; each method has the best of
a few learning rates, chosen on a fold of its own, and is then judged on the test images over several seeds.

    python -m benchmarks.asynchronous.ablation            # an hour; adds rows to results/ablation.csv
    python -m benchmarks.asynchronous.ablation --quick    # three methods for an epoch; nothing is written

The paper's figures are word error rates and training frame accuracies of 46 M parameters on 309 hours of speech, by
4 to 8 workers: only their order can be compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.rig.command import run_command
from benchmarks.rig.in_process import run_together
from hybridpar.compress import Exchange, TensorSpec, bind, parse_codec
from hybridpar.compress.codecs.onebit_sgd import OneBitSgd
from hybridpar.optim.adagrad_sgd import AdaGradSGD

WORKERS, BATCH, EPOCHS = 4, 64, 10
RATES = (0.1, 0.05, 0.02, 0.01)
_MOMENTUM = 0.9
_PLAIN = OneBitSgd("off", _MOMENTUM)


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: What it is called.
        codec: How gradients are encoded; None for one worker without an exchange.
        rule: Of the optimizer of that one worker.
        delay: Whether gradients are applied a step late.
        halves: Whether batches are cut in halves, each late.
        paper: What the paper reports beside it: word error rate, and frame accuracy in training.
    """

    name: str
    codec: str | None = None
    rule: OneBitSgd = _PLAIN
    delay: bool = False
    halves: bool = False
    paper: str = "not reported"


METHODS = (
    Method("one worker, full precision", paper="16.5 (55.6)"),
    Method("one bit", "onebit_sgd:adagrad=off", paper="16.3 (55.5)"),
    Method("one bit, half batches late", "onebit_sgd:adagrad=off", delay=True, halves=True, paper="16.5 (55.3)"),
    Method("one bit, a batch late", "onebit_sgd:adagrad=off", delay=True),
    Method("one bit, no error feedback", "onebit_sgd:adagrad=off,feedback=off", paper="diverges"),
    Method("one bit, first 8 % in full precision", "onebit_sgd:adagrad=off,warm={warm}"),
    Method("AdaGrad after momentum, one worker", rule=OneBitSgd("after", _MOMENTUM), paper="16.5 (57.4)"),
    Method("AdaGrad before momentum, one worker", rule=OneBitSgd("owner", _MOMENTUM), paper="16.2 (58.2)"),
    Method("one bit, AdaGrad at workers", "onebit_sgd:adagrad=worker,warm={warm}", paper="16.1 (57.4)"),
    Method("one bit, AdaGrad at owners", "onebit_sgd:adagrad=owner,warm={warm}", paper="15.8 (59.1)"),
    Method("one bit, AdaGrad after momentum", "onebit_sgd:adagrad=after,warm={warm}"),
    Method(
        "one bit, AdaGrad at owners, half batches late",
        "onebit_sgd:adagrad=owner,warm={warm}",
        delay=True,
        halves=True,
        paper="15.8 (59.4)",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with each part of 1-bit SGD left out."""

    quick: bool = False
    """One epoch, one rate, and few methods; writes nothing."""
    seeds: int = 3
    """Trainings of a row."""
    output: Path = Path(__file__).parent / "results" / "ablation.csv"
    """Table to add rows to."""


def main(options: Options) -> int:
    """Train all methods, print and write."""
    quick, seeds = options.quick, 1 if options.quick else options.seeds
    torch.set_num_threads(1)
    methods = METHODS[:3] if quick else METHODS
    rates, epochs = (RATES[1:2], 1) if quick else (RATES, EPOCHS)
    checks = []
    for method in methods:
        judged = {rate: train(method, rate, 100, epochs, judge_fold=True)[0] for rate in rates}
        rate = max(judged, key=lambda one: judged[one])
        runs = [train(method, rate, seed, epochs) for seed in range(seeds)]
        points = [100 * accuracy for accuracy, _ in runs]
        checks.append(
            Check(
                setting=f"digits, convolutional net, {WORKERS} emulated workers, batch {BATCH}, {epochs} epochs",
                link="none",
                what=f"test accuracy in %, {method.name}",
                value=statistics.mean(points),
                low=min(points),
                high=max(points),
                extra=f"lr {rate:g}, training loss {statistics.mean(loss for _, loss in runs):.4f}, {seeds} seed(s); "
                f"paper: {method.paper}",
            )
        )
        print(f"{checks[-1].what}: {checks[-1].value:.2f}, {checks[-1].extra}", flush=True)
    write_checks(checks, None if quick else str(options.output), title="asynchronous")
    return 0


def train(method: Method, rate: float, seed: int, epochs: int, judge_fold: bool = False) -> tuple[float, float]:
    """Train once.

    Args:
        method: How.
        rate: Peak learning rate; a linear warm-up over an epoch, then half a cosine.
        seed: Of weights and order.
        epochs: How long.
        judge_fold: Judge on a fifth of the training images, which is then not trained on.

    Returns:
        Accuracy, and the mean loss of the last epoch.
    """
    images, labels, test_images, test_labels = _digits(judge_fold)
    torch.manual_seed(seed)
    net = _net()
    parameters = dict(net.named_parameters())
    per_epoch = len(images) // BATCH
    updates = 2 if method.halves else 1
    total = epochs * per_epoch * updates
    exchanges = _exchanges(method, net, round(0.08 * total))
    power = 1 / updates
    optimizer: torch.optim.Optimizer
    if method.codec is None:
        optimizer = AdaGradSGD(parameters.values(), rate, method.rule)
    else:
        optimizer = torch.optim.SGD(parameters.values(), lr=rate)
        for exchange in exchanges:
            for coder in exchange.coders:
                coder.set_samples(power)
    waiting: list[Tensor] | None = None
    losses: list[float] = []
    order = torch.Generator().manual_seed(seed)
    number = 0
    for _ in range(epochs):
        chosen = torch.randperm(len(images), generator=order)[: per_epoch * BATCH]
        losses.clear()
        for part in torch.split(chosen, BATCH // updates):
            scale = len(part) / BATCH
            flats, loss = _gradients(net, list(parameters.values()), images[part], labels[part], exchanges, scale)
            losses.append(loss)
            arrived, waiting = (waiting, flats) if method.delay else (flats, None)
            if arrived is not None:
                for parameter, flat in zip(parameters.values(), arrived, strict=True):
                    parameter.grad = flat.view(parameter.shape)
                for group in optimizer.param_groups:
                    group["lr"] = rate * _schedule(number, total, per_epoch * updates)
                optimizer.step()
            number += 1
    net.eval()
    with torch.no_grad():
        right = (net(test_images).argmax(1) == test_labels).float().mean()
    return float(right), statistics.mean(losses)


def _gradients(
    net: nn.Module,
    parameters: Sequence[nn.Parameter],
    images: Tensor,
    labels: Tensor,
    exchanges: Sequence[Exchange],
    scale: float,
) -> tuple[list[Tensor], float]:
    """What all workers make of their parts of a batch, flat, and the mean loss."""
    shares = len(exchanges) or 1
    own, losses = [], []
    for x, y in zip(images.tensor_split(shares), labels.tensor_split(shares), strict=True):
        loss = nn.functional.cross_entropy(net(x), y)
        losses.append(float(loss.detach()))
        own.append([scale * one.reshape(-1) for one in torch.autograd.grad(loss, list(parameters))])
    if exchanges:
        run_together(exchanges, own, own)
        for exchange in exchanges:
            exchange.commit()
    return own[0], statistics.mean(losses)


def _exchanges(method: Method, net: nn.Module, warm: int) -> list[Exchange]:
    if method.codec is None:
        return []
    codec = parse_codec(method.codec.format(warm=warm) + f",momentum={_MOMENTUM}")
    return [
        Exchange(
            [
                bind(codec, TensorSpec(name, tuple(parameter.shape), rank, WORKERS))
                for name, parameter in net.named_parameters()
            ]
        )
        for rank in range(WORKERS)
    ]


def _schedule(step: int, total: int, warm_up: int) -> float:
    if step < warm_up:
        return (step + 1) / warm_up
    progress = torch.tensor((step - warm_up) / max(1, total - warm_up))
    return float(0.5 * (1 + torch.cos(torch.pi * progress)))


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _digits(judge_fold: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train_part, test_part = order[:1437], order[1437:]
    if judge_fold:
        train_part, test_part = train_part[:1150], train_part[1150:]
    return images[train_part], labels[train_part], images[test_part], labels[test_part]


if __name__ == "__main__":
    run_command(main, Options)
