"""The loop of torchvision's references/classification/train.py (BSD-3-Clause), shortened.

Warm-up, label smoothing, clipping, a gradient scaler, synchronised BatchNorm, and a moving average of the weights.

torchrun --standalone --nproc-per-node 2 examples/converted/torchvision_classification.py --epochs 1
"""

import argparse
import os

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    """A moving average of the weights, as torchvision has it."""

    def __init__(self, model, decay, device="cpu"):
        super().__init__(
            model, device, lambda average, new, count: decay * average + (1 - decay) * new, use_buffers=True
        )


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema, scaler):
    model.train()
    for i, (image, target) in enumerate(data_loader):
        image, target = image.to(device), target.to(device)
        with torch.autocast(device.type, enabled=args.amp, dtype=torch.bfloat16):
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if args.clip_grad_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        if i % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
        if torch.distributed.get_rank() == 0:
            print(f"Epoch: [{epoch}] [{i}/{len(data_loader)}] loss: {loss.item():.6e}")


def main(args):
    on_gpu = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    args.gpu = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", args.gpu) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)

    size = (3, args.image_size, args.image_size)
    dataset = torchvision.datasets.FakeData(args.samples, size, 10, torchvision.transforms.ToTensor())
    train_sampler = DistributedSampler(dataset)
    data_loader = DataLoader(dataset, batch_size=args.batch_size, sampler=train_sampler, drop_last=True)

    model = torchvision.models.get_model(args.model, num_classes=10).to(device)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=1)
    main_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main_schedule], milestones=[1])

    model_without_ddp = model
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu] if on_gpu else None)
    model_without_ddp = model.module
    model_ema = ExponentialMovingAverage(model_without_ddp, device=device, decay=0.9)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema, scaler)
        lr_scheduler.step()
        if torch.distributed.get_rank() == 0:
            states = {"model": model_without_ddp, "optimizer": optimizer, "model_ema": model_ema, "scaler": scaler}
            torch.save({name: one.state_dict() for name, one in states.items()}, "checkpoint.pth")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PyTorch Classification Training")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--epochs", default=90, type=int)
    parser.add_argument("-b", "--batch-size", default=32, type=int, help="images per gpu")
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--label-smoothing", default=0.1, type=float)
    parser.add_argument("--clip-grad-norm", default=1.0, type=float)
    parser.add_argument("--model-ema-steps", default=2, type=int)
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--samples", default=512, type=int)
    parser.add_argument("--image-size", default=224, type=int)
    main(parser.parse_args())
