"""The computer-vision example of Accelerate (examples/cv_example.py, Apache-2.0), shortened.

accelerate launch --cpu --num_processes 2 examples/converted/accelerate_cv_example.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.models import get_model
from torchvision.transforms import ToTensor


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, gradient_accumulation_steps=2)
    set_seed(42)
    size = (3, args.image_size, args.image_size)
    train_dataset, eval_dataset = (FakeData(count, size, 10, ToTensor()) for count in (args.samples, args.samples // 4))
    train_dataloader = DataLoader(train_dataset, shuffle=True, batch_size=args.batch_size)
    eval_dataloader = DataLoader(eval_dataset, shuffle=False, batch_size=args.batch_size)

    model = get_model(args.model, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr / 25)
    lr_scheduler = OneCycleLR(optimizer, args.lr, epochs=args.epochs, steps_per_epoch=len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(args.epochs):
        model.train()
        for inputs, targets in train_dataloader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            accelerator.print(f"epoch {epoch}: loss {loss.item():.6e}")
        model.eval()
        accurate = []
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                predictions, references = accelerator.gather_for_metrics((model(inputs).argmax(dim=-1), targets))
            accurate.append(predictions == references)
        accelerator.print(f"epoch {epoch}: accuracy {100 * torch.cat(accurate).float().mean().item():.2f}")
        accelerator.save_state("accelerate-state")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-2)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--image_size", type=int, default=224)
    training_function(parser.parse_args())
