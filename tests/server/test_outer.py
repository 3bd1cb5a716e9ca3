"""The outer loop over parameter servers: its outer steps against published values, and runs against an all-reduce."""

from __future__ import annotations

import pytest
import torch

from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.server import Rules, cut_model
from hybridpar.server.outer import OuterLearner, outer_optimizer_of, outer_statistics
from hybridpar.server.shard import Push, Shard
from hybridpar.sync.outer import OuterStep
from hybridpar.train.checkpoint import load_checkpoint
from tests.ranks import run_ranks
from tests.runs import assert_same_state, check_run, train, train_rank
from tests.server.jobs import ends, job, pids, placed, store
from tests.server.serving import Worker, copies, serving, together
from tests.server.test_runs import run
from tests.waiting import eventually, running

NESTEROV = OuterStep("nesterov", 0.7, 0.9)


def rules_of(sync, workers, **options):
    return Rules.of(TrainConfig(sync=sync, **options), workers)


def shard_of(sync, workers, outer=NESTEROV, start=(1.0,), limit=None):
    rules = rules_of(sync, workers)
    (stripe,) = cut_model([("w", (len(start),), False)], 1)
    made = Shard(stripe, torch.tensor(start), rules, outer_optimizer_of(outer, rules.updates_per_round), limit=limit)
    for learner in range(workers):
        made.join(learner)
    return made


def push(shard, learner, gradient, **more):
    known = shard.sequence_of(learner)
    return shard.push(Push(learner, known + 1, shard.clock, **more), torch.tensor(gradient))


@pytest.mark.parametrize(
    ("workers", "expected"), [(2, [0.965, 0.734, 0.664, 0.4876]), (1, [0.867, 0.4113])], ids=["delayed", "plain"]
)
def test_nesterov_is_delayed_by_as_many_arrivals_as_there_are_workers(workers, expected):
    shard = shard_of("outer:4,ps-async", workers)
    for number, (gradient, value) in enumerate(zip([0.1, 0.3, 0.2, 0.0], expected, strict=False)):
        push(shard, number % workers, [gradient], steps=4)
        assert float(shard.values) == pytest.approx(value, abs=1e-6)


def test_slowmo_without_a_barrier_follows_the_inner_rate_once_a_round():
    """With every arrival from equal weights it is a heavy ball on the mean of the round."""
    shard = shard_of("outer:4,ps-async", 2, OuterStep("slowmo", 1.0, 0.5))
    value, u, before = 1.0, 0.0, 1.0
    for rate, pair in ((1.0, (0.3, 0.1)), (0.5, (0.2, 0.4)), (0.1, (-0.1, 0.1))):
        for learner, gradient in enumerate(pair):
            push(shard, learner, [gradient], rate=rate)
        u = 0.5 * u * rate / before + sum(pair) / 2
        value, before = value - u, rate
        assert float(shard.values) == pytest.approx(value, abs=1e-6)


def test_a_barrier_takes_the_mean_by_samples_of_those_who_are_finite():
    shard = shard_of("outer:4,ps", 3, OuterStep())
    push(shard, 0, [0.4], samples=1)
    push(shard, 1, [float("nan")], samples=5, sound=False)
    answers = push(shard, 2, [0.8], samples=3)
    assert float(shard.values) == pytest.approx(1 - 0.7)
    assert [one.applied for one in answers] == [True, False, True]
    for learner in range(3):
        answers = push(shard, learner, [float("nan")], samples=0, sound=False)
    assert [one.applied for one in answers] == [False] * 3
    assert (float(shard.values), shard.clock) == (pytest.approx(0.3), 1)


def test_without_a_barrier_an_arrival_counts_by_its_samples_too():
    shard = shard_of("outer:4,ps-async", 2, OuterStep())
    push(shard, 0, [0.4], samples=6)  # of the other nothing is known yet
    push(shard, 1, [0.4], samples=2)
    assert float(shard.values) == pytest.approx(1 - 0.4 / 2 - 0.4 / 2 * 2 * 2 / 8)


