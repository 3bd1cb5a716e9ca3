"""What somebody decided is not searched for: the space is that part of itself, and the answer the best of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import PlanError
from hybridpar.planner.codecs import PLAIN
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs, inputs_of_plan
from hybridpar.planner.record import plan_of
from hybridpar.planner.search import find_plan
from hybridpar.planner.space import Candidate, Space
from tests.planner.small import RATES, chain, cluster, inputs, random_inputs


def all_of(asked: PlannerInputs) -> list[Candidate]:
    return list(Space(asked).candidates())


wishes = st.builds(
    Fixed,
    workers=st.sampled_from([None, 1, 2]),
    stages=st.sampled_from([None, 1, 2]),
    replicas=st.sampled_from([None, 1, 2]),
    schedule=st.sampled_from([None, "1f1b"]),
    placement=st.sampled_from([None, "linear", "v"]),
    exchanged=st.booleans(),
    staged=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(random_inputs(), wishes)
def test_the_space_is_the_part_that_was_left_open(asked: PlannerInputs, fixed: Fixed):
    def wanted(one: Candidate) -> bool:
        shape = one.layout
        return (
            fixed.workers in (None, shape.workers)
            and fixed.stages in (None, shape.stages)
            and fixed.replicas in (None, shape.replicas)
            and (shape.stages == 1 or fixed.schedule in (None, one.schedule))
            and (shape.stages == 1 or fixed.placement in (None, shape.kind))
            and (shape.replicas > 1 or not fixed.exchanged)
            and (shape.stages > 1 or not fixed.staged)
        )

    left = all_of(replace(asked, fixed=fixed))
    assert left == [one for one in all_of(asked) if wanted(one)]


@settings(max_examples=20, deadline=None)
@given(random_inputs(), wishes)
def test_the_answer_is_the_best_of_what_was_left_open(asked: PlannerInputs, fixed: Fixed):
    part = replace(asked, fixed=fixed)
    if not all_of(part):
        return
    fast, slow = find_plan(part), find_plan(part)
    assert fast.chosen == slow.chosen
    assert inputs_of_plan(plan_of(slow)) == part
    assert {one.candidate for one in slow.ranked} == set(all_of(part))


def test_a_plan_in_which_what_was_asked_for_does_nothing_is_not_chosen():
    slow = inputs(spec=cluster(2, 1e6), fixed=Fixed(workers=2))
    assert find_plan(slow).chosen.candidate.layout.replicas == 1, "on a slow link a pipeline is faster"
    coded = Fixed(workers=2, codecs={"u0.weight": "fp16"}, exchanged=True)
    assert find_plan(replace(slow, fixed=coded)).chosen.candidate.layout.replicas == 2
    fast = inputs(spec=cluster(2, 1e12), fixed=Fixed(workers=2))
    assert find_plan(fast).chosen.candidate.layout.stages == 1
    staged = Fixed(workers=2, schedule="gpipe", staged=True)
    assert find_plan(replace(fast, fixed=staged)).chosen.candidate.layout.stages > 1
    with pytest.raises(PlanError, match=r"workers 2, stages 2, replicas 1, several replicas"):
        find_plan(replace(fast, fixed=Fixed(workers=2, stages=2, replicas=1, exchanged=True)))


def test_a_number_of_micro_batches_that_was_decided_is_tried_though_layers_normalise_over_them():
    net = chain([(1, 2), (2, 4)], [(8, 8), (8, 8)], batch_norm=True)
    asked = inputs(net, fixed=Fixed(workers=2, micro_batches=3))
    assert {one.micro_batches for one in all_of(asked)} == {3}
    assert {one.micro_batches for one in all_of(replace(asked, fixed=Fixed(workers=2)))} == {1, 2}


@pytest.mark.parametrize("fidelity", ["exact", "lossy"])
def test_a_codec_that_was_decided_is_used_wherever_gradients_are_exchanged(fidelity):
    everything = {f"u{unit}.weight": "fp16" for unit in range(4)}
    asked = inputs(fidelity=fidelity, fixed=Fixed(workers=2, codecs=everything))
    names = {(one.layout.replicas, one.codec.name) for one in all_of(asked)}
    assert names == {(1, "none"), (2, "fp16")}
    none = inputs(fidelity=fidelity, fixed=Fixed(workers=2, codecs={}))
    assert {one.codec for one in all_of(none)} == {PLAIN}
    some = inputs(spec=cluster(2, 1e7), fixed=Fixed(workers=2, replicas=2, codecs={"u3.weight": "onebit:decay=0.5"}))
    chosen = find_plan(some)
    assert chosen.chosen.candidate.codec.name == "onebit:decay=0.5 for 1 of 4 parameters"
    assert set(RATES) >= {"onebit:decay=0.5"}
