"""The learning rate as a function of the step alone, against the schedulers of timm and torch."""

from __future__ import annotations

import pytest
import torch
from timm.scheduler import create_scheduler_v2
from torch.optim import lr_scheduler

from hybridpar.config import OptimizerConfig
from hybridpar.config.optimizer import OnPlateau
from hybridpar.optim.schedule import Plateau, rate_factor


@pytest.mark.parametrize(
    ("schedule", "total", "expected"),
    [
        ("cosine:warmup=2", 100, [(step + 1) / 20 for step in range(20)]),
        ("step:fractions=0.5/0.75,warmup=0", 100, [1.0] * 50 + [0.1] * 25 + [0.01] * 25),
        ("constant:warmup=50", 10, [*(step / 5 for step in range(1, 6)), *[1.0] * 5]),
        ("cosine", 1, [1.0]),
    ],
    ids=["a linear warm-up", "falls at fractions", "a warm-up of half of the run at most", "a run of one step"],
)
def test_factors(schedule, total, expected):
    config = OptimizerConfig(lr_schedule=schedule)
    assert [rate_factor(step, total, 10, config) for step in range(len(expected))] == pytest.approx(expected)


LR, EPOCHS, PER_EPOCH = 0.4, 20, 7
TOTAL = EPOCHS * PER_EPOCH


def ours(**options):
    """The rate of every step, or of the first step of every epoch."""
    config = OptimizerConfig(lr=LR, **options)
    every = PER_EPOCH if config.rate_schedule.update == "epoch" else 1
    rates = [LR * rate_factor(step, TOTAL, PER_EPOCH, config) for step in range(TOTAL)]
    for step in range(TOTAL):  # the same within an epoch
        assert rates[step] == rates[step - step % every]
    return rates[::every]


def timms(sched, per_epoch, epochs=EPOCHS, **options):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched, num_epochs=epochs, step_on_epochs=per_epoch, updates_per_epoch=PER_EPOCH, **options
    )
    rates = []
    for time in range(EPOCHS if per_epoch else TOTAL):
        (scheduler.step if per_epoch else scheduler.step_update)(time)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


TIMM = [
    ("cosine", {}),
    ("cosine:min=0.01,cooldown=3", {"epochs": 17, "min_lr": 0.01}),
    ("poly:power=0.9,min=0.01", {"decay_rate": 0.9, "min_lr": 0.01}),
    ("step:every=6,rate=0.5", {"decay_epochs": 6, "decay_rate": 0.5}),
    ("wsd:min=0.02", {"min_lr": 0.02}),
    ("wsd:decay=5,cooldown=2", {"epochs": 18, "decay_epochs": 5}),
    ("constant", {}),
]


@pytest.mark.parametrize("per_epoch", [True, False], ids=["epochs", "steps"])
@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "inside"])
@pytest.mark.parametrize(("schedule", "other"), TIMM)
def test_schedules_are_timms(schedule, other, prefix, per_epoch):
    warm = 4
    sched = schedule.partition(":")[0]
    keys = f"warmup_lr=1e-3,update={'epoch' if per_epoch else 'step'}"
    if sched not in ("constant", "wsd"):  # these begin after the warm-up
        keys += f",warmup_prefix={'on' if prefix else 'off'}"
    separator = "," if ":" in schedule else ":"
    rates = ours(lr_schedule=f"{schedule}{separator}{keys},warmup={float(warm)}")
    # timm adds the warm-up to the epochs where it is a prefix; here the number of epochs is that of the run.
    epochs = other.get("epochs", EPOCHS) - (warm if prefix else 0)
    given = {"warmup_lr": 1e-3, "warmup_epochs": warm, "warmup_prefix": prefix, **other, "epochs": epochs}
    assert rates == pytest.approx(timms(sched, per_epoch, **given), abs=1e-12)


def torchs(scheduler):
    rates = []
    for _ in range(EPOCHS):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        ("multistep:at=5/9", lambda o: lr_scheduler.MultiStepLR(o, [5, 9], 0.1)),
        ("exp:rate=0.9", lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        ("step:every=4", lambda o: lr_scheduler.StepLR(o, 4, 0.1)),
        ("cosine:min=0.01", lambda o: lr_scheduler.CosineAnnealingLR(o, 16, 0.01)),
        ("poly:power=0.9", lambda o: lr_scheduler.PolynomialLR(o, 16, 0.9)),
    ],
)
def test_schedules_are_torchs_after_torchvisions_warm_up(schedule, make):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=4)
    both = lr_scheduler.SequentialLR(optimizer, [warm, make(optimizer)], milestones=[4])
    mine = ours(lr_schedule=f"{schedule},warmup_lr={0.01 * LR},update=epoch,warmup=4")
    assert mine == pytest.approx(torchs(both), rel=1e-6)


@pytest.mark.parametrize("grow", [1, 2])
def test_a_cosine_restarts_as_torchs_does(grow):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    theirs = torchs(lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5, T_mult=grow, eta_min=0.01))
    mine = ours(lr_schedule=f"cosine:cycle=5,grow={grow},min=0.01,warmup=0,update=epoch")
    assert mine == pytest.approx(theirs, rel=1e-6)


def test_the_peak_of_each_cycle_is_lower_and_the_last_one_ends_at_the_cool_down():
    assert ours(lr_schedule="cosine:cycle=5,cooldown=3,min=0.01,warmup=0,update=epoch")[-3:] == pytest.approx(
        [0.01] * 3
    )
    mine = ours(lr_schedule="cosine:cycle=5,decay=0.5,warmup=0,update=epoch")
    assert mine[::5] == pytest.approx([LR, LR / 2, LR / 4, LR / 8])


def test_a_plateau_lowers_the_rate_as_torchs_does_and_survives_a_checkpoint():
    schedule = OnPlateau(patience=1, min=0.01)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    reference = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1, factor=0.1, min_lr=0.01)
    plateau = Plateau(LR, schedule)
    for metric in (0.1, 0.5, 0.5, 0.4, 0.4, 0.6, 0.5, 0.5, 0.5, 0.5):
        plateau.step(metric)
        again = Plateau(LR, schedule)
        again.load_state_dict(plateau.state_dict())
        plateau = again
        reference.step(metric)
        assert LR * plateau.factor == pytest.approx(optimizer.param_groups[0]["lr"])
    assert plateau.factor < 0.2
