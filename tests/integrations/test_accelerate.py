"""`prepare` with an accelerator: the real one where it is installed, and one with the same methods everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from hybridpar.integrations.accelerate import compress_trainer, prepare
from hybridpar.integrations.data_parallel import DataParallel
from tests.compress.test_ddp import batch, net, weights
from tests.ranks import run_ranks


class StandIn:
    """The methods of `accelerate.Accelerator` (1.15) that are used here, on the CPU."""

    distributed_type = "DistributedType.MULTI_CPU"

    def __init__(self, wraps: bool = True) -> None:
        self.num_processes, self.is_main_process = dist.get_world_size(), dist.get_rank() == 0
        self._wraps, self._models, self._custom = wraps, list[Any](), list[Any]()

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        made = [DistributedDataParallel(one) if isinstance(one, torch.nn.Module) else one for one in objects]
        made = made if self._wraps else list(objects)
        self._models += [one for one in made if isinstance(one, DistributedDataParallel)]
        return tuple(made) if len(made) > 1 else made[0]

    def register_for_checkpointing(self, *objects: Any) -> None:
        self._custom += objects

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def save_state(self, folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        for kind, objects in (("model", self._models), ("custom_checkpoint", self._custom)):
            for number, one in enumerate(objects):
                state = one.state_dict()
                if self.is_main_process:
                    torch.save(state, Path(folder, f"{kind}_{number}.pkl"))
        dist.barrier()

    def load_state(self, folder: str) -> None:
        for kind, objects in (("model", self._models), ("custom_checkpoint", self._custom)):
            for number, one in enumerate(objects):
                one.load_state_dict(torch.load(Path(folder, f"{kind}_{number}.pkl"), weights_only=True))


def make_accelerator(real: bool, world: World) -> Any:
    if not real:
        return StandIn()
    os.environ.update(RANK=str(world.rank), LOCAL_RANK=str(world.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(
        MASTER_PORT="29500", ACCELERATE_USE_CPU="true", LOCAL_WORLD_SIZE="2"
    )  # the group is there already
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


def loop(accelerator: Any, model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        images, labels = batch(rank, step)
        accelerator.backward(F.cross_entropy(model(images), labels))
        optimizer.step()


def resumed(world: World, real: bool, folder: str) -> dict[str, bool]:
    environment = dict(os.environ)
    try:
        results, sent = [], 0
        for first, saves in ((range(3), False), (range(1), True), (range(1, 3), False)):
            accelerator, model = make_accelerator(real, world), net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            loader = DataLoader(TensorDataset(torch.arange(8)), 2)
            model, optimizer, loader = prepare(accelerator, model, optimizer, loader, compress="onebit")
            if first.start:
                accelerator.load_state(folder)
            loop(accelerator, model, optimizer, world.rank, first)
            if saves:
                accelerator.save_state(folder)
            results.append(weights(model))
            assert isinstance(model, DataParallel)
            assert model.compression is not None
            sent = model.compression.traffic.payload
            model.close()
        return {
            "resumed to the bit": torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1]),
            "fewer bytes": sent < results[0].numel(),
            "processes agree": torch.equal(*(torch.tensor(one) for one in world.gather(results[0].tolist()))),
        }
    finally:
        os.environ.clear()
        os.environ.update(environment)


@pytest.mark.parametrize("real", [False, True], ids=["stand-in", "accelerate"])
def test_prepare_and_resume(real: bool, tmp_path: Path) -> None:
    if real:
        pytest.importorskip("accelerate")
    for found in run_ranks(resumed, 2, real, str(tmp_path / "state")):
        assert not [what for what, holds in found.items() if not holds]


def refused(world: World) -> list[str]:
    sgd = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9)
    texts = []
    for compress, accelerator, objects in (
        ("onebitt", StandIn(), (net(),)),
        ("onebit_sgd", StandIn(), (net(), sgd)),
        ("onebit", StandIn(wraps=False), (net(),)),
    ):
        with pytest.raises(UsageError) as caught:
            prepare(accelerator, *objects, compress=compress)
        texts.append(str(caught.value))
    return texts


def test_what_cannot_work_is_refused() -> None:
    for name, momentum, unwrapped in run_ranks(refused, 2):
        assert "Did you mean onebit" in name
        assert "keeps the momentum itself" in momentum
        assert "no model that it wraps in DDP" in unwrapped


class Classifier(torch.nn.Module):
    """A net in the form that a Trainer of transformers expects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.net(images)
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


def trained_by_transformers(world: World, folder: str) -> dict[str, bool]:
    """Weights after four steps: in one go, in two halves, and in two halves without the file of the codecs."""
    from transformers import Trainer, TrainingArguments

    environment = dict(os.environ)
    results, sent = {}, 0
    pairs = [batch(rank, step) for step in range(4) for rank in range(2)]
    rows = [
        {"images": image, "labels": label}
        for images, labels in pairs
        for image, label in zip(images, labels, strict=True)
    ]
    try:
        for name, codec in (("whole", "onebit"), ("resumed", "onebit"), ("none", "none"), ("plain", None)):
            make_accelerator(True, world)  # sets up the environment of a job
            torch.manual_seed(0)
            arguments = TrainingArguments(
                str(Path(folder, "whole" if name == "resumed" else name)),
                max_steps=4,
                per_device_train_batch_size=len(pairs[0][1]),
                learning_rate=0.05,
                optim="sgd",
                lr_scheduler_type="constant",
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                logging_strategy="no",
                save_steps=2,
                ddp_find_unused_parameters=False,
            )
            trainer = Trainer(Classifier(), arguments, train_dataset=rows)
            if codec is not None:
                trainer = compress_trainer(trainer, compress=codec)
            trainer.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-2" if name == "resumed" else None)
            results[name] = weights(trainer.model)
            if name == "whole":
                assert isinstance(trainer.model_wrapped, DataParallel)
                assert trainer.model_wrapped.compression is not None
                sent = trainer.model_wrapped.compression.traffic.payload
        return {
            "resumed to the bit": torch.equal(results["whole"], results["resumed"]),
            "compressed": not torch.equal(results["whole"], results["plain"]),
            "fewer bytes": 0 < sent < results["whole"].numel(),
            "without a codec it is the Trainer": torch.equal(results["none"], results["plain"]),
            "processes agree": torch.equal(*(torch.tensor(one) for one in world.gather(results["whole"].tolist()))),
        }
    finally:
        os.environ.clear()
        os.environ.update(environment)


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(trained_by_transformers, 2, str(tmp_path)):
        assert not [what for what, holds in found.items() if not holds]
