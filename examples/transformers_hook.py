"""Compressed gradients for the Trainer of Hugging Face transformers, by one line: `compress_trainer`.

accelerate launch --cpu --num_processes 2 examples/transformers_hook.py --codec onebit:warmup=10
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from hybridpar.integrations.accelerate import compress_trainer


class DigitNet(PreTrainedModel):
    """A perceptron in the form that a Trainer expects: it returns a loss where it is given labels."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.body = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self.post_init()

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Scores of shape (batch, 10), and with labels the loss."""
        scores = self.body(pixels)
        loss = {} if labels is None else {"loss": torch.nn.functional.cross_entropy(scores, labels)}
        return {**loss, "logits": scores}


def train(codec: str, epochs: int, folder: str) -> None:
    pixels, digits = load_digits(return_X_y=True)
    rows: list[dict[str, Any]] = [
        {"pixels": torch.tensor(pixel).float() / 16, "labels": int(digit)}
        for pixel, digit in zip(pixels, digits, strict=True)
    ]
    arguments = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        learning_rate=0.3,
        optim="sgd",
        use_cpu=True,
        ddp_find_unused_parameters=False,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        save_strategy="epoch",
        seed=0,
    )
    model = DigitNet(PretrainedConfig())
    trainer = compress_trainer(Trainer(model, arguments, train_dataset=rows[:1400]), compress=codec)
    trainer.train()
    full = 4 * sum(parameter.numel() for parameter in model.parameters())
    state = getattr(trainer.model_wrapped, "compression", None)  # None in one process, and with --codec none
    sent = state.traffic.payload if state is not None else full
    found = trainer.predict(rows[1400:])
    accuracy = float((found.predictions.argmax(1) == found.label_ids).mean())
    if trainer.is_world_process_zero():
        print(f"test accuracy {accuracy:.1%}; {full} bytes of gradients are sent as {sent}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="onebit:warmup=10")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="runs/transformers-hook", help="where the Trainer keeps its checkpoints")
    options = parser.parse_args()
    train(options.codec, options.epochs, options.folder)
