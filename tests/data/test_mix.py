"""Mixup and cutmix against timm's own, and alike under every layout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from timm.data import Mixup

from hybridpar import Trainer
from hybridpar.config import TrainConfig
from hybridpar.config.data import Mixing
from hybridpar.data.mix import MixDraw, cut_around, draw_mix, mix
from hybridpar.errors import UsageError
from hybridpar.optim.losses import soft_targets
from tests.pipeline.oracle import images
from tests.ranks import run_ranks
from tests.train.test_engine import EXAMPLE, assert_close, normless, plan_of, state_of
from tests.train.training import close, make_net, same, share, weights

CLASSES = 5


def batch(samples=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 3, 9, 7, generator=generator)
    return images, torch.randint(0, CLASSES, (samples,), generator=generator)


def to_ends(samples):
    """An order in which neighbours come to lie at the ends of the batch, where timm looks for partners."""
    return torch.cat([torch.arange(0, samples, 2), torch.arange(1, samples, 2).flip(0)])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cuts", [False, True], ids=["mixup", "cutmix"])
@pytest.mark.parametrize(("lam", "several"), [(0.3, False), (0.85, False), (0.3, True)])
def test_it_is_timms_on_the_same_random_numbers(smoothing, cuts, lam, several, monkeypatch):
    images, labels = batch()
    if several:
        labels = (torch.rand(8, CLASSES) > 0.5).float()
    centres: Iterator[int] = iter((1, 6))
    timms = Mixup(0.8, 1.0, label_smoothing=smoothing, num_classes=CLASSES, multi_label=several)
    monkeypatch.setattr(timms, "_params_per_batch", lambda: (lam, cuts))
    monkeypatch.setattr(np.random, "randint", lambda low, high, size=None: next(centres))
    order = to_ends(len(images))
    wanted, wanted_targets = timms(images[order].clone(), labels[order])
    rows, columns = cut_around(1, lam, 9), cut_around(6, lam, 7)
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    draw = MixDraw(1 - area / 63, (rows, columns)) if cuts else MixDraw(lam)
    mixed, targets = mix(images, soft_targets(labels, CLASSES, smoothing), draw)
    torch.testing.assert_close(mixed[order], wanted, rtol=0, atol=0)
    torch.testing.assert_close(targets[order], wanted_targets, rtol=1e-6, atol=1e-7)


def test_an_odd_last_sample_stays_as_it_is():
    images, labels = batch(7)
    mixed, targets = mix(images, soft_targets(labels, CLASSES), MixDraw(0.3))
    assert torch.equal(mixed[-1], images[-1] * 0.3 + images[-1] * 0.7)
    torch.testing.assert_close(targets[-1], torch.nn.functional.one_hot(labels[-1], CLASSES).float())


def test_draws_follow_from_seed_and_step_alone():
    mixing = Mixing(mixup=0.8, cutmix=1.0, prob=0.5, switch=0.5)
    draws = [draw_mix(mixing, 3, step, (32, 32)) for step in range(400)]
    assert draws == [draw_mix(mixing, 3, step, (32, 32)) for step in range(400)]
    assert draws != [draw_mix(mixing, 4, step, (32, 32)) for step in range(400)]
    off = sum(draw == MixDraw() for draw in draws)
    cuts = sum(draw.box is not None for draw in draws)
    assert off == pytest.approx(200, abs=40)
    assert cuts == pytest.approx(100, abs=30)
    blended = [draw.lam for draw in draws if draw.box is None and draw.lam < 1]
    assert np.mean(blended) == pytest.approx(0.5, abs=0.08)
    assert np.var(blended) == pytest.approx(1 / (4 * (2 * 0.8 + 1)), abs=0.03)  # that of Beta(0.8, 0.8)


OPTIONS = {"mix": "mixup=0.8,cutmix=1", "loss": "ce:smoothing=0.1", "lr": 0.1, "seed": 3}


def train(world, options, steps=4, cut=None, save=None, load=None):
    with Trainer(make_net(), config=TrainConfig(**{**OPTIONS, **options}), world=world, classes=CLASSES) as trainer:
        if load is not None:
            trainer.load(load)
        losses = []
        for step in range(trainer.steps_done, steps):
            losses.append(trainer.step(share(trainer.world, step, samples=16)).loss)
        if save is not None:
            trainer.save(save)
        return weights(trainer.model), losses


@pytest.mark.parametrize("loss", ["ce", "bce"])
def test_every_layout_mixes_alike(loss):
    options = {"loss": loss}
    one, losses = train(None, options)
    assert losses[0] != train(None, {**options, "mix": "mixup=0.8,cutmix=1,prob=0"})[1][0]
    for parts in (4, 3):
        other, theirs = train(None, {**options, "micro_batches": parts})
        close(one, other)
        assert losses == pytest.approx(theirs, rel=1e-5)
    for two, theirs in run_ranks(train, 2, options):
        close(one, two)
        assert losses == pytest.approx(theirs, rel=1e-5)


def test_stages_mix_as_the_whole_model_does():
    states, losses = [], []
    for stages in (1, 2):
        model = normless()
        config = TrainConfig(**{**OPTIONS, "loss": "bce:threshold=0.2"}, micro_batches=2, stages=stages)
        plan = plan_of(normless, stages) if stages > 1 else None
        with Trainer(model, config=config, plan=plan, example=EXAMPLE, classes=CLASSES) as trainer:
            losses.append([trainer.step(images(8, seed=step)).loss for step in range(4)])
            states.append(state_of(trainer))
    assert_close(*states, exact=False)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_resumed_run_mixes_as_an_uninterrupted_one(tmp_path):
    whole, _ = train(None, {})
    train(None, {}, steps=2, save=tmp_path)
    assert same(whole, train(None, {}, load=tmp_path / "step-2")[0])


def test_mixing_ends_with_an_epoch():
    config = TrainConfig(**{**OPTIONS, "mix": "mixup=0.8,cutmix=1,off=1"})
    with Trainer(make_net(), config=config, classes=CLASSES, steps_per_epoch=2) as trainer:
        mixed = []
        for _ in range(4):
            x, y = torch.randn(8, 3, 4, 4), torch.randint(0, CLASSES, (8,))
            placed = trainer._mixed([(x, y)])
            mixed.append(not torch.equal(placed[0][0], x))
            assert placed[0][1].shape == (8, CLASSES)
            trainer.step((x, y))
    assert mixed == [True, True, False, False]


def test_mixing_needs_the_number_of_classes():
    with pytest.raises(UsageError, match="classes"):
        Trainer(make_net(), config=TrainConfig(mix="mixup=0.2"))
