"""The loop of torchvision's references/detection/train.py (BSD-3-Clause), shortened: a model that returns its losses.

torchrun --standalone --nproc-per-node 2 examples/converted/torchvision_detection.py --epochs 1
"""

import argparse
import os

import torch
import torchvision
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Squares(Dataset):
    """Grey images with one bright square each."""

    def __init__(self, samples, size):
        self.samples, self.size = samples, size

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        x, y = (int(torch.randint(self.size // 2, (1,), generator=draw)) for _ in range(2))
        image = torch.full((3, self.size, self.size), 0.2)
        image[:, y : y + self.size // 2, x : x + self.size // 2] = 1.0
        box = torch.tensor([[x, y, x + self.size // 2, y + self.size // 2]], dtype=torch.float32)
        return image, {"boxes": box, "labels": torch.ones(1, dtype=torch.int64)}


def reduce_dict(losses):
    """The mean of each loss over the processes."""
    names = sorted(losses)
    values = torch.stack([losses[name].detach() for name in names])
    torch.distributed.all_reduce(values)
    return dict(zip(names, values / torch.distributed.get_world_size(), strict=True))


def train_one_epoch(model, optimizer, data_loader, device, epoch, scaler=None):
    model.train()
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=min(1000, len(data_loader)))
    for images, targets in data_loader:
        images = [image.to(device) for image in images]
        targets = [{name: value.to(device) for name, value in target.items()} for target in targets]
        with torch.autocast(device.type, enabled=scaler is not None):
            loss_dict = model(images, targets)
            losses = sum(loss for loss in loss_dict.values())
        loss_dict_reduced = reduce_dict(loss_dict)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(losses).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            losses.backward()
            optimizer.step()
        if epoch == 0:
            warmup.step()
        if torch.distributed.get_rank() == 0:
            print(f"Epoch: [{epoch}] " + "  ".join(f"{name}: {loss:.6e}" for name, loss in loss_dict_reduced.items()))


def main(args):
    on_gpu = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    args.gpu = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", args.gpu) if on_gpu else torch.device("cpu")
    torch.manual_seed(torch.distributed.get_rank())

    dataset = Squares(args.samples, args.image_size)
    train_sampler = DistributedSampler(dataset)
    data_loader = DataLoader(
        dataset, args.batch_size, sampler=train_sampler, collate_fn=lambda batch: tuple(zip(*batch, strict=True))
    )
    sizes = {"min_size": args.image_size, "max_size": args.image_size}
    model = torchvision.models.get_model(args.model, weights_backbone=None, num_classes=2, **sizes).to(device)
    model_without_ddp = model
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu] if on_gpu else None)
    model_without_ddp = model.module
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device.type) if args.amp else None
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[16, 22], gamma=0.1)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, optimizer, data_loader, device, epoch, scaler)
        lr_scheduler.step()
        if torch.distributed.get_rank() == 0:
            torch.save({"model": model_without_ddp.state_dict(), "epoch": epoch}, "checkpoint.pth")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PyTorch Detection Training")
    parser.add_argument("--model", default="fasterrcnn_mobilenet_v3_large_320_fpn")
    parser.add_argument("-b", "--batch-size", default=2, type=int, help="images per gpu")
    parser.add_argument("--epochs", default=26, type=int)
    parser.add_argument("--lr", default=0.02, type=float)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--samples", default=64, type=int)
    parser.add_argument("--image-size", default=320, type=int)
    main(parser.parse_args())
