"""MoCo (facebookresearch/moco main_moco.py, MIT), shortened: a momentum encoder and a queue in the wrapped model.

torchrun --standalone --nproc-per-node 2 examples/converted/moco.py -a resnet18 --epochs 1
"""

import argparse
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("-a", "--arch", default="resnet50")
parser.add_argument("-b", "--batch-size", default=32, type=int, help="of each GPU")
parser.add_argument("--epochs", default=200, type=int)
parser.add_argument("--lr", default=0.03, type=float)
parser.add_argument("--moco-dim", default=128, type=int)
parser.add_argument("--moco-k", default=1024, type=int, help="queue size")
parser.add_argument("--samples", default=512, type=int)
parser.add_argument("--image-size", default=224, type=int)


class MoCo(nn.Module):
    """Two encoders, of which one follows the other, and a queue of its keys."""

    def __init__(self, base_encoder, dim, size, momentum=0.999, temperature=0.07):
        super().__init__()
        self.momentum, self.temperature = momentum, temperature
        self.encoder_q, self.encoder_k = base_encoder(num_classes=dim), base_encoder(num_classes=dim)
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        for parameter in self.encoder_k.parameters():
            parameter.requires_grad = False  # not updated by gradient
        self.register_buffer("queue", nn.functional.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        everybodys = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(everybodys, keys)
        keys = torch.cat(everybodys)
        start = int(self.queue_ptr)
        self.queue[:, start : start + len(keys)] = keys.T
        self.queue_ptr[0] = (start + len(keys)) % self.queue.shape[1]

    def forward(self, im_q, im_k):
        """Logits of the right key and of those in the queue, and the labels, which are all 0."""
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                param_k.lerp_(param_q, 1 - self.momentum)
            k = nn.functional.normalize(self.encoder_k(im_k), dim=1)
        l_pos = (q * k).sum(1, keepdim=True)
        l_neg = q @ self.queue.clone().detach()
        self._dequeue_and_enqueue(k)
        return torch.cat([l_pos, l_neg], 1) / self.temperature, torch.zeros(len(q), dtype=torch.long, device=q.device)


def main_worker(args):
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    gpu = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", gpu) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)

    model = MoCo(torchvision.models.__dict__[args.arch], args.moco_dim, args.moco_k).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[gpu] if on_gpu else None)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)

    crop = transforms.Compose([transforms.RandomResizedCrop(args.image_size), transforms.ToTensor()])
    size = (3, args.image_size, args.image_size)
    train_dataset = torchvision.datasets.FakeData(args.samples, size, 10, lambda image: [crop(image), crop(image)])
    train_sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(train_dataset, args.batch_size, sampler=train_sampler, drop_last=True)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for i, (images, _) in enumerate(train_loader):
            output, target = model(im_q=images[0].to(device), im_k=images[1].to(device))
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"Epoch: [{epoch}][{i}/{len(train_loader)}] Loss {loss.item():.6e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main_worker(parser.parse_args())