@pytest.mark.parametrize("sync", ["outer:4,ps", "outer:4,ps-async"])
def test_steps_are_those_that_workers_made_and_end_where_the_run_does(sync):
    shard = shard_of(sync, 2, OuterStep(), limit=12)
    for _ in range(2):
        push(shard, 0, [0.1], steps=4, samples=8)
        push(shard, 1, [0.1], steps=3, samples=6)
    assert (shard.taken, shard.step, shard.done) == (12, 6, True)
    rows = shard.ledger.rows_after(0)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert sum(row["samples"] for row in rows) == 28
    assert float(shard.values) < 0.81, "the last push counts whole, and with a barrier for both"


def test_the_state_of_an_outer_optimizer_goes_on_in_the_middle_of_a_round():
    one, other = (shard_of("outer:4,ps-async", 2) for _ in range(2))
    for number in range(3):
        push(one, number % 2, [0.1 * number])
    state = one.state_dict()
    other.load_progress(state)
    other.load_values(state["values"], state["optimizer"], state["counters"])
    for shard in (one, other):
        push(shard, 1, [0.5])
    assert torch.equal(one.values, other.values)


def outer_worker(served, number, model, rules, **more):
    worker = Worker(served, number, model, rules, outer=OuterStep(), **more)
    worker.begin()
    learner = OuterLearner(model, worker.links, took=lambda: take(worker))
    return worker, learner


def take(worker):
    statistics = worker.links.links[0].statistics
    outer_statistics(worker.model).load(statistics.view(torch.float64), 1.0)


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def moved(model, by):
    with torch.no_grad():
        for one in model.parameters():
            one.sub_(by)


def test_workers_push_progress_and_get_weights_and_the_moments_of_statistics():
    rules, models = rules_of("outer:4,ps", 2), copies(3)
    with serving(rules, 3) as served:
        workers = together(
            [lambda n=n: outer_worker(served, n, models[n], rules, half=False) for n in range(2)],
        )
        for number, (worker, learner) in enumerate(workers):
            moved(worker.model, 0.2 + 0.4 * number)
            worker.model.norm.running_mean.fill_(4.0 * number)
            learner.stay()
        end = {"samples": 8, "steps": 4}
        results = together(
            [lambda one=one: one.exchange(end, 1.0, rate=1.0, seconds=0.1) for _, one in workers],
        )
        moved(models[2], 0.4)
        for worker, _ in workers:
            assert all(
                torch.allclose(a, b) for a, b in zip(worker.model.parameters(), models[2].parameters(), strict=True)
            )
            assert torch.allclose(worker.model.norm.running_mean, torch.tensor(2.0))
            assert torch.allclose(worker.model.norm.running_var, torch.tensor(5.0)), "1, and the means lie 2 apart"
        assert same(models[0], models[1])
        assert [one.step for one in results] == [4, 4]
        together([worker.close for worker, _ in workers])


def test_a_worker_that_is_away_holds_nobody_up_and_comes_back_with_the_weights_of_now():
    rules, models = rules_of("outer:4,ps-async", 2), copies(3)
    with serving(rules, 2) as served:
        first, one = outer_worker(served, 0, models[0], rules)
        second, _ = outer_worker(served, 1, models[1], rules)
        moved(models[1], 0.5)  # in the middle of an interval
        second.close(graceful=False)
        for _ in range(3):
            moved(models[0], 0.2)
            assert one.exchange({"samples": 8, "steps": 4}, 1.0, rate=1.0, seconds=0.1).staleness == 0
        back, other = outer_worker(served, 1, models[2], rules)
        assert same(models[2], models[0]), "it has what the servers have, and nothing of what it had lost"
        moved(models[2], 0.2)
        assert other.exchange({"samples": 8, "steps": 2}, 1.0, rate=1.0, seconds=0.1).applied
        moved(models[0], 0.2)
        result = one.exchange({"samples": 8, "steps": 4}, 1.0, rate=1.0, seconds=0.1)
        assert result.staleness == 1
        assert result.step == (4 * 4 + 2) // 2
        assert any("worker 1 has joined" in text for text in result.news)
        together([first.close, back.close])


