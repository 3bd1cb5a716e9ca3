"""When a worker of an outer loop over servers exchanges: every H steps, at its pace, when it is to stop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybridpar.config import TrainConfig
from hybridpar.run.served_outer import OuterWorker
from hybridpar.run.timings import Timings
from hybridpar.server.learner import Exchanged


class _Learner:
    """Notes what is pushed; servers that count the steps of this worker alone."""

    def __init__(self, fastest: float = 0.0) -> None:
        self.fastest, self.ends, self.step = fastest, [], 0

    def stay(self) -> None:
        pass

    def exchange(self, end, loss, *, rate, seconds):
        self.ends.append(end | {"loss": loss})
        self.step += end["steps"]
        times = {"compute_ms": 1e3 * seconds, "exposed_ms": 12.0, "pushed": 60, "pulled": 30}
        answer = {"staleness": 0, "done": False, "stop": False, "save": 0, "fastest": self.fastest}
        return Exchanged(step=self.step, loss=loss, applied=True, **times, **answer)


def trained(steps, learner, *, worker=0, stop=(), bad=(), total=24, **options):
    """Lengths of the intervals, and what was pushed."""
    done = []

    def step(given):
        done.append(given)
        return SimpleNamespace(loss=float(len(done)), committed=len(done) not in bad)

    trainer = SimpleNamespace(engine=SimpleNamespace(step=step), wait=lambda: None)
    outer = OuterWorker(trainer, learner, TrainConfig(**{"sync": "outer:6,ps-async", **options}), worker, total, 12)
    at, timings, results = 0, Timings(), []
    for number in range(1, steps + 1):
        wanted = {"stop": number in stop, "save": False, "lowered": None}
        batch = SimpleNamespace(samples=4)
        result = outer.step([], batch, at, rate=1.0, wanted=wanted, timings=timings, data_ms=0.0)
        if result is not None:
            at = result.step
            results.append(result)
    assert len(timings.times) == steps
    return outer, [end["steps"] for end in learner.ends], results


def test_it_exchanges_every_h_steps_and_at_the_end_of_the_run_without_momentum():
    learner = _Learner()
    _, lengths, results = trained(16, learner, total=16)
    assert lengths == [6, 6, 4]
    assert [end["plain"] for end in learner.ends] == [False, False, True]
    assert [end["loss"] for end in learner.ends] == [3.5, 9.5, 14.5]
    assert (results[0].pushed, results[0].pulled, results[0].exposed_ms) == (10, 5, 2.0), "of a step"


def test_a_worker_takes_its_part_of_h():
    assert trained(9, _Learner(), worker=1, outer_pace="1,0.5")[1] == [3, 3, 3]
    assert trained(4, _Learner(), worker=1, outer_pace="1,0.01")[1] == [1, 1, 1, 1]


def test_a_slow_worker_exchanges_after_as_many_steps_as_it_makes_meanwhile():
    learner = _Learner()
    outer, _, _ = trained(6, learner, outer_pace="auto")
    assert outer.pace == 1.0, "of others nothing is known"
    learner = _Learner(fastest=1e12)
    outer, lengths, _ = trained(8, learner, outer_pace="auto")
    assert outer.pace < 0.1
    assert lengths == [6, 1, 1]


def test_who_is_to_stop_does_not_wait_for_the_end_of_the_interval_unless_others_do():
    assert trained(8, _Learner(), stop=(2,))[1] == [2, 6]
    learner = _Learner()
    assert trained(6, learner, stop=(2,), sync="outer:6,ps")[1] == [6]
    assert learner.ends[0]["stop"]


@pytest.mark.parametrize(("bad", "samples", "loss"), [((1, 4), 16, 4.0), (range(1, 7), 0, None)])
def test_steps_that_did_not_count_have_no_samples(bad, samples, loss):
    learner = _Learner()
    trained(6, learner, bad=tuple(bad))
    (end,) = learner.ends
    assert (end["samples"], end["steps"]) == (samples, 6)
    assert end["loss"] == loss if loss is not None else end["loss"] != end["loss"]
