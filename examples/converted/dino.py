"""DINO (facebookresearch/dino main_dino.py, Apache-2.0), shortened: a student in DDP, and a teacher that follows it.

torchrun --standalone --nproc-per-node 2 examples/converted/dino.py --arch resnet18 --epochs 1
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms

parser = argparse.ArgumentParser("DINO")
parser.add_argument("--arch", default="resnet50")
parser.add_argument("--out_dim", default=256, type=int)
parser.add_argument("--epochs", default=100, type=int)
parser.add_argument("--batch_size_per_gpu", default=64, type=int)
parser.add_argument("--freeze_last_layer", default=1, type=int)
parser.add_argument("--clip_grad", default=3.0, type=float)
parser.add_argument("--samples", default=512, type=int)
parser.add_argument("--image_size", default=224, type=int)


class DINOLoss(nn.Module):
    """Cross-entropy between teacher and student, with a centre that all processes share."""

    def __init__(self, out_dim, student_temp=0.1, teacher_temp=0.04, center_momentum=0.9):
        super().__init__()
        self.student_temp, self.teacher_temp, self.center_momentum = student_temp, teacher_temp, center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output):
        """The loss of both crops against each other, (2n, out_dim) each."""
        student_out = (student_output / self.student_temp).chunk(2)
        teacher_out = ((teacher_output - self.center) / self.teacher_temp).softmax(-1).detach().chunk(2)
        pairs = [(teacher_out[0], student_out[1]), (teacher_out[1], student_out[0])]
        loss = sum((-q * v.log_softmax(-1)).sum(-1).mean() for q, v in pairs) / 2
        batch_center = teacher_output.detach().mean(0, keepdim=True)
        dist.all_reduce(batch_center)
        self.center.lerp_(batch_center / dist.get_world_size(), 1 - self.center_momentum)
        return loss


def make_network(args):
    backbone = torchvision.models.get_model(args.arch)
    features = backbone.fc.in_features
    backbone.fc = nn.Identity()
    head = nn.Sequential(nn.Linear(features, 128), nn.GELU(), nn.Linear(128, 64))
    last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, args.out_dim, bias=False))
    return nn.Sequential(backbone, head, last_layer)


def train_dino(args):
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    gpu = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", gpu) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)

    student, teacher = make_network(args).to(device), make_network(args).to(device)
    student = nn.parallel.DistributedDataParallel(student, device_ids=[gpu] if on_gpu else None)
    teacher.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False

    crop = transforms.Compose([transforms.RandomResizedCrop(args.image_size), transforms.ToTensor()])
    size = (3, args.image_size, args.image_size)
    dataset = torchvision.datasets.FakeData(args.samples, size, 10, lambda image: [crop(image), crop(image)])
    sampler = DistributedSampler(dataset)
    data_loader = DataLoader(dataset, args.batch_size_per_gpu, sampler=sampler, drop_last=True)
    dino_loss = DINOLoss(args.out_dim).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.04)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for it, (images, _) in enumerate(data_loader):
            both = torch.cat(images).to(device)
            loss = dino_loss(student(both), teacher(both))
            if not math.isfinite(loss.item()):
                raise SystemExit(f"Loss is {loss.item()}, stopping training")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), args.clip_grad)
            if epoch < args.freeze_last_layer:  # cancel the gradients of the last layer
                for p in student.module[-1].parameters():
                    p.grad = None
            optimizer.step()
            with torch.no_grad():
                for param_q, param_k in zip(student.module.parameters(), teacher.parameters(), strict=True):
                    param_k.lerp_(param_q, 1 - 0.996)
            if dist.get_rank() == 0:
                print(f"Epoch: [{epoch}/{args.epochs}] [{it}/{len(data_loader)}] loss: {loss.item():.6e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train_dino(parser.parse_args())
