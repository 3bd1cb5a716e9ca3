"""The learning-rate range test: what it finds, what it suggests, and that it leaves no trace."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar import TrainConfig, Trainer
from hybridpar.cli import main
from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from hybridpar.run.find_rate import find_rate
from hybridpar.train.rate_test import RateTest, range_test
from tests.ranks import run_ranks
from tests.runs import SMALL, restored_modes
from tests.small_nets import plain

QUICK = {"lowest": 1e-4, "highest": 100.0, "steps": 30}


def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(4):
        labels = torch.randint(0, 10, (16,), generator=generator)
        yield torch.randn(16, 3, 8, 8, generator=generator) + labels[:, None, None, None], labels


def opened(**options: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(plain(), config=TrainConfig(plan="none", **options), total_steps=40, steps_per_epoch=4, classes=10)


def test_rates_grow_evenly_and_the_loss_ends_the_test() -> None:
    with opened() as trainer:
        found = range_test(trainer, batches, **QUICK)
    ratios = {round(after / before, 6) for before, after in zip(found.rates, found.rates[1:], strict=False)}
    assert ratios == {round(1e6 ** (1 / 29), 6)}
    assert found.rates[0] == pytest.approx(1e-4)
    assert found.losses[0] == found.smoothed[0]
    assert found.lowest is not None
    assert found.suggestion == pytest.approx(found.rates[found.lowest] / 10)
    assert found.smoothed[found.lowest] == min(found.smoothed) < found.smoothed[0]
    assert found.lowest < len(found.rates) - 1, "at a rate of 100 the loss is high again"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "adamw", "model_ema": True, "mixup": 0.2, "lr_schedule": "cosine"},
        {"sync": "outer:5", "outer_optimizer": "nesterov"},
    ],
)
def test_everything_is_as_before(options: dict[str, Any]) -> None:
    states = []
    for tests in (False, True):
        with opened(**options) as trainer:
            for batch in batches(7):
                trainer.step(batch)
            if tests:
                range_test(trainer, batches, **QUICK)
            rates = [trainer.step(batch).lr for batch in batches(8)]
            average = copy.deepcopy(trainer.engine.average_state())
            state = {
                **trainer.model.state_dict(),
                **{f"average {key}": value for key, value in (average or {}).items()},
            }
            states.append((state, rates, trainer.steps_done, torch.rand(3)))
    (one, *facts), (other, *same) = states
    assert facts[:2] == same[:2]
    assert torch.equal(facts[2], same[2])
    assert all(torch.equal(one[name], other[name]) for name in one)


class Exploding(nn.Module):
    """Has finite gradients in its first steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scores: Tensor = self.layer(x) * (math.nan if self.calls > 12 else 1.0)
        return scores


def test_a_loss_that_is_not_finite_ends_the_test() -> None:
    with Trainer(Exploding(), config=TrainConfig(plan="none")) as trainer:
        found = range_test(trainer, lambda _: [(torch.randn(4, 4), torch.tensor([0, 1, 0, 1]))], **QUICK)
        assert found.diverged
        assert len(found.rates) == 13
        assert all(torch.isfinite(one).all() for one in trainer.model.parameters())
        assert "nan" in found.table()[-1]


def test_where_the_loss_never_fell_nothing_is_suggested() -> None:
    found = RateTest((0.1, 0.2, 0.4), (1.0, 2.0, 5.0), (1.0, 1.5, 4.5), True)
    assert found.lowest is found.suggestion is None
    assert len(found.table()) == 4
    assert RateTest((0.1, 0.2), (2.0, 1.0), (2.0, 1.0), False).table()[-1].endswith("#  lowest")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"lowest": 0.0}, "above 0"),
        ({"highest": 1e-5}, "grow"),
        ({"steps": 3}, "10 or more"),
        ({"batches": 0}, "batch"),
    ],
)
def test_what_cannot_be_tested_is_refused(more: dict[str, Any], said: str) -> None:
    given = (lambda _: []) if more.pop("batches", 1) == 0 else batches
    with opened() as trainer, pytest.raises(UsageError, match=said):
        range_test(trainer, given, **{**QUICK, **more})


def both(world: World) -> tuple[float, ...]:
    torch.manual_seed(0)
    share = slice(8 * world.rank, 8 * world.rank + 8)
    with Trainer(plain(), config=TrainConfig(plan="none"), world=world) as trainer:
        pieces = lambda epoch: [(images[share], labels[share]) for images, labels in batches(epoch)]  # noqa: E731
        return range_test(trainer, pieces, **{**QUICK, "steps": 12}).smoothed


def test_all_workers_find_the_same() -> None:
    one, other = run_ranks(both, 2)
    assert one == other


def test_one_worker_makes_the_steps_of_a_run_of_several() -> None:
    """The first loss is that of the run: the same samples, in micro-batches in the place of workers."""
    lines: list[str] = []
    config = TrainConfig(**{**SMALL, "tune_process": False, "stages": 2, "model_ema": True, "compress": "onebit"})
    config = replace(config, sync="outer:4", outer_optimizer="nesterov")
    with restored_modes():
        found = find_rate(config, "tests.small_nets:plain", workers=4, tell=lines.append, **QUICK)
    assert "batch    16 samples per step, as 2 micro-batches" in lines
    assert found.suggestion is not None


def test_the_command_prints_a_table_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items() if key != "epochs"]
    line = ["find-lr", "tests.small_nets:plain", *options, "--workers=1", "--no-tune-process"]
    with restored_modes():
        assert main([*line, "--test-steps=20"]) == 0
        said = capsys.readouterr().out
        assert "suggested  --lr " in said
        assert "a tenth of the rate with the lowest smoothed loss" in said
        assert main([*line, "--test-steps=20", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
    assert f"--lr {told['suggestion']:.2g}\n" in said
    assert not list(tmp_path.iterdir())
    assert main([*line, "--test-steps=2"]) == 2
    assert "10 or more" in capsys.readouterr().err
