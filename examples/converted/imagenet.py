"""The training script of pytorch/examples (imagenet/main.py, BSD-3-Clause), shortened: the script as it is, with DDP.

torchrun --standalone --nproc-per-node 2 examples/converted/imagenet.py --dummy -a shufflenet_v2_x0_5 --epochs 1
"""

import argparse
import os

import torch
import torch.distributed as dist
import torchvision.models as models
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("data", nargs="?", default="imagenet")
parser.add_argument("-a", "--arch", default="resnet18")
parser.add_argument("-b", "--batch-size", type=int, default=256, help="of all GPUs")
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--resume", default="")
parser.add_argument("--dummy", type=int, nargs="?", const=128, help="use so many fake images")


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    gpu = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")

    model = models.__dict__[args.arch]().to(device)
    batch_size = args.batch_size // dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[gpu] if device.type == "cuda" else None)

    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    size, as_tensor = args.image_size, transforms.ToTensor()
    if args.dummy:
        train_dataset = datasets.FakeData(args.dummy, (3, size, size), 1000, as_tensor)
        val_dataset = datasets.FakeData(args.dummy // 4, (3, size, size), 1000, as_tensor)
    else:
        flipped = transforms.Compose([transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), as_tensor])
        cropped = transforms.Compose([transforms.Resize(size * 8 // 7), transforms.CenterCrop(size), as_tensor])
        train_dataset = datasets.ImageFolder(os.path.join(args.data, "train"), flipped)
        val_dataset = datasets.ImageFolder(os.path.join(args.data, "val"), cropped)
    train_sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(train_dataset, batch_size=batch_size, sampler=train_sampler)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    val_loader = DataLoader(val_dataset, batch_size=batch_size, sampler=val_sampler)

    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device)
        acc1 = validate(val_loader, model, device)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"* Acc@1 {acc1:.3f}")
            state = {"epoch": epoch + 1, "state_dict": model.state_dict()}
            torch.save(
                {**state, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()},
                "checkpoint.pth.tar",
            )
    dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch, device):
    model.train()
    for i, (images, target) in enumerate(train_loader):
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"Epoch: [{epoch}][{i + 1}/{len(train_loader)}] Loss {loss.item():.6e}")


def validate(val_loader, model, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for images, target in val_loader:
            correct = model(images.to(device)).argmax(1) == target.to(device)
            counts += torch.tensor([correct.sum(), correct.numel()], device=device)
    dist.all_reduce(counts)
    return float(100 * counts[0] / counts[1])


if __name__ == "__main__":
    main()
