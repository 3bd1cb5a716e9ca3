"""A step launches hardly more on a GPU than a plain loop, and the host waits for it once, and a step late."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.optim.build import build_optimizer
from hybridpar.partition import partition_model
from tests.pipeline.device_calls import GPU, Calls, pretend_cuda
from tests.small_nets import SmallNet

#: What a step may launch: so many times what a plain loop does, and so many more, for the guard and for what is known
#: of a step.
FACTOR, MORE = 1.02, 12
#: Of a net of a few layers it may launch so many more for each stage: the kernels that pool BatchNorm's statistics are
#: as many for two layers as for fifty, which save one for each layer and micro-batch.
MORE_OF_SMALL = 50

SAMPLES, SIZE = 8, 32
#: Small nets, and their rates of dropout.
SMALL = {"small": 0.0, "dropping": 0.5}
#: Steps before those that are counted: by then constants are on the device, and optimizers have their state.
WARM_UP = 3

#: Options, and what a plain loop has that does the same.
WAYS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw": {"optimizer": "adamw"},
    "no guard": {"guard": False},
    "clipping": {"clip_grad": 1.0},
    "average": {"model_ema": "0.99"},
    "bf16": {"amp": "bf16"},
    "fp16": {"amp": "fp16"},
    "channels_last": {"memory_format": "channels_last"},
    "pooled BatchNorm": {"micro_batches": 2},
    "2 stages": {"micro_batches": 4, "stages": 2, "schedule": "1f1b"},
    "2 stages, clipping": {"micro_batches": 4, "stages": 2, "schedule": "gpipe", "clip_grad": 1.0},
}
CASES = [("resnet18", way) for way in WAYS if way != "fp16"]  # whose convolutions take a CPU many seconds
CASES += [("small", "fp16"), ("mobilenet_v2", "sgd"), ("convnext", "adamw")]
CASES += [("small", "pooled BatchNorm"), ("dropping", "2 stages")]

#: With few channels: launches are counted, and what is computed does not matter.
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(SmallNet, dropout=dropout) for name, dropout in SMALL.items()},
    "resnet18": partial(timm.create_model, "resnet18", num_classes=10, channels=(8, 16, 32, 64)),
    "mobilenet_v2": partial(torchvision.models.mobilenet_v2, num_classes=10, width_mult=0.25),
    "convnext": partial(timm.create_model, "convnext_atto", num_classes=10),
}


def batch(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = 8 if name in SMALL else SIZE
    images = torch.randn(SAMPLES, 3, size, size, generator=generator)
    return images, torch.randint(0, 10, (SAMPLES,), generator=generator)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def calls_of_plain_loop(name: str, config: TrainConfig) -> Calls:
    model = model_of(name)
    layout = torch.channels_last if config.memory_format == "channels_last" else torch.contiguous_format
    model.to(memory_format=layout)
    optimizer = build_optimizer(model, config)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.amp)
    scaler = torch.amp.GradScaler("cpu", enabled=config.amp == "fp16")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)

    parts = [part.chunk(config.micro_batches) for part in batch(name)]

    def step() -> None:
        optimizer.zero_grad()
        for images, labels in zip(*parts, strict=True):
            with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
                loss = nn.functional.cross_entropy(model(images.to(memory_format=layout)), labels)
            scaler.scale(loss / config.micro_batches if config.micro_batches > 1 else loss).backward()
        if config.clip_grad:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if config.model_ema:
            average.update_parameters(model)

    for _ in range(WARM_UP):
        step()
    with Calls() as calls:
        step()
    return calls


def cut_as(name: str, config: TrainConfig) -> dict[str, Any]:
    """What a trainer cuts a model by: a pretended GPU has no clock."""
    example, plan = batch(name)[0][: SAMPLES // config.micro_batches], None
    if config.stages > 1:
        plan = partition_model(model_of(name), [example], config.stages, measure=False).plan
    return {"example": example, "plan": plan}


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_step_launches_what_a_plain_loop_does_and_the_host_waits_once(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(lr=0.01, plan="none", cuda_graph="off", **WAYS[way])
    plain = calls_of_plain_loop(name, config)
    given, facts = batch(name), cut_as(name, config)
    with (
        pretend_cuda(monkeypatch) as calls,
        Trainer(model_of(name), config=config, world=World(device=GPU), **facts) as trainer,
    ):
        for _ in range(WARM_UP):
            trainer.step(given)
        calls.launched.clear()
        calls.waits.clear()
        result = trainer.step(given)
        waits, launched = list(calls.waits), calls.launched.copy()
        # What the host has waited for is the step before: of this one it knows nothing yet.
        assert result.outcome._step is not None
        assert result.loss > 0
    assert waits == ["event"]
    more = {kind: (count, plain.launched[kind]) for kind, count in launched.items() if count != plain.launched[kind]}
    most = plain.launches + MORE_OF_SMALL * config.stages if name in SMALL else FACTOR * plain.launches + MORE
    assert launched.total() <= most, more


class TestGraphByDefault:
    """A step on a GPU is captured where that is right, without an option."""

    @pytest.mark.parametrize(
        "way",
        [
            {},
            {"optimizer": "adamw"},
            {"micro_batches": 2, "clip_grad": 1.0},
            {"micro_batches": 2, "stages": 2, "schedule": "1f1b"},
        ],
    )
    def test_it_is_captured_and_trains_alike(self, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        trained = []
        for graph in ("off", "auto"):
            config = TrainConfig(lr=2**-6, plan="none", cuda_graph=graph, **way)
            model, facts = model_of("small"), cut_as("small", config)
            with pretend_cuda(monkeypatch), Trainer(model, config=config, world=World(device=GPU), **facts) as trainer:
                losses = [trainer.step(batch("small")).loss for _ in range(6)]
                made = trainer.engine.graph
            assert (made is not None and made.captured) == (graph == "auto")
            trained.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
        (losses, weights), (expected_losses, expected) = trained
        assert losses == expected_losses
        assert all(map(torch.equal, weights, expected))

    @pytest.mark.parametrize(
        ("way", "reason"),
        [
            ({"model_ema": "0.99"}, "--model-ema 0.99"),
            ({"amp": "fp16"}, "--amp fp16"),
            ({"optimizer": "sgd:fused=off"}, "SGD, not fused"),
            ({}, "a hook of a module"),
        ],
    )
    def test_what_rules_it_out_is_said_once(
        self, way: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = TrainConfig(lr=0.01, plan="none", **way)
        model = model_of("small")
        if not way:
            next(model.children()).register_forward_hook(lambda *_: None)
        with pretend_cuda(monkeypatch), Trainer(model, config=config, world=World(device=GPU)) as trainer:
            trainer.step(batch("small"))
            assert trainer.engine.graph is None
        assert [reason in record.getMessage() for record in caplog.records] == [True]

    def test_off_says_nothing(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        config = TrainConfig(plan="none", cuda_graph="off")
        with pretend_cuda(monkeypatch), Trainer(model_of("small"), config=config, world=World(device=GPU)) as trainer:
            assert trainer.engine.graph is None
        assert not caplog.records
