"""Late gradients against one process that applies them late, and what becomes of them in checkpoints and bad steps."""

from __future__ import annotations

import pytest
import torch

from hybridpar.data.loader import Batch
from hybridpar.errors import UsageError
from hybridpar.train.trainer import Trainer
from tests.pipeline.oracle import images
from tests.ranks import RankError, run_ranks
from tests.train.test_engine import blocks, make_trainer, normless, state_of
from tests.train.training import close, config, delayed_oracle, make_net, same, share, train_rank, weights

STEPS = 5


def run(options, steps=STEPS, size=2, **more):
    return run_ranks(_train, size, options, steps, more, shared_memory=False)


def _train(world, options, steps, more):
    return train_rank(world, options, steps, **more)


@pytest.mark.parametrize(
    ("form", "first", "oracle"),
    [("delay", 0.0, {}), ("half", 0.5, {"parts": 2, "momentum": 0.9**0.5, "decay": 0.005})],
)
def test_gradients_are_late_by_a_batch_or_by_half_a_batch(form, first, oracle):
    ranks = run({"sync": f"allreduce:late={form}"})
    assert same(ranks[0]["weights"], ranks[1]["weights"])
    close(ranks[0]["weights"], delayed_oracle(STEPS, **oracle))
    assert ranks[0]["staleness"] == [first, 1.0, 1.0, 1.0, 1.0]


def test_the_loss_is_that_of_the_whole_batch():
    plain, late, halves = (
        run({"sync": f"allreduce:late={form}", "lr": 1e-9}, 2)[0] for form in ("off", "delay", "half")
    )
    assert late["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert halves["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert plain["staleness"] == [None, None]


def _freezing(world, frozen):
    with Trainer(make_net(), config=config(sync="allreduce:late=delay"), world=world) as trainer:
        for step in range(6):
            trainer.model[1].requires_grad_(step not in frozen)
            trainer.step(share(world, step))
        return weights(trainer.model)


def test_parameters_that_are_frozen_and_thawed_leave_the_others_what_waits():
    ranks = run_ranks(_freezing, 2, [2, 3], shared_memory=False)
    assert same(*ranks)
    close(ranks[0], delayed_oracle(6, frozen=[2, 3]))


def test_a_bad_step_costs_its_gradient_and_the_one_that_waited():
    ranks = run({"sync": "allreduce:late=delay", "compress": "onebit"}, 7, norm=True, spoil=3)
    for rank in ranks:
        assert rank["skipped"] == [False] * 3 + [True, True] + [False] * 2
        assert all(one.isfinite().all() for one in (*rank["weights"], *rank["buffers"]))
    assert same(ranks[0]["weights"], ranks[1]["weights"])


def test_one_replica_has_nothing_to_hide():
    for form in ("delay", "half"):
        alone = run({"sync": f"allreduce:late={form}", "micro_batches": 1}, size=1)[0]
        plain = run({"micro_batches": 2 if form == "half" else 1}, size=1)[0]
        assert same(alone["weights"], plain["weights"])
        assert set(alone["staleness"]) == {0.0}
        for cut, said in run_ranks(_over_stages, 2, 2, 1, {"sync": f"allreduce:late={form}", "micro_batches": 2}):
            parts = 4 if form == "half" else 2
            expected = run_ranks(_over_stages, 1, 1, 1, {"micro_batches": parts})[0][0]
            assert {age for age, *_ in said} == {0.0}
            assert same(list(cut.values()), list(expected.values()))


def test_halves_need_sgd():
    with pytest.raises(UsageError, match=r"--optimizer adamw with --sync allreduce:late=half"):
        config(sync="allreduce:late=half", optimizer="adamw").check()
    with pytest.raises(
        RankError, match=r"cannot be divided into the micro-batches[\s\S]*cannot be divided into 2 micro-batches"
    ):
        run({"sync": "allreduce:late=half"}, cut=[11, 1])


def _one_micro_batch(world):
    with Trainer(make_net(), config=config(sync="allreduce:late=half"), world=world) as trainer:
        x, y = share(world, 0)
        trainer.step(Batch(((x, y),), len(x), len(x) * world.size))


def test_halves_need_two_micro_batches():
    with pytest.raises(RankError, match="a batch that cannot be cut in two halves"):
        run_ranks(_one_micro_batch, 2, shared_memory=False)


def _over_stages(world, stages, replicas, options, make=normless, spoil=None, count=STEPS):
    with make_trainer(stages, world=world, replicas=replicas, make=make, **options) as trainer:
        results = []
        for step in range(count):
            x, y = (one.chunk(replicas)[world.rank % replicas] for one in images(8, seed=step))
            results.append(trainer.step((x * torch.nan if step == spoil and world.rank == 0 else x, y)))
        said = [(one.staleness, one.loss, one.skipped) for one in results]
        return state_of(trainer), said


@pytest.mark.parametrize(
    ("form", "options", "placed"),
    [
        ("delay", {}, (2, 4)),
        ("half", {}, (2, 4)),
        ("delay", {"clip_grad": 0.05}, (4,)),
        ("half", {"compress": "onebit"}, (4,)),
    ],
)
def test_stages_are_late_as_the_uncut_model_is(form, options, placed):
    exact, options = not options, {"sync": f"allreduce:late={form}", **options}
    (uncut, said), _ = run_ranks(_over_stages, 2, 1, 2, options, shared_memory=False)
    assert [age for age, *_ in said] == [0.0 if form == "delay" else 0.5, 1.0, 1.0, 1.0, 1.0]
    for workers in placed:
        for cut, also_said in run_ranks(_over_stages, workers, 2, 2, options, shared_memory=False):
            assert [one[0] for one in also_said] == [one[0] for one in said]
            assert [one[1] for one in also_said] == pytest.approx([one[1] for one in said], rel=1e-6)
            for name, tensor in uncut.items():
                close([cut[name]], [tensor], rtol=0.0 if exact else 1e-6, atol=0.0 if exact else 1e-6)


def test_uneven_shares_and_micro_batches():
    options = {"sync": "allreduce:late=delay", "micro_batches": 2}
    for cut in ([8, 4], [0, 12]):
        close(run(options, cut=cut)[1]["weights"], delayed_oracle(STEPS))


def test_a_bad_step_of_stages_costs_its_gradient_and_the_one_that_waited():
    options = {"sync": "allreduce:late=delay", "compress": "onebit"}
    ranks = run_ranks(_over_stages, 4, 2, 2, options, blocks, 3, 7, shared_memory=False)
    for state, said in ranks:
        assert [skipped for *_, skipped in said] == [False] * 3 + [True, True] + [False] * 2
        assert all(one.isfinite().all() for one in state.values())
        assert same(list(state.values()), list(ranks[0][0].values()))
