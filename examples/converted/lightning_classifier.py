"""An image classifier after Lightning's own examples (examples/pytorch/basics, Apache-2.0).

python examples/converted/lightning_classifier.py --accelerator cpu
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.models import get_model
from torchvision.transforms import ToTensor


class ImageClassifier(LightningModule):
    """A model of torchvision with its loss and optimizer."""

    def __init__(self, model, lr):
        super().__init__()
        self.model, self.lr = get_model(model, num_classes=10), lr

    def training_step(self, batch, batch_idx):
        """The loss of a batch."""
        loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.print(f"loss {loss.item():.6e}")
        return loss

    def configure_optimizers(self):
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main(args):
    seed_everything(0)
    dataset = FakeData(args.samples, (3, args.image_size, args.image_size), 10, ToTensor())
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        enable_progress_bar=False,
    )
    trainer.fit(ImageClassifier(args.model, args.lr), DataLoader(dataset, args.batch_size, shuffle=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--image_size", type=int, default=224)
    main(parser.parse_args())