# ------------------------------------------------------------------------- runs

NESTEROV_RUN = {"outer_optimizer": "nesterov", "outer_momentum": 0.5}


@pytest.mark.parametrize(
    "options",
    [
        {"sync": "outer:3", "shares": "1,3"},
        {"sync": "outer:4", **NESTEROV_RUN, "clip_norm": 0.5, "outer_qsr": 0.5},
        {"sync": "outer:2", "outer_optimizer": "slowmo", "optimizer": "adamw", "lr": 0.01},
    ],
    ids=["mean, unequal samples", "Nesterov, clipping, QSR", "SlowMo, AdamW"],
)
def test_with_a_barrier_it_is_the_outer_loop_over_an_all_reduce(options, tmp_path):
    assert run_ranks(train_rank, 2, tmp_path / "plain", "plain", None, {**options, "plan": "none"}) == [0, 0]
    run(tmp_path / "served", 3, **{**options, "sync": options["sync"] + ",ps"})
    plain, served = (load_checkpoint(tmp_path / name).model for name in ("plain", "served"))
    for name in plain:
        torch.testing.assert_close(served[name], plain[name], rtol=1e-5, atol=1e-6)
    check_run(tmp_path / "served", steps=12)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    options = {"sync": "outer:3,ps", **NESTEROV_RUN, "compress": "onebit:least=1", "amp": "fp16"}
    run(tmp_path / "whole", 3, "dropping", **options, checkpoint_every="6", keep=3)
    run(tmp_path / "halves", 3, "dropping", **options, resume_from=tmp_path / "whole" / "checkpoints" / "step-6")
    assert_same_state(tmp_path / "halves", tmp_path / "whole")
    outer = [load_checkpoint(tmp_path / name).training["outer"]["momentum"] for name in ("whole", "halves")]
    assert all(torch.equal(value, outer[1][name]) for name, value in outer[0].items())


def test_a_run_that_changes_between_servers_and_an_all_reduce_keeps_its_outer_momentum(tmp_path):
    options = {"sync": "outer:3", **NESTEROV_RUN, "momentum": 0.0, "epochs": 2, "plan": "none"}
    served = {**options, "sync": "outer:3,ps", "plan": "auto"}
    half = {"steps": 6, "checkpoint_every": "6", "lr_schedule": "constant"}
    more = {"resume": True, "steps": 12, "lr_schedule": "constant"}
    run(tmp_path / "whole", 3, **{**served, "lr_schedule": "constant"})
    assert run_ranks(train_rank, 2, tmp_path / "there", "plain", None, {**options, **half}) == [0, 0]
    run(tmp_path / "there", 3, **{**served, **more})
    run(tmp_path / "back", 3, **{**served, **half})
    assert run_ranks(train_rank, 2, tmp_path / "back", "plain", None, {**options, **more}) == [0, 0]
    whole, there, back = (load_checkpoint(tmp_path / name).model for name in ("whole", "there", "back"))
    for name, value in there.items():
        torch.testing.assert_close(back[name], value, rtol=1e-4, atol=1e-5)
        assert whole[name].shape == value.shape


def test_kill_9_in_mid_interval_leaves_the_others_training_and_the_worker_may_come_back(tmp_path):
    options = {"sync": "outer:5,ps-async", "outer_pace": "auto", **NESTEROV_RUN, "epochs": 40, "timeout": 20}
    with store() as port, job(3, tmp_path / "run", port=port, **options, fault="KILL@1:7") as answers:
        dead = pids(answers, 3)[1]
        eventually(lambda: not running(dead))
        with placed(1, 3, port, joins=True):
            assert train(tmp_path / "run", "plain", **options) == 0
        assert ends(answers, 2) == {0: 0, 2: 0}
    summary = check_run(tmp_path / "run", steps=240)
    assert summary["staleness"]["most"] >= 1, "it was not alone all the time"


