"""PyTorch's tutorial "Getting Started with Distributed Data Parallel" (BSD-3-Clause), shortened.

torchrun --standalone --nproc-per-node 2 examples/converted/ddp_tutorial.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

CHECKPOINT_PATH = os.path.join(tempfile.gettempdir(), f"model-{os.getppid()}.checkpoint")


class ToyModel(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        """(n, 10) to (n, 5)."""
        return self.net2(self.relu(self.net1(x)))


def demo_checkpoint():
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(rank)

    model = ToyModel().to(device)
    ddp_model = DDP(model, device_ids=[device] if on_gpu else None)
    if rank == 0:
        # All processes should see same parameters as they all start from same random parameters.
        torch.save(ddp_model.state_dict(), CHECKPOINT_PATH)
    # Process 1 must not load the model before process 0 has saved it.
    dist.barrier()
    ddp_model.load_state_dict(torch.load(CHECKPOINT_PATH, map_location=device, weights_only=True))

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10).to(device))
        labels = torch.randn(20, 5).to(device)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"loss {loss.item():.6e}")

    dist.barrier()
    if rank == 0:
        os.remove(CHECKPOINT_PATH)
    dist.destroy_process_group()


if __name__ == "__main__":
    demo_checkpoint()
