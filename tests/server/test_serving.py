"""Tests parameter servers behind sockets: the same training as in one process, and connections that break."""

from __future__ import annotations

import copy
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from timm.utils import dispatch_clip_grad
from torch import nn

from hybridpar.config import OptimizerConfig
from hybridpar.errors import SyncError, UsageError
from hybridpar.optim.build import build_optimizer
from hybridpar.server import Rules
from hybridpar.server.wire import Gradient
from tests.server.problems import unsent
from tests.server.serving import OPTIMIZER, Clock, Worker, copies, images, serving, together
from tests.waiting import eventually


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def train(served, rules, workers, steps, **options):
    """Workers that train side by side; returns them, with their models as the servers have them."""
    team = [Worker(served, n, model, rules, **options) for n, model in enumerate(copies(workers))]
    together([worker.begin for worker in team])

    def run(worker):
        return [worker.step(10 * number + worker.number, workers) for number in range(steps)]

    results = together([lambda worker=worker: run(worker) for worker in team])
    return team, results


def oracle(workers, steps, config=OPTIMIZER):
    """One process: micro-batches are the workers' shares, and each is normalised by itself; timm clips."""
    (model,) = copies(1)
    optimizer = build_optimizer(model, config)
    for number in range(steps):
        statistics = []
        optimizer.zero_grad()
        before = copy.deepcopy(model.norm.state_dict())
        for worker in range(workers):
            model.norm.load_state_dict(before)
            inputs, targets = images(10 * number + worker)
            (nn.functional.cross_entropy(model(inputs), targets) * (1 / workers)).backward()
            statistics.append(copy.deepcopy(model.norm.running_mean))
        if (asked := config.clipping) is not None:
            clipped = list(model.parameters())[: -2 if asked.mode == "agc" else None]
            clipped = [one for one in clipped if one.grad is not None]
            dispatch_clip_grad(clipped, asked.limit, asked.mode)
        optimizer.step()
        model.norm.running_mean.copy_(sum(statistics) / workers)
    return model


@pytest.mark.parametrize(("shards", "decay"), [(1, 1.0), (3, 1.0), (5, 0.5)])
def test_sync_is_one_process_on_the_concatenated_batch_bit_by_bit(shards, decay):
    rules = Rules(3, 3, barrier=True)
    with serving(rules, shards) as served:
        by_layer = replace(OPTIMIZER, optimizer=f"sgd:momentum=0.9,layer_decay={decay},head_lr={decay}")
        team, results = train(served, rules, 3, 4, optimizer=by_layer)
        expected = oracle(3, 4, by_layer)
        for worker in team:
            assert same(worker.model, expected)
            torch.testing.assert_close(worker.model.norm.running_mean, expected.norm.running_mean)
            assert all(one.staleness == 0 and one.applied for one in results[worker.number])
        assert [row.step for one in results[0] for row in one.rows] == [1, 2, 3, 4]
        together([worker.close for worker in team])
    assert not served.problems


