"""The loop of timm's train.py (Apache-2.0), shortened: accumulation in no_sync, clipping, EMA, mixup.

torchrun --standalone --nproc-per-node 2 examples/converted/timm_loop.py --model resnet18 --epochs 1
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_model, model_parameters
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad, distribute_bn, random_seed
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("--model", default="resnet50")
parser.add_argument("--opt", default="sgd")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("-b", "--batch-size", type=int, default=128)
parser.add_argument("--grad-accum-steps", type=int, default=2)
parser.add_argument("--clip-grad", type=float, default=1.0)
parser.add_argument("--epochs", type=int, default=300)
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--no-ddp-bb", action="store_true", help="do not broadcast buffers")


def main():
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    random_seed(42, dist.get_rank())

    model = create_model(args.model, num_classes=10).to(device)
    optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, weight_decay=1e-4, momentum=0.9)
    model_ema = ModelEmaV3(model, decay=0.99)
    model = NativeDDP(model, device_ids=[device] if on_gpu else None, broadcast_buffers=not args.no_ddp_bb)

    dataset = FakeData(args.samples, (3, args.image_size, args.image_size), 10, ToTensor())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    mixup_fn = Mixup(mixup_alpha=0.2, num_classes=10)
    lr_scheduler = CosineLRScheduler(optimizer, t_initial=args.epochs, warmup_t=1, warmup_lr_init=1e-3)
    loss_fn = SoftTargetCrossEntropy()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, device, model_ema, mixup_fn)
        distribute_bn(model, dist.get_world_size(), reduce=True)
        lr_scheduler.step(epoch + 1)
    dist.destroy_process_group()


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, device, model_ema, mixup_fn):
    model.train()
    optimizer.zero_grad()
    accum_steps = args.grad_accum_steps
    for batch_idx, (input, target) in enumerate(loader):
        need_update = (batch_idx + 1) % accum_steps == 0
        input, target = mixup_fn(input.to(device), target.to(device))
        with nullcontext() if need_update else model.no_sync():
            loss = loss_fn(model(input), target) / accum_steps
            loss.backward()
        if not need_update:
            continue
        dispatch_clip_grad(model_parameters(model), value=args.clip_grad, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        model_ema.update(model, step=batch_idx)
        if dist.get_rank() == 0:
            print(f"Train: {epoch} [{batch_idx}/{len(loader)}] Loss: {loss.item() * accum_steps:.6e}")


if __name__ == "__main__":
    main()
