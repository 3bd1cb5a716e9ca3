"""The outer loop in a trainer: against torch's post-local SGD, gradients exchanged in every step, and itself."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from hybridpar.models.state_dicts import copy_of
from hybridpar.optim.build import build_optimizer
from hybridpar.planner.planned_run import PlannedRun
from hybridpar.planner.resolve import resolve
from hybridpar.run.opening import as_asked
from hybridpar.run.part import sync_of
from hybridpar.train.outer import OuterEngine
from hybridpar.train.trainer import Trainer
from tests.lanes.checked import Checker, Lanes
from tests.ranks import run_ranks
from tests.train.test_engine import make_trainer
from tests.train.training import batch, close, config, make_net, plain_loop, same, share, train_rank, weights


def _train(world, options, steps, more):
    return train_rank(world, options, steps, **more)


STREAMED = {
    "sync": "outer:4,opt=nesterov,momentum=0.5,fragments=2,delay=1",
    "compress": "onebit",
}


def run(options, steps=7, size=2, shared_memory=True, **more):
    return run_ranks(_train, size, options, steps, more, shared_memory=shared_memory)


def _torchs(world, every, steps):
    net = make_net()
    # It counts steps from 0 and averages at the first after its warm-up.
    averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
    optimizer = PostLocalSGDOptimizer(build_optimizer(net, config()), averager)
    return weights(plain_loop(net, optimizer, (share(world, step) for step in range(steps))))


@pytest.mark.parametrize("every", [2, 3])
def test_it_is_torchs_post_local_sgd(every):
    ours = run({"sync": f"local:{every}"})
    theirs = run_ranks(_torchs, 2, every, 7)
    for mine, other in zip(ours, theirs, strict=True):
        close(mine["weights"], other, rtol=1e-6, atol=1e-7)


def test_meeting_every_step_without_momentum_is_exchanging_gradients():
    options = {"optimizer": "sgd:momentum=0"}
    local = run({**options, "sync": "local:1"}, size=3)
    exchanged = run(options, size=3)
    assert same(local[0]["weights"], local[2]["weights"])
    close(local[0]["weights"], exchanged[0]["weights"])
    assert local[0]["losses"] == pytest.approx(exchanged[0]["losses"], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("every", [1, 3])
def test_one_worker_trains_as_without_a_loop_bit_by_bit(optimizer, every):
    options = {"optimizer": optimizer, "lr": 0.01}
    plain = run(options, size=1, norm=True)[0]
    looped = run({**options, "sync": f"outer:{every}"}, size=1, norm=True)[0]
    assert same(looped["weights"], plain["weights"])
    assert same(looped["buffers"], plain["buffers"])
    assert looped["losses"] == plain["losses"]


def test_a_plan_that_says_it_is_followed():
    plan = resolve(config(sync="outer:3"), 1)
    with Trainer(make_net(), config=config(), world=World(), plan=PlannedRun(plan)) as trainer:
        assert isinstance(trainer.engine, OuterEngine)
        assert sync_of(trainer.config, trainer.plan) == "outer:3"
        assert as_asked(config(plan="plan.json"), trainer.plan).sync == "outer:3"
    assert sync_of(config(sync="local:3"), plan) == "local:3"


def _on_its_own(world, cut, steps):
    net = make_net()
    return weights(plain_loop(net, build_optimizer(net, config()), (share(world, step, cut) for step in range(steps))))


def test_three_workers_with_unequal_samples_are_weighed_by_them():
    cut = (7, 3, 2)
    ranks = run({"sync": "outer:4"}, steps=4, size=3, cut=cut)
    own = run_ranks(_on_its_own, 3, cut, 4)
    means = [sum(w / 12 * one for w, one in zip(cut, parts, strict=True)) for parts in zip(*own, strict=True)]
    for rank in ranks:
        close(rank["weights"], means)
        assert same(rank["weights"], ranks[0]["weights"])
    assert not same(own[0], own[1])


@pytest.mark.parametrize(
    "options",
    [
        {"sync": "outer:4"},
        {"sync": "outer:4,opt=nesterov", "compress": "onebit"},
        {"sync": "outer:4,opt=nesterov", "compress": "topk:rate=0.1"},
        {"sync": "outer:2,qsr=1", "compress": "qsgd_mn:bits=4"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_workers_are_equal_bit_by_bit_after_every_exchange(options):
    ranks = run_ranks(_compare, 3, options, shared_memory=False)
    met = [step for step, (sent, _) in enumerate(ranks[0], 1) if sent]  # nothing travels in other steps
    assert met == [4, 8, 10] if "outer:4" in options["sync"] else met[-1] == 10, "the run ends with an exchange"
    for step in range(len(ranks[0])):
        states = [rank[step][1] for rank in ranks]
        equal = all(same(states[0], other) for other in states[1:])
        assert equal == (step + 1 in met)


def _compare(world, options):
    with Trainer(make_net(True), config=config(**options), world=world, total_steps=10) as trainer:
        found = []
        for step in range(10):
            result = trainer.step(share(world, step))
            state = [one.clone() for one in trainer.model.state_dict().values()]
            found.append((result.outcome.bytes_sent, state))
        return found


def test_a_checkpoint_has_the_model_of_the_last_exchange_and_momentum_for_any_number_of_workers(tmp_path):
    options = {"sync": "outer:3,opt=nesterov,momentum=0.5"}
    run(options, 4, norm=True, save=(str(tmp_path), 4))  # on their own since step 3
    saved = torch.load(tmp_path / "step-4" / "training-0.pt", weights_only=True)["outer"]
    model, at_exchange = load_file(tmp_path / "step-4" / "model.safetensors"), run(options, 3, norm=True)[0]
    assert same([model[name] for name, _ in make_net(True).named_parameters()], at_exchange["weights"])
    assert same([model[name] for name, _ in make_net(True).named_buffers()], at_exchange["buffers"])
    assert saved["round"] == [3, 6, False]
    for last, momentum in run_ranks(_loaded, 3, options, tmp_path):
        assert all(torch.equal(momentum[name], value) for name, value in saved["momentum"].items())
        assert all(torch.equal(last[name], model[name]) for name in last)


def _loaded(world, options, folder):
    with Trainer(make_net(True), config=config(**options), world=world) as trainer:
        trainer.load(folder)
        state = trainer.engine.training_state()["outer"]
        return state["weights"], state["momentum"]


def _evaluate(world, options):
    net, sums = make_net(True), []
    with Trainer(net, config=config(sync="outer:2", **options), world=world) as trainer:
        for step in range(2):
            trainer.step(share(world, step))
        at_exchange = trainer.evaluate([batch(9)]).loss, trainer.engine.outer.common_state()["weights"]
        trainer.step(share(world, 2))
        before = weights(trainer.model)
        with mock.patch.object(world.control_group, "all_reduce", side_effect=lambda one: sums.append(one.numel())):
            state = trainer.engine.model_state()
        evaluation = trainer.evaluate([batch(9)])
        return at_exchange, state, before, weights(trainer.model), evaluation.loss, sums


@pytest.mark.parametrize("options", [{}, {"compress": "onebit"}])
def test_what_is_tested_and_saved_is_the_model_of_the_last_exchange_and_that_sends_nothing(options):
    ranks = run_ranks(_evaluate, 2, options, shared_memory=not options)
    for (loss, last), state, before, after, again, sums in ranks:
        assert same(before, after)
        assert not sums
        assert again == loss
        assert same([state[name] for name in last], list(last.values()))
    assert not same(ranks[0][2], ranks[1][2])
    assert same(list(ranks[0][1].values()), list(ranks[1][1].values()))


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


def _spoil(world, options):
    """The steps of a worker of three whose inputs are not finite in the steps 2 to 7."""
    with Trainer(make_net(True), config=config(**options), world=world) as trainer:
        found = []
        for step in range(9):
            x, y = share(world, step)
            if world.rank == 1 and 1 <= step < 7:
                x = x * torch.nan
            outcome = trainer.step((x, y)).outcome
            found.append((outcome.committed, outcome.loss))
        return found, [one.clone() for one in trainer.model.state_dict().values()]


@pytest.mark.parametrize("guard", [True, False])
def test_a_worker_that_is_not_finite_does_not_poison_the_others(guard):
    ranks = run_ranks(_spoil, 3, {"sync": "outer:3", "guard": guard, "optimizer": "sgd:momentum=0"})
    for found, state in ranks:
        assert all(one.isfinite().all() for one in state)
        assert same(state, ranks[0][1])
        assert all(committed and loss == loss for committed, loss in found[2::3])
    if guard:
        assert [committed for committed, _ in ranks[1][0]] == [True, False, True, False, False, True, False, True, True]


def _features(world, options):
    with Trainer(make_net(True), config=config(**options), world=world, total_steps=8) as trainer:
        for step in range(8):
            x, y = share(world, step, None if "micro_batches" in options else (7, 3, 2))
            trainer.step((x, y), stop=step == 1 and world.rank == 2)
            if step == 4 and "model_ema" in options:  # in mid-interval
                own = [copy_of(one.state_dict()) for one in trainer.engine.averages]
                with trainer.averaged():
                    losses = world.gather(trainer.evaluate([batch(9)]).loss)
                assert len(set(losses)) == 1
                kept = [one.state_dict() for one in trainer.engine.averages]
                assert all(same(list(a.values()), list(b.values())) for a, b in zip(own, kept, strict=True))
        state = trainer.engine.average_state()
        return weights(trainer.model), None if state is None else list(state.values())


@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad": 0.5, "micro_batches": 2, "model_ema": "0.5", "sync": "outer:3"},
        {"amp": "fp16", "batch_norm": "frozen", "sync": "outer:3,opt=nesterov"},
        {"batch_norm": "local", "sync": "outer:3,fragments=3,delay=0", "optimizer": "adamw", "lr": 0.01},
    ],
    ids=["clipping, accumulation and EMA", "fp16, frozen BatchNorm", "AdamW in fragments"],
)
def test_other_options_work_with_it_and_samples_may_be_uneven(options):
    ranks = run_ranks(_features, 3, {"sync": "outer:3", **options})
    assert all(one.isfinite().all() for one in ranks[0][0])
    for found, average in ranks[1:]:
        assert same(found, ranks[0][0])
        assert average is None or same(average, ranks[0][1])


def test_one_worker_is_told_that_it_changes_nothing(caplog):
    Trainer(make_net(), config=config(sync="outer:8")).close()
    assert "--sync outer:8 changes nothing: there is one worker" in caplog.text


def _pipelines(world, options, folder):
    with make_trainer(micro_batches=2, stages=2, replicas=2, world=world, **options) as trainer:
        sent = []
        for step in range(6):
            if step == 4:
                trainer.save(folder)
            sent.append(trainer.step(samples(step, world.rank % 2), stop=step == 2 and world.rank == 3).outcome)
        flags, own = [outcome.stop for outcome in sent], whole(trainer)
        loss = trainer.evaluate([samples(9, 0)]).loss
        trainer.load(folder)
        for step in range(4, 6):
            trainer.step(samples(step, world.rank % 2))
        return flags, own, same(whole(trainer), own), loss


def samples(step, replica):
    draw = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(4, 3, 8, 8, generator=draw), torch.randint(0, 5, (4,), generator=draw)


def whole(trainer):
    trainer.engine.wait()
    trainer.engine.pipeline.collect()
    return [one.clone() for one in trainer.model.state_dict().values()]


@pytest.mark.parametrize(
    "options",
    [
        {"sync": "outer:3"},
        {"sync": "outer:3,opt=nesterov", "compress": "onebit"},
        {"sync": "outer:3,fragments=2", "model_ema": "0.5"},
    ],
    ids=["mean", "Nesterov, 1 bit", "fragments, EMA"],
)
def test_replicas_of_a_pipeline_are_parties(options, tmp_path):
    ranks = run_ranks(_pipelines, 4, options, tmp_path, shared_memory="compress" not in options)
    flags, weights_, resumed, loss = ranks[0]
    for other in ranks:
        assert other[0] == flags
        assert other[2], "a resumed run goes on bit for bit"
        assert other[3] == loss
    assert resumed
    met = "fragments" not in options["sync"]
    assert same(weights_, ranks[1][1]) is met, "two replicas, after an exchange of all"
    assert same(weights_, ranks[2][1])  # two stages of one replica
    assert any(flags)


NODES = ["a", "a", "b"]


def _on_nodes(world, options):
    with (
        mock.patch("hybridpar.compress.nodes.host_identity", return_value=NODES[world.rank]),
        Trainer(make_net(True), config=config(**options), world=world) as trainer,
    ):
        found = []
        for step in range(6):
            trainer.step(share(world, step, (3, 4, 5)))
            found.append([one.clone() for one in trainer.model.state_dict().values()])
        return found


@pytest.mark.parametrize("options", [{}, {"compress": "onebit"}, {"sync": "outer:3,opt=nesterov"}])
def test_workers_of_a_node_are_equal_in_every_step_and_nodes_after_an_exchange(options):
    first, second, third = run_ranks(_on_nodes, 3, {"sync": "outer:3", **options}, shared_memory=False)
    for step in range(6):
        assert same(first[step], second[step])
        assert same(first[step], third[step]) == (step in (2, 5)), step


def _checked(world):
    checker = Checker(world.rank, max_delay=0.001)
    # Fragments are on their way while steps go on; every access to their memory must be ordered.
    with checker, Lanes("cpu", check=checker) as lanes:
        with Trainer(make_net(True), config=config(**STREAMED), world=world, lanes=lanes, total_steps=9) as trainer:
            for step in range(9):
                trainer.step(share(world, step))
            return weights(trainer.model)


def test_streams_are_ordered_by_waits():
    one, other = run_ranks(_checked, 2, shared_memory=False)
    assert same(one, other)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync": "outer:8,fragments=8"}, "fragments=8 of 4 parameters"),
        ({"sync": "outer:9"}, "--sync outer:9 in a run of 8 steps"),
        ({"sync": "outer:8", "compress": "onebit_sgd"}, "--compress onebit_sgd with --sync outer:H"),
    ],
)
def test_what_has_no_meaning_is_refused(options, said):
    with pytest.raises(UsageError) as caught:
        Trainer(make_net(), config=config(optimizer="sgd:momentum=0", **options), total_steps=8)
    assert said in caught.value.what