RECIPES = {
    "clipped": {"clip_grad": 0.3},
    "adaptive": {"clip_grad": "0.02,mode=agc"},
    "value": {"clip_grad": "0.01,mode=value"},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "rmsprop": {"optimizer": "rmsprop", "lr": 0.001},
    "adafactor": {"optimizer": "adafactor", "lr": 0.01},
    "muon": {"optimizer": "timm/muon", "lr": 0.01},
    "lamb": {"optimizer": "timm/lamb:max_grad_norm=0.3", "lr": 0.01},
    "lamb clipped": {"optimizer": "timm/lamb:max_grad_norm=0.4", "lr": 0.01, "clip_grad": 0.5},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_optimizers_and_clipping_are_those_of_one_process(recipe):
    config = OptimizerConfig(**{"lr": 0.1, "weight_decay": 0.01, **RECIPES[recipe]})
    for rules in (Rules(2, 2, barrier=True), Rules.soft(1, 1)):
        workers = rules.learners
        with serving(rules, 3, optimizer=config) as served:
            team, results = train(served, rules, workers, 4, optimizer=config)
            expected = oracle(workers, 4, config=config)
            (unchanged,) = copies(1)
            for worker in team:
                assert all(one.applied for one in results[worker.number])
                for own, other in zip(worker.model.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
                assert torch.equal(worker.model.spare.weight, unchanged.spare.weight)
            norms = [one.norm for one in results[0]]
            assert all(norms) == (rules.barrier and ("lamb" in recipe or recipe == "clipped"))
            together([worker.close for worker in team])
        assert not served.problems


def test_a_shard_that_dies_while_norms_are_added_up_is_what_is_said():
    rules, config = Rules(2, 2, barrier=True), OptimizerConfig(clip_grad=0.1)

    def run(worker):
        try:
            worker.step(worker.number, 2)
        except SyncError as error:
            return str(error.what)
        finally:
            worker.close(graceful=False)

    with serving(rules, 2, optimizer=config, timeout=5.0) as served:
        team, _ = train(served, rules, 2, 1, optimizer=config, timeout=5.0)
        served.servers[1]._answer = lambda *_: served.kill(1)  # instead of telling its squares
        first, second = together([lambda worker=worker: run(worker) for worker in team])
        assert first.startswith("shard 1 of 2")
        assert "is gone" in second


@pytest.mark.parametrize("codec", ["onebit:least=1", "powersgd:rank=1,gain=0", "topk:rate=0.3,least=1"])
def test_compressed_pushes_train_alike_on_all_workers(codec):
    rules = Rules(2, 2, barrier=True)
    with serving(rules, 2, codec=codec) as served:
        team, results = train(served, rules, 2, 5, codec=codec)
        assert same(team[0].model, team[1].model)
        assert results[0][-1].pushed < results[0][-1].pulled
        kept = [unsent(link.encoder).norm() for worker in team for link in worker.servers.links]
        assert all(float(norm) > 0 for norm in kept)
        together([worker.close for worker in team])


def test_a_gradient_that_is_not_finite_on_one_worker_counts_on_none():
    rules = Rules(2, 2, barrier=True)
    with serving(rules, codec="onebit:least=1") as served:
        team, _ = train(served, rules, 2, 2, codec="onebit:least=1")
        before = copy.deepcopy(team[0].model)
        kept = unsent(team[0].servers.links[0].encoder)
        bad, targets = images(1)
        results = together(
            [
                lambda: team[0].step(0, 2),
                lambda: team[1].step_on((bad * torch.nan, targets), 2),
            ]
        )
        assert not any(one.applied for one in results)
        assert same(team[0].model, before)
        assert torch.equal(team[0].model.norm.running_mean, before.norm.running_mean)
        assert torch.equal(unsent(team[0].servers.links[0].encoder), kept)
        together([worker.close for worker in team])


def test_without_a_barrier_each_worker_has_a_loss_scale_of_its_own():
    rules = Rules.soft(2, 2)
    with serving(rules) as served:
        team = [Worker(served, n, one, rules, amp="fp16") for n, one in enumerate(copies(2))]
        together([worker.begin for worker in team])
        kept = [worker.engine.loss_scales[0] for worker in team]
        bad, targets = images(0)
        assert not team[1].step_on((bad * torch.nan, targets), 2).applied
        assert team[0].step(1, 2).applied
        assert team[1].step(2, 2).applied
        assert [float(one.value) for one in kept] == [2.0**16, 2.0**15]
        together([worker.close for worker in team])


def test_a_worker_that_dies_is_dropped_and_one_that_joins_begins_with_the_weights_of_now():
    rules = Rules.soft(2, 2)
    with serving(rules) as served:
        team, _ = train(served, rules, 2, 2)
        team[1].close(graceful=False)
        after = [team[0].step(100 + number) for number in range(3)]
        assert any("worker 1 is gone" in text for one in after for text in one.news)
        (model,) = copies(1, width=6)
        late = Worker(served, 1, model, rules)
        welcome = late.begin()
        assert welcome.clock == served.servers[0].shard.clock == 7
        assert same(late.model, team[0].model)
        late.step(50)
        assert any("worker 1 has joined" in text for text in team[0].step(51).news)
        late.close(), team[0].close()


def test_a_push_whose_connection_breaks_is_repeated_and_counts_once():
    """The proxy swallows answers or breaks pushes half-way; the worker comes again with the same number."""
    rules = Rules.soft(1, 1)
    with serving(rules, codec="onebit:least=1") as served:
        (worker,), _ = train(served, rules, 1, 2, codec="onebit:least=1")
        link = worker.servers.links[0]
        shard = served.servers[0].shard

        ask, left = link._ask, ["before", "after"]

        def break_twice(message):
            """Before the push has arrived; later after it was taken in, but before the answer was heard."""
            if isinstance(message, Gradient) and left and (left[0] == "before" or shard.clock == 3):
                if left.pop(0) == "after":
                    ask(message)
                link._connection.end()
                raise ConnectionResetError("the answer was lost")
            return ask(message)

        link._ask = break_twice
        first = worker.step(20)
        assert first.applied
        assert [row.step for row in first.rows] == [3], "steps are told of once"
        assert (shard.clock, shard.taken) == (3, 3)
        second = worker.step(21)
        assert second.applied
        assert not left
        assert (shard.clock, shard.taken, shard.histogram.total()) == (4, 4, 4)
        assert torch.equal(torch.cat(list(link._views)), shard.values)
        worker.step(22)
        assert shard.clock == 5
        worker.close()


def test_a_shard_that_is_silent_is_an_error_within_the_time_out():
    rules = Rules(1, 1, barrier=True)
    listener = socket.create_server(("127.0.0.1", 0))
    with serving(rules) as served:
        served.servers[0].host, served.servers[0].port = listener.getsockname()
        (model,) = copies(1)
        worker = Worker(served, 0, model, rules, timeout=0.3)
        with pytest.raises(SyncError, match=r"shard 0 of 1 at .* did not answer within 0.3 s"):
            worker.begin()
        worker.close(graceful=False)
    listener.close()


def test_a_barrier_names_the_worker_that_does_not_push():
    rules = Rules(2, 2, barrier=True)
    with serving(rules, timeout=0.5) as served:
        team, _ = train(served, rules, 2, 1, timeout=5)
        with pytest.raises(SyncError, match=r"worker 1 did not push a gradient within 0.5 s"):
            team[0].step(3, 2)
        for worker in team:
            worker.close(graceful=False)
    assert "worker 1 did not push" in served.problems[0].what


def test_a_barrier_cannot_go_on_without_a_worker_and_says_so_to_the_others():
    rules = Rules(2, 2, barrier=True)
    with serving(rules) as served:
        team, _ = train(served, rules, 2, 1)
        waiting = threading.Timer(0.2, lambda: team[1].close(graceful=False))
        waiting.start()
        with pytest.raises(SyncError, match="worker 1 is gone"):
            team[0].step(3, 2)
        waiting.join()
        team[0].close(graceful=False)


def test_who_waits_is_told_so_and_does_not_give_up():
    rules = Rules(2, 2, barrier=True)
    with serving(rules, timeout=1.5) as served:
        team, _ = train(served, rules, 2, 1, timeout=0.8)
        late = threading.Timer(1.1, lambda: team[1].step(13, 2))  # longer than the workers' own time-out
        late.start()
        assert team[0].step(3, 2).applied
        late.join()
        together([worker.close for worker in team])


@pytest.mark.parametrize("silent", [0, 1])
def test_a_worker_that_is_silent_is_said_to_be_where_nobody_waits_for_it(silent, caplog):
    rules, clock = Rules.soft(2, 1), Clock()
    with serving(rules, 2, clock=clock) as served, caplog.at_level(logging.WARNING):
        team, _ = train(served, rules, 2, 1)
        server, other = served.servers[0], team[1 - silent]
        told: list[str] = []

        def hear(expected: str) -> None:
            deadline = time.monotonic() + 20
            while not any(expected in text for text in [*told, *caplog.messages]):
                assert time.monotonic() < deadline, (told, caplog.messages)
                told.extend(other.step(len(told)).news)

        def pass_time(steps: int) -> None:
            for _ in range(steps):  # the other one takes its steps, and is never missed
                clock.seconds += 12
                told.extend(other.step(1).news)

        pass_time(2)
        hear(f"nothing has come from worker {silent} for 24 s; the others go on, and its next gradient still counts")
        count = len(told) + len(caplog.messages)
        pass_time(8)
        assert len(told) + len(caplog.messages) == count == 1, "it is said once"
        assert silent in server._workers
        assert team[silent].step(9).applied  # its gradient counts, by its age
        together([worker.close for worker in team])
    assert not served.problems


@pytest.mark.parametrize("silent", [0, 1])
def test_a_worker_that_others_wait_for_is_dropped_and_joins_again(silent, caplog):
    """In a meeting, such as for a checkpoint, where worker 0 may be busy with a test."""
    rules, clock = Rules.soft(2, 2), Clock()
    with serving(rules, clock=clock) as served, caplog.at_level(logging.WARNING):
        team, _ = train(served, rules, 2, 1)
        server, other = served.servers[0], team[1 - silent]
        waits = ThreadPoolExecutor(1).submit(other.servers.gather, "save/0", "here")

        eventually(lambda: server._waiting_since is not None)
        clock.seconds += 21
        if silent == 0:
            eventually(lambda: "worker 0 for 21 s; others wait for it" in caplog.text)
            assert not waits.done()
            clock.seconds += 180
        assert waits.result(20) == {other.number: "here"}
        told = [*other.step(1).news, *caplog.messages]
        assert any(f"worker {silent} did not answer within 20 s, and others waited for it" in text for text in told)
        assert team[silent].step(2).applied  # by a new connection
        told = [*team[0].step(3).news, *team[0].step(4).news]
        assert silent == 0 or any("worker 1 has joined again" in text for text in told)
        assert server._workers.keys() == {0, 1}
        together([worker.close for worker in team])
    assert not served.problems


def test_who_was_dropped_while_it_tested_saves_and_meets_the_others():
    rules = Rules.soft(2, 2)
    with serving(rules, 2) as served:
        team, _ = train(served, rules, 2, 1)

        def drop() -> None:
            for server in served.servers:
                server._workers[0].connection.end()
                eventually(lambda server=server: 0 not in server._workers)

        drop()
        assert [answer.state["taken"] for answer in team[0].servers.states()] == [2, 2]
        drop()
        meets = ThreadPoolExecutor(1).submit(team[0].servers.gather, "the end", "late")
        eventually(lambda: 0 in served.servers[0]._workers)
        assert team[1].servers.gather("the end", "here") == meets.result(20) == {0: "late", 1: "here"}
        together([worker.close for worker in team])
    assert not served.problems


def test_a_goodbye_of_who_never_came_does_not_end_a_run():
    rules = Rules.soft(2, 2)
    with serving(rules) as served:
        first, second = (Worker(served, number, model, rules) for number, model in enumerate(copies(2)))
        first.begin()
        second.servers.links[0].dismiss(), second.close()
        assert first.step(0).applied
        first.close(graceful=False)
        eventually(lambda: not served.servers[0]._peers)
        assert not served.servers[0]._farewell
        back = Worker(served, 0, copies(1)[0], rules)
        assert back.begin().step == 0
        back.close()


def test_workers_with_different_models_are_told_apart_at_the_first_message():
    rules = Rules.soft(2, 2)
    with serving(rules) as served:
        (model,), (other,) = copies(1), copies(1, width=7)
        first = Worker(served, 0, model, rules)
        first.begin()
        second = Worker(served, 1, other, rules)
        with pytest.raises(UsageError, match="worker 1 and worker 0 differ in the model"):
            second.begin()
        second.close(graceful=False)
        (third_model,) = copies(1)
        third = Worker(served, 1, third_model, rules, codec="onebit")
        with pytest.raises(UsageError, match="differ in --compress"):
            third.begin()
        third.close(graceful=False), first.close()


def test_stop_save_and_the_end_reach_everybody_in_the_same_step():
    rules = Rules(2, 2, barrier=True)
    with serving(rules) as served:
        team = [Worker(served, n, model, rules, limit=6) for n, model in enumerate(copies(2))]
        together([worker.begin for worker in team])
        first = together([lambda w=w: w.step(w.number, 2, save=w.number == 0) for w in team])
        assert [one.save for one in first] == [True, True]
        second = together([lambda w=w: w.step(w.number, 2, stop=w.number == 1) for w in team])
        assert [(one.save, one.stop, one.done) for one in second] == [(False, True, False)] * 2
        third = together([lambda w=w: w.step(w.number, 2) for w in team])
        assert [one.done for one in third] == [True, True]
        together([worker.close for worker in team])
