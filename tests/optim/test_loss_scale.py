"""Dynamic loss scaling: torch's schedule, unscaled gradients, and a training in float16 under every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hybridpar import Trainer
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import TrainingError
from hybridpar.optim.loss_scale import LossScale
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_scale_is_that_of_torchs_grad_scaler_step_by_step(as_tensor):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scale = LossScale(CPU, initial=1024.0, interval=3)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    finite = torch.rand(60, generator=torch.Generator().manual_seed(0)) < 0.6
    seen = set()
    for good in [True] * 12 + finite.tolist():
        scaler.scale(weight.sum()).backward()
        if not good:
            weight.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scale.update(torch.tensor(good) if as_tensor else good)
        assert float(scale.value) == scaler.get_scale()
        seen.add(scaler.get_scale())
    assert min(seen) < 1024 < max(seen)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 6, generator=rng)
    return inputs, (inputs.sum(dim=1) > 0).long() + (inputs[:, 0] > 1).long()


def trained(world: World, steps: int, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float, list[bool]]:
    """Train in float16, with a batch at step 3 whose gradients overflow at the first scale."""
    config = TrainConfig(amp="fp16", plan="none", lr=0.1, **options)
    skipped = []
    example = batch(0)[0][: 16 // config.micro_batches]
    with Trainer(net(), config=config, world=world, example=example) as trainer:
        for step in range(steps):
            part = slice(world.rank, None, world.size) if config.stages == 1 else slice(None)
            inputs, targets = (one[part] for one in batch(step))
            skipped.append(trainer.step((inputs * (500 if step == 3 else 1), targets)).skipped)
        trainer.engine.synchronize_buffers()
        scale = trainer.engine.training_state()["loss_scale"]["scale"]
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}, scale, skipped


@pytest.mark.parametrize(
    ("ranks", "options"),
    [*((ranks, {"stages": 2, "micro_batches": 2}) for ranks in (1, 2)), (2, {}), (2, {"compress": "fp16"})],
    ids=["lanes", "stages", "replicas", "codec"],
)
def test_every_layout_trains_like_one_process(ranks, options):
    wanted, scale, skipped = trained(World(), 8, {"micro_batches": options.get("micro_batches", 1)})
    assert skipped[3]
    assert not skipped[-1]
    assert scale < 2**16
    for state, other_scale, other_skipped in run_ranks(trained, ranks, 8, options, shared_memory=False):
        assert (other_scale, other_skipped) == (scale, skipped)
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, rtol=2e-2, atol=2e-3)


def test_it_follows_float32_and_a_resumed_run_is_equal_to_the_bit(tmp_path):
    config = TrainConfig(amp="fp16", plan="none", lr=0.1)
    with Trainer(net(), config=TrainConfig(plan="none", lr=0.1)) as plain, Trainer(net(), config=config) as trainer:
        for step in range(6):
            if step == 3:
                trainer.engine.loss_scales[0].update(False)
                saved = trainer.save(tmp_path)
            plain.step(batch(step))
            trainer.step(batch(step))
        for one, other in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
        with Trainer(net(), config=config) as resumed:
            resumed.load(saved)
            assert resumed.engine.training_state()["loss_scale"] == {"scale": 2.0**15, "steps": 0.0}
            for step in range(3, 6):
                resumed.step(batch(step))
            for one, other in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
                assert torch.equal(one, other)
            assert resumed.engine.training_state()["loss_scale"] == trainer.engine.training_state()["loss_scale"]


def test_a_parameter_that_is_thawed_while_training_gets_its_unscaled_gradient():
    states = []
    for amp in ("none", "fp16"):
        model = net()
        model[0].weight.requires_grad_(False)
        with Trainer(model, config=TrainConfig(amp=amp, plan="none", lr=0.1)) as trainer:
            assert not model[0].weight.requires_grad
            for step in range(6):
                model[0].weight.requires_grad_(step >= 3)
                trainer.step(batch(step))
        states.append(model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=2e-2, atol=2e-3)


def test_a_loss_that_no_scale_can_help_ends_the_training_with_the_name_of_a_parameter():
    with Trainer(net(), config=TrainConfig(amp="fp16", plan="none")) as trainer:
        inputs, targets = batch(0)
        for _ in range(26):
            assert trainer.step((inputs * torch.nan, targets)).skipped
        with pytest.raises(TrainingError, match=r"steps 1 to 27; first bad parameter: 0\.weight"):
            trainer.step((inputs * torch.nan, targets))