def test_a_worker_that_comes_back_when_the_others_have_finished_ends_by_itself(tmp_path, capfd):
    options = {"sync": "outer:3,ps-async", "timeout": 20}
    with store() as port, job(3, tmp_path / "run", port=port, **options, fault="KILL@1:4") as answers:
        assert ends(answers, 2) == {0: 0, 2: 0}
        with placed(1, 3, port, joins=True):
            assert train(tmp_path / "run", "plain", **options) == 0
    assert "worker 1 came back when the run was over" in capfd.readouterr().err
    check_run(tmp_path / "run", steps=12)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"sync": "outer:4,"}, "--sync is 'outer:4,'"),
        ({"sync": "outer:4,x"}, "--sync is 'outer:4,x'"),
        ({"sync": "local:4,ps"}, "--sync is 'local:4,ps'"),
        ({"sync": "outer:0,ps"}, "--sync outer:0,ps"),
        ({"sync": "outer:4,softsync:3", "workers": 2}, "softsync:3 with 2 workers"),
        ({"sync": "outer:4,ps", "max_staleness": 1}, "--max-staleness 1 with --sync outer:4,ps"),
        ({"sync": "outer:4,ps", "outer_fragments": 2}, "--outer-fragments with --sync outer:4,ps"),
        ({"sync": "outer:4,ps", "outer_delay": 1}, "--outer-delay with --sync outer:4,ps"),
        ({"sync": "outer:4,ps", "outer_mix": 0.5}, "--outer-mix with --sync outer:4,ps"),
        ({"sync": "outer:4,ps", "warm_start_steps": 3}, "--warm-start-steps 3 with --sync outer:4,ps"),
        ({"sync": "outer:4,ps", "stages": 2}, "--stages 2 with --sync outer:4,ps"),
        ({"sync": "outer:4,ps", "shares": "auto"}, "--shares auto with --sync outer:4,ps"),
        ({"sync": "outer:4,ps", "shares": "1,0"}, "--shares 1,0 with --sync outer:4,ps"),
        ({"sync": "outer:4,ps", "outer_pace": "1,0"}, "--outer-pace is 1,0"),
        ({"sync": "outer:4,ps", "outer_pace": "fast"}, "--outer-pace is fast"),
        ({"sync": "outer:4,ps", "outer_pace": "1,0.5", "workers": 3}, "--outer-pace 1,0.5 with 3 workers"),
        ({"sync": "outer:4", "outer_pace": "1,0.5"}, "--outer-pace 1,0.5 with --sync outer:4"),
        ({"sync": "ps", "outer_pace": "auto"}, "--outer-pace auto with --sync ps"),
        ({"sync": "outer:4", "servers": 2}, "--servers with --sync outer:4"),
    ],
)
def test_what_has_no_meaning_is_refused(options, what):
    with pytest.raises(UsageError) as refused:
        TrainConfig(**options).check()
    assert what in refused.value.what
    assert refused.value.why


def test_a_run_that_ends_before_the_first_exchange_and_codecs_with_momentum_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--sync outer:20,ps in a run of 12 steps"):
        train(tmp_path / "run", sync="outer:20,ps", servers=0)
    with pytest.raises(UsageError, match="--compress onebit_sgd with --sync outer:H"):
        train(tmp_path / "run", sync="outer:4,ps", servers=0, compress="onebit_sgd")
    assert not (tmp_path / "run").exists()


def test_one_worker_with_plain_means_trains_as_without_a_loop(tmp_path):
    options = {"plan": "none"}
    train(tmp_path / "plain", **options)
    train(tmp_path / "served", sync="outer:3,ps-async", servers=0)
    plain, served = (load_checkpoint(tmp_path / name).model for name in ("plain", "served"))
    for name in plain:
        torch.testing.assert_close(served[name], plain[name], rtol=1e-5, atol=1e-6)
