"""Times training until a loss is reached, for streams and micro-batches: the pack `thesis` of `scripts/gpu_check.py`.

ResNets on data that needs no download, of the shape of CIFAR: one plain loop, and hybridpar with the model whole and
cut into 2 and 4 stages, each on a stream of its own, of 1 to 8 micro-batches, with and without a CUDA graph. All train
from the same weights on the same batches until the mean loss of the last `WINDOW` steps is at most `TARGET`. What comes
before the clock, warming up and capturing, is a training of its own whose weights are thrown away.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.rig.records import append_dicts
from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.data import TrainBatches, load_dataset
from hybridpar.errors import DataError, HybridparError
from hybridpar.models import build_model
from hybridpar.optim.build import build_optimizer
from scripts.gpu_common import Pack, versions
from scripts.gpu_steps import graph_of

MODELS = ("resnet18", "resnet34", "resnet50")
STAGES, MICRO_BATCHES = (1, 2, 4), (1, 2, 4, 8)
SAMPLES, CLASSES, LR = 128, 10, 0.05
#: The loss to reach, of how many steps, and after how many a way is given up.
TARGET, WINDOW, MOST_STEPS = 0.1, 10, 400
#: Steps before the clock: more than come before a capture.
WARM_UP = 8

Batch = tuple[Tensor, Tensor]
#: Issues a step and returns its loss, which may not be known yet.
Step = Callable[[Batch], Callable[[], float]]
_Optimizers = list[torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train; of the plain loop `stages` is 0."""

    stages: int
    micro_batches: int = 1
    graph: str = "off"

    @property
    def text(self) -> str:
        """The way in words, as the table has it."""
        if not self.stages:
            return "plain loop"
        graph = ", CUDA graph" if self.graph == "on" else ""
        return f"{self.stages} stage{'s' * (self.stages > 1)}, {self.micro_batches} micro-batches{graph}"


def ways(*, graphs: bool) -> Iterator[Way]:
    """All ways, the plain loop first."""
    yield Way(0)
    for graph, stages, micro_batches in itertools.product(("on", "off") if graphs else ("off",), STAGES, MICRO_BATCHES):
        if stages == 1 or micro_batches > 1:
            yield Way(stages, micro_batches, graph)


def batches_of(samples: int, device: torch.device) -> list[Batch]:
    """The batches of one epoch on the device: real digits where scikit-learn is installed, else synthetic images."""
    try:
        data = load_dataset(TrainConfig(data="digits"))
    except DataError:
        data = load_dataset(TrainConfig(data="synthetic:samples=1437"))
    batches = TrainBatches(data=data, batch_size=samples, rank=0, workers=1, seed=0, micro_batches=1, device=device)
    parts = [batch.micro_batches[0] for batch in batches.epoch(0)]
    return [(images.expand(-1, 3, -1, -1).contiguous(), labels) for images, labels in parts]


def steps_of(
    way: Way, model: nn.Module, device: torch.device, example: Tensor
) -> tuple[Step, _Optimizers, Callable[[], str]]:
    """A step of a way, its optimizers, and what ends it, which says what became of a graph."""
    config = TrainConfig(lr=LR, plan="none")
    if not way.stages:
        model.to(device)
        optimizer = build_optimizer(model, config)

        def step(batch: Batch) -> Callable[[], float]:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach().item

        return step, [optimizer], lambda: "none"
    config = dataclasses.replace(
        config, stages=way.stages, micro_batches=way.micro_batches, cuda_graph=way.graph, schedule="1f1b"
    )
    trainer = Trainer(
        model, config=config, world=World(device=device), example=example[: len(example) // way.micro_batches]
    )

    def trained(batch: Batch) -> Callable[[], float]:
        result = trainer.step(batch)
        return lambda: result.loss

    def end() -> str:
        said = graph_of(trainer)
        trainer.close()
        return said

    return trained, trainer.engine.optimizers, end


def time_way(
    way: Way, model: str, batches: list[Batch], device: torch.device, most_steps: int, stem: str = "cifar"
) -> dict[str, object]:
    """Train in a way, and say after how many steps and seconds the loss was reached."""

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return build_model(model, CLASSES, args={"stem": stem})

    made = fresh()
    step, optimizers, end = steps_of(way, made, device, batches[0][0])
    try:
        for batch in itertools.islice(itertools.cycle(batches), WARM_UP):
            last = step(batch)
        last()
        with torch.no_grad():  # in place, as a graph knows where they lie
            for name, value in fresh().state_dict().items():
                made.state_dict()[name].copy_(value)
            for optimizer in optimizers:
                for values in optimizer.state.values():
                    values["momentum_buffer"].zero_()
        losses: list[float] = []
        pending: list[Callable[[], float]] = []
        began = time.perf_counter()
        for batch in itertools.islice(itertools.cycle(batches), most_steps):
            pending.append(step(batch))
            if len(pending) > 1:  # a step late, so that the device always has work
                losses.append(pending.pop(0)())
            if len(losses) >= WINDOW and sum(losses[-WINDOW:]) <= TARGET * WINDOW:
                break
        losses += [loss() for loss in pending]
        seconds = time.perf_counter() - began
    finally:
        said = end()
    return {
        "steps": len(losses),
        "seconds": f"{seconds:.3f}",
        "ms_per_step": f"{1e3 * seconds / len(losses):.3f}",
        "loss": f"{sum(losses[-WINDOW:]) / len(losses[-WINDOW:]):.4f}",
        "reached": sum(losses[-WINDOW:]) <= TARGET * WINDOW,
        "graph": said,
    }


def run(pack: Pack) -> bool:
    """Time all ways of all models, and add rows to the table as they come."""
    samples, most = (8, 3) if pack.dry else (SAMPLES, MOST_STEPS)
    batches = batches_of(samples, pack.device)[: 2 if pack.dry else None]
    failed = False
    for model in MODELS[: 1 if pack.dry else None]:
        plain = 0.0
        for way in ways(graphs=pack.device.type == "cuda"):
            if pack.dry and way not in (Way(0), Way(1), Way(2, 2)):
                continue
            name = f"{model}, {way.text}"
            if not name.startswith(pack.only) or not pack.has_time_for(name):
                continue
            try:
                row = time_way(way, model, batches, pack.device, most, "imagenet" if pack.dry else "cifar")
            except (HybridparError, RuntimeError) as error:
                failed = True
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            seconds = float(str(row["seconds"]))
            plain = plain if way.stages else seconds
            ratio = {"time_over_plain": f"{seconds / plain:.3f}" if plain else ""}
            append_dicts(
                pack.out / "thesis.csv",
                [pack.facts() | {"model": model, "samples": samples, "way": way.text} | row | ratio | versions()],
            )
            print(f"{name}: {row['steps']} steps, {row['seconds']} s, loss {row['loss']}", flush=True)
    return not failed
