"""Local SGD against torch's post-local SGD, and against gradients exchanged in every step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from hybridpar.optim.build import build_optimizer
from hybridpar.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.training import batch, close, config, make_net, same, share, train_rank, weights


def _train(world, options, steps, more):
    return train_rank(world, options, steps, **more)


def run(options, steps=7, size=2, shared_memory=True, **more):
    return run_ranks(_train, size, options, steps, more, shared_memory=shared_memory)


def _torchs(world, every, together, steps):
    """Torch's optimizer; gradients are exchanged by hand where DistributedDataParallel's hook would."""
    net = make_net()
    # It counts steps from 0 and averages at the first after its warm-up, so H is added to ours.
    averager = PeriodicModelAverager(period=every, warmup_steps=together + every - 1)
    optimizer = PostLocalSGDOptimizer(build_optimizer(net, config()), averager)
    for step in range(steps):
        x, y = share(world, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        if step < together:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world.size
        optimizer.step()
    return weights(net)


@pytest.mark.parametrize(("every", "together"), [(2, 0), (3, 2)])
def test_it_is_torchs_post_local_sgd(every, together):
    ours = run({"sync": f"local:{every}", "warm_start_steps": together})
    theirs = run_ranks(_torchs, 2, every, together, 7)
    for mine, other in zip(ours, theirs, strict=True):
        close(mine["weights"], other, rtol=1e-6, atol=1e-7)
    met = (7 - together) % every == 0
    assert same(ours[0]["weights"], ours[1]["weights"]) is met


def test_meeting_every_step_without_momentum_is_exchanging_gradients():
    options = {"momentum": 0.0}
    local = run({**options, "sync": "local:1"}, size=3)
    exchanged = run(options, size=3)
    assert same(local[0]["weights"], local[2]["weights"])
    close(local[0]["weights"], exchanged[0]["weights"])
    assert local[0]["losses"] == pytest.approx(exchanged[0]["losses"], rel=1e-5)


def test_nothing_travels_between_two_averages():
    sent = run({"sync": "local:3", "warm_start_steps": 1})[0]["sent"]
    assert sent[0] > 0
    assert sent[1:3] == [0, 0]
    assert sent[3] > 0
    assert sent[4:6] == [0, 0]
    assert sent[6] == sent[3]


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_resumed_run_goes_on_bit_for_bit(at, tmp_path):
    options = {"sync": "local:3", "warm_start_steps": 2}
    through = run(options, norm=True, save=(str(tmp_path), at))
    assert same(through[0]["weights"], run(options, norm=True)[0]["weights"]), "saving changed the training"
    resumed = run(options, norm=True, load=str(tmp_path / f"step-{at}"))
    for mine, theirs in zip(through, resumed, strict=True):
        assert same(mine["weights"], theirs["weights"])
        assert same(mine["buffers"], theirs["buffers"])
    model = torch.load(tmp_path / f"step-{at}" / "model.pt", weights_only=True)
    if at == 4:  # on their own, so the file has the mean of both
        ranks = run(options, 4, norm=True)
        means = [(a + b) / 2 for a, b in zip(ranks[0]["weights"], ranks[1]["weights"], strict=True)]
        names = [name for name, _ in make_net(True).named_parameters()]
        close([model[name] for name in names], means)
    another = run(options, norm=True, size=1, load=str(tmp_path / f"step-{at}"))
    assert all(one.isfinite().all() for one in another[0]["weights"])


def _evaluate(world):
    with Trainer(make_net(True), config=config(sync="local:5"), world=world) as trainer:
        for step in range(3):
            trainer.step(share(world, step))
        before = weights(trainer.model)
        evaluation = trainer.evaluate([batch(9)])
        return before, weights(trainer.model), evaluation.loss


def test_an_evaluation_is_of_the_mean_and_changes_nothing():
    ranks = run_ranks(_evaluate, 2)
    assert all(same(before, after) for before, after, _ in ranks)
    assert not same(ranks[0][0], ranks[1][0])
    assert ranks[0][2] == ranks[1][2]


def _flags(world):
    with Trainer(make_net(), config=config(sync="local:3"), world=world) as trainer:
        outcomes = [
            trainer.step(share(world, step), stop=step == 0 and world.rank == 1, save=step == 4).outcome
            for step in range(6)
        ]
        return [(outcome.stop, outcome.save) for outcome in outcomes]


def test_wishes_are_met_at_the_next_average_on_all_workers():
    expected = [(False, False)] * 2 + [(True, False)] + [(False, False)] * 2 + [(False, True)]
    assert run_ranks(_flags, 2) == [expected, expected]
