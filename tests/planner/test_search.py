"""The search: it answers what enumeration answers, obeys laws, and says what is missing."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from operator import add, sub
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import PlanError, UsageError
from hybridpar.machine.cluster_file import ClusterSpec, parse_cluster, read_cluster_file
from hybridpar.plan import Plan, Sync, parse_plan
from hybridpar.planner.codecs import FIDELITIES, PROVEN, STEPS_TO_TARGET
from hybridpar.planner.cuts import StageDevice, balanced_cut
from hybridpar.planner.evaluate import Evaluator
from hybridpar.planner.explain import describe
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.memory import PROCESS_BYTES, device_bytes
from hybridpar.planner.profile import ModelProfile
from hybridpar.planner.record import plan_of
from hybridpar.planner.resolve import resolve
from hybridpar.planner.search import Answer, find_plan
from hybridpar.planner.space import Candidate, Space
from hybridpar.run.plan_step import timeline_of_plan
from hybridpar.schedule.schedules import SCHEDULES
from hybridpar.train.stages import pipeline_options
from tests.planner.small import ALL_RATES, chain, cluster, inputs, random_inputs


@settings(max_examples=8, deadline=None)
@given(random_inputs(), st.sampled_from([1.5, 4.0, 100.0]))
def test_a_faster_link_never_predicts_plain_plans_slower(asked: PlannerInputs, factor: float):
    levels = {
        name: link.model_copy(update={"bandwidth": factor * link.bandwidth})
        for name in ("inside", "between")
        if (link := getattr(asked.cluster, name)) is not None
    }
    faster = find_plan(replace(asked, cluster=asked.cluster.model_copy(update=levels))).baselines
    for name, outcome in find_plan(asked).baselines.items():
        other = faster[name]
        assert outcome is None or (other is not None and other.score <= outcome.score * (1 + 1e-9))


@settings(max_examples=8, deadline=None)
@given(random_inputs(), st.integers(6, 8), st.sampled_from([1.1, 2.0]))
def test_more_memory_is_never_worse(asked: PlannerInputs, power: int, factor: float):
    if asked.profile.batch_norm:  # `close` may take smaller micro-batches where no equal plan fits
        asked = replace(asked, fidelity="exact")

    def best(memory: float) -> float:
        hosts = tuple(host.model_copy(update={"memory": int(memory)}) for host in asked.cluster.hosts)
        try:
            return find_plan(replace(asked, cluster=asked.cluster.model_copy(update={"hosts": hosts}))).ranked[0].score
        except PlanError:
            return float("inf")

    assert best(factor * 10**power) <= best(10**power)


@settings(max_examples=8, deadline=None)
@given(random_inputs())
def test_a_looser_fidelity_never_predicts_slower(asked: PlannerInputs):
    strict, *looser = (find_plan(replace(asked, fidelity=one)).ranked[0].score for one in FIDELITIES)
    for score in looser:
        assert score <= strict * (1 + 1e-9)
        strict = score


def test_slow_devices_are_left_out_where_the_fast_ones_do_better_alone():
    spec = parse_cluster(
        {
            "hosts": [{"count": 4, "throughput": 0.02}, {"count": 10, "throughput": 8.0}],
            "between": {"bandwidth": 1e10},
        }
    )
    found = find_plan(inputs(replace(inputs().profile, update_ms=2.0), spec, batch=960))
    assert found.ranked[0].candidate.layout.workers == 10


def test_parameters_that_are_not_trained_take_memory():
    profile = chain([(1, 2)] * 2, [(64, 64)] * 2)
    info = profile.info.model_copy(update={"parameters": 20_000_000})
    frozen = inputs(replace(profile, info=info), cluster(2, memory="38MB"), most_stages=1)
    with pytest.raises(PlanError, match="no plan fits into 38"):
        find_plan(frozen)
    assert find_plan(inputs(profile, cluster(2, memory="38MB"), most_stages=1)).chosen


def test_plain_plans_and_no_compression_are_always_there():
    for batch_norm in (False, True):
        for workers in (1, 2, 6, 16):
            asked = inputs(spec=cluster(workers), batch=48, fidelity="lossy")
            asked = replace(asked, profile=replace(asked.profile, batch_norm=batch_norm))
            assert find_plan(asked).baselines.keys() == {"data parallel", "one device"}


def test_plans_within_the_noise_are_ties_and_the_simplest_wins():
    profile = chain([(5, 10), (5, 10)], [(8, 8), (8, 8)])
    quiet = find_plan(inputs(profile, cluster(2, 1e10)))
    assert quiet.chosen == quiet.ranked[0]
    assert quiet.chosen.candidate.layout.workers == 2
    # Two devices gain 2.5 %, which a profile with that much noise cannot tell.
    slower = chain([(5, 10), (5, 10)], [(2048, 512), (2048, 512)], noise=0.03)
    asked = inputs(slower, cluster(2, 2.95e8, kind="cuda"), most_micro_batches=1, most_stages=1, bucket_bytes=1 << 30)
    noisy = find_plan(asked)
    apart = noisy.baselines["one device"].score / noisy.baselines["data parallel"].score - 1
    assert 0 < apart < 0.03
    assert noisy.chosen.candidate.layout.workers == 1, "one device is simpler"
    assert noisy.chosen in noisy.ties
    assert noisy.ranked[0] in noisy.ties
    assert all(one.score <= noisy.ranked[0].score * 1.03 for one in noisy.ties)


def test_where_nothing_fits_only_a_looser_fidelity_lets_batch_norm_see_fewer_samples():
    profile = chain([(1, 2)] * 2, [(64, 64)] * 2, 4_000_000, batch_norm=True)
    asked = inputs(profile, cluster(2, memory="100MB", kind="cuda"), batch=64, most_micro_batches=32)
    with pytest.raises(PlanError, match="no plan fits into 100"):
        find_plan(asked)
    for fidelity in ("close", "lossy"):
        chosen = find_plan(replace(asked, fidelity=fidelity)).chosen
        count = chosen.candidate.layout.replicas * chosen.candidate.micro_batches
        assert chosen.fits
        assert 2 < count <= 32, "each part has two samples at least"
        roomy = replace(asked, cluster=cluster(2, memory="1GB", kind="cuda"), fidelity=fidelity)
        plain = find_plan(roomy).chosen.candidate
        assert plain.layout.replicas * plain.micro_batches == 2


def test_batch_norm_fixes_the_micro_batch_of_plain_data_parallelism():
    asked = inputs(spec=cluster(4), batch=32)
    asked = replace(asked, profile=replace(asked.profile, batch_norm=True))
    evaluator = Evaluator(Space(asked))
    sizes = {evaluator.samples(candidate.layout, candidate.micro_batches) for candidate in evaluator.space.candidates()}
    assert sizes == {32 // 4}
    free = Evaluator(Space(replace(asked, profile=replace(asked.profile, batch_norm=False))))
    assert len({free.samples(candidate.layout, candidate.micro_batches) for candidate in free.space.candidates()}) > 1


@pytest.mark.parametrize(
    ("fidelity", "allowed"),
    [("exact", {"none"}), ("close", {"none", "fp16", "bf16"}), ("lossy", {"none", "fp16", "bf16", *PROVEN})],
)
def test_a_fidelity_allows_its_codecs_and_no_others(fidelity: str, allowed: set[str]):
    codec_choices = Space(inputs(fidelity=fidelity, rates=ALL_RATES)).codec_choices
    used = {text for one in codec_choices for text in one.codecs.values()} | {"none"}
    assert used == allowed


def test_a_codec_is_ranked_by_time_to_the_same_loss():
    found = find_plan(inputs(fidelity="lossy", rates=ALL_RATES, most_stages=1))
    for one in found.ranked:
        texts = set(one.candidate.codec.codecs.values())
        assert one.score == pytest.approx(one.step_ms * max((STEPS_TO_TARGET[text] for text in texts), default=1.0))
    assert any(one.score > one.step_ms for one in found.ranked)


def test_a_slow_link_gets_codecs_or_a_pipeline_and_a_fast_one_neither():
    slow = find_plan(inputs(spec=cluster(2, 1e7), fidelity="close")).chosen.candidate
    assert slow.codec.codecs or slow.layout.replicas == 1
    fast = find_plan(
        inputs(spec=cluster(2, 1e11, kind="cuda"), fidelity="lossy", most_micro_batches=1)
    ).chosen.candidate
    assert fast.is_plain
    assert fast.layout.replicas == 2


def test_no_plan_fits_says_what_is_missing():
    with pytest.raises(PlanError) as caught:
        find_plan(inputs(spec=cluster(2, memory="1MB")))
    assert "no plan fits into 1.0 MB per device" in caught.value.what
    needed = float(caught.value.fix.split("devices of ")[1].split(" MB")[0].replace(",", ""))
    assert find_plan(inputs(spec=cluster(2, memory=int(needed * 1e6)))).ranked
    with pytest.raises(PlanError):
        find_plan(inputs(spec=cluster(2, memory=int(needed * 1e6 - 2e5))))


def test_of_unequal_devices_the_fastest_are_used_and_the_slowest_is_waited_for():
    hosts, between = [{"throughput": 0.1}, {}], cluster(2).between
    found = find_plan(inputs(spec=parse_cluster({"hosts": hosts, "between": between})))
    assert found.chosen.candidate.layout.workers == 1
    assert found.chosen.step_ms == pytest.approx(18 * 8 / 4)


def unequal(*throughputs: float, bandwidth: float = 1e12, small: float | None = None) -> ClusterSpec:
    """Hosts of one GPU each; those of throughput 1 have `small` bytes of memory."""
    hosts = [{"throughput": one, "name": f"x{one:g}", "kind": "cuda"} for one in throughputs]
    hosts = [{**host, "memory": small} if small is not None and host["throughput"] == 1 else host for host in hosts]
    return parse_cluster({"hosts": hosts, "between": {"bandwidth": bandwidth}})


def test_replicas_of_unequal_speed_take_shares_and_equally_long():
    found = find_plan(inputs(spec=unequal(1, 3, 2), batch=24, most_stages=1))
    chosen = found.chosen.candidate
    assert chosen.layout.replicas == 3
    plan = plan_of(found)
    assert plan.placement is not None
    assert plan.placement.shares == (12, 8, 4)
    assert not plan.is_edited
    # A chain of 18 ms for 4 samples: each takes 24 / (3 + 2 + 1) samples of a device of speed 1.
    costs = found.evaluator.costs(found.chosen.candidate)
    passes = sum(costs.forward_ms) + sum(costs.backward_ms)
    assert chosen.micro_batches * passes == pytest.approx(18 / 4 * 24 / 6)
    equal = plan.model_copy(update={"placement": plan.placement.model_copy(update={"shares": None})})
    assert equal.is_edited


def test_with_batch_norm_parts_stay_equal():
    profile = chain([(1, 2), (2, 4)], [(64, 64), (64, 64)], batch_norm=True)
    found = find_plan(inputs(profile, unequal(1, 3), batch=24, most_stages=1))
    assert found.evaluator.shares(found.chosen.candidate.layout, found.chosen.candidate.micro_batches) is None


#: A model of 192 ms for 16 samples on a device of speed 2, which takes 17 MB whole.
LARGE = chain([(4, 8)] * 8, [(256, 512)] * 8)


def test_a_large_device_is_alone_beside_two_small_ones_as_a_pipeline():
    found = find_plan(
        inputs(LARGE, unequal(1, 2, 1, bandwidth=1e9, small=14e6), batch=16, most_stages=4, fixed=Fixed(replicas=2))
    )
    layout = found.chosen.candidate.layout
    assert layout.texts() == ("0,0", "1,2")
    plan = plan_of(found)
    assert plan.placement is not None
    assert plan.layout == layout
    assert not any(one.sharded and not one.layout.is_equal for one in found.evaluator.space.candidates(saving=True))
    divided = replace(found.evaluator.space.inputs, fixed=Fixed(shard_optimizer=True))
    assert all(one.is_equal for one, _ in Space(divided).layouts())
    sync = Sync(shard_optimizer=True)
    with pytest.raises(UsageError, match="--shard-optimizer with replicas of different numbers of workers"):
        resolve(TrainConfig(), 3, plan.model_copy(update={"sync": sync}))
    assert not parse_plan(json.loads(plan.to_json())).is_edited
    # Both replicas take equally long with their shares, as far as samples can be divided.
    times = [
        found.evaluator.simulation(found.chosen.candidate, costs, replica).step_ms
        for replica in layout.kinds
        for costs in [found.evaluator.costs(found.chosen.candidate, replica=replica)]
    ]
    assert max(times) < 1.2 * min(times)
    assert describe(found.chosen.candidate, found).startswith("2 stages on 1 + 2 devices")


def test_options_that_need_equal_replicas_leave_no_others_to_the_search_however_unlike_hosts_are():
    spec = unequal(2, 1, 1, small=14e6)
    assert not all(layout.is_equal for layout, _ in Space(inputs(LARGE, spec)).layouts())
    assert all(layout.is_equal for layout, _ in Space(inputs(LARGE, spec, fixed=Fixed(equal=True))).layouts())


def test_measured_speeds_give_the_plan_of_a_described_cluster_and_equal_ones_change_nothing():
    def planned(spec: ClusterSpec) -> Plan:
        return plan_of(find_plan(inputs(LARGE, spec, batch=24, most_stages=2, fixed=Fixed(workers=3))))

    measured = cluster(3, 1e12, kind="cuda")
    faster = measured.at_speeds([1.0, 0.5, 0.5])
    described = {**measured.model_dump(), "hosts": [{"kind": "cuda"}, {"count": 2, "kind": "cuda", "throughput": 0.5}]}
    assert faster == parse_cluster(described)
    assert planned(faster).placement.shares == pytest.approx((12, 6, 6))
    assert any(one.texts() == ("0,0", "1,2") for one, _ in Space(inputs(LARGE, faster)).layouts())
    assert measured.at_speeds([1.0] * 3) == measured
    assert planned(measured).placement.shares is None
    slow_first = measured.at_speeds([0.5, 1.0, 1.0])
    assert planned(slow_first).placement.shares == pytest.approx((4.8, 9.6, 9.6)), "in the order of ranks"
    pairs = parse_cluster(
        {"hosts": [{"count": 2, "devices": 2}], "inside": {"bandwidth": 1e9}, "between": {"bandwidth": 1e9}}
    )
    assert [host.throughput for _, host in pairs.at_speeds([1, 0.9, 0.25, 0.3]).by_worker] == [0.9, 0.9, 0.25, 0.25]


def slowest(profile: ModelProfile, stage_of: Sequence[int], speeds: Sequence[float]) -> float:
    """Milliseconds of the stage that takes longest on its device."""
    units = profile.timed(profile.samples).units
    sums = [
        sum(unit.ms for unit, own in zip(units, stage_of, strict=True) if own == stage) for stage in range(len(speeds))
    ]
    return max(time / speed for time, speed in zip(sums, speeds, strict=True))


@pytest.mark.parametrize("speeds", [(2, 1), (1, 2), (1, 4, 2), (3, 1, 1), (1, 1.5, 2, 8)])
def test_stages_are_cut_by_the_speeds_of_their_devices_as_enumeration_would(speeds):
    chance = random.Random(len(speeds) * speeds[0])
    for units in range(len(speeds), 9):
        profile = chain([(chance.randint(1, 20), chance.randint(1, 20)) for _ in range(units)], [(8, 8)] * units)
        best = min(
            slowest(profile, [sum(end <= unit for end in ends) for unit in range(units)], speeds)
            for ends in itertools.combinations(range(1, units), len(speeds) - 1)
        )
        cut = balanced_cut(profile, len(speeds), tuple(StageDevice(speed / min(speeds)) for speed in speeds))
        assert cut.name == "balanced by speed"
        assert slowest(profile, cut.stage_of, speeds) == pytest.approx(best)


def test_a_cluster_file_of_two_kinds_of_gpu_gives_a_plan_of_unequal_stages(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[[hosts]]\nkind = "cuda"\nname = "large"\nthroughput = 2.0\n[[hosts]]\nkind = "cuda"\nname = "small"\n'
        '[between]\nbandwidth = "10GB/s"\n'
    )
    profile = chain([(4, 8)] * 9, [(64, 64)] * 9)
    fixed = Fixed(workers=2, stages=2, micro_batches=32)
    found = find_plan(inputs(profile, read_cluster_file(path), batch=128, fixed=fixed))
    chosen = found.chosen.candidate
    plan = parse_plan(json.loads(plan_of(found).to_json()))
    sizes = {rank: len(plan.partition.stages[stage].units) for stage, (rank, _) in enumerate(plan.layout.rows[0])}
    assert sizes == {0: 6, 1: 3}, "worker 0 is twice as fast"
    assert plan.partition.balance == pytest.approx(1)
    assert not plan.is_edited
    costs = found.evaluator.costs(chosen)
    assert costs.forward_ms == pytest.approx((12, 12))
    # A pipeline that was cut for equal devices would wait for the slow one.
    equal = Candidate(chosen.layout, chosen.micro_batches, balanced_cut(profile, 2), chosen.schedule)
    assert found.evaluator.outcome(equal).step_ms > 1.2 * found.chosen.step_ms


def test_a_fast_device_of_little_memory_gets_as_much_as_fits():
    hosts = [{"kind": "cuda", "throughput": 3.0, "memory": 6e6}, {"kind": "cuda", "memory": 40e6}]
    fixed = Fixed(workers=2, stages=2, micro_batches=4, placement="linear")
    spec = {"hosts": hosts, "between": {"bandwidth": 1e10}}
    found = find_plan(inputs(LARGE, parse_cluster(spec), batch=16, fixed=fixed))
    free = [{**host, "memory": 40e6} for host in hosts]
    roomy = find_plan(inputs(LARGE, parse_cluster({**spec, "hosts": free}), batch=16, fixed=fixed))

    def units_of_the_fast(answer: Answer) -> int:
        candidate = answer.chosen.candidate
        layout = answer.evaluator.layout(candidate)
        return sum(layout.home(stage) == 0 for stage in candidate.cut.stage_of)

    assert found.chosen.fits
    assert 0 < units_of_the_fast(found) < units_of_the_fast(roomy)
    evaluator, one = found.evaluator, found.chosen.candidate
    saved = evaluator.simulation(one, evaluator.costs(one)).peak_saved_bytes
    needs = [need for need, _ in device_bytes(evaluator, one, saved)]
    assert needs[0] <= 6e6 < needs[1], "each device by itself"


# ------------------------------------------------------------------------------------------------- memory

MIB = 1 << 20


def needed(asked: PlannerInputs, **shape: Any) -> float:
    """Bytes that a device needs for the first candidate of a shape, without the margin."""
    evaluator = Evaluator(Space(replace(asked, memory_margin=1.0, fixed=Fixed(**shape))))
    return evaluator.outcome(next(evaluator.space.candidates())).memory_bytes


def of_memory(parameters: list[tuple[int, ...]], kind: str, **options: Any) -> PlannerInputs:
    profile = chain([(1, 2)] * len(parameters), parameters, 8 * MIB)
    return inputs(profile, cluster(2, kind=kind), **{"batch": 8, "rates": {}, **options})


def test_on_a_cpu_a_process_needs_what_passes_work_in_and_workers_share():
    sizes = [(64, 64)] * 4

    def more(devices: int = 2, **shape: Any) -> float:
        both = []
        for kind in ("cpu", "cuda"):
            asked = of_memory(sizes, kind)
            link = {"bandwidth": 1e9, "latency_ms": 0.1}
            hosts = {"hosts": [{"count": 2 // devices, "devices": devices, "kind": kind}], "inside": link}
            spec = parse_cluster(hosts | ({"between": link} if devices == 1 else {}))
            both.append(needed(replace(asked, cluster=spec), **shape))
        return both[0] - both[1]

    # Two tensors more than on a GPU, and the weights of a layer.
    working = PROCESS_BYTES + 2 * 8 * MIB + 4 * 64 * 64
    assert more(workers=1, replicas=1, stages=1, micro_batches=2) == working
    data_parallel = {"workers": 2, "replicas": 2, "stages": 1, "micro_batches": 1}
    bucket = 4 * 4 * 64 * 64
    assert more(**data_parallel) == working - bucket, "gradients are added where the workers share memory"
    arriving = 4 * 64 * 64 * 4  # workers of several hosts share no memory: a bucket arrives over a socket
    assert more(devices=1, **data_parallel) == working + arriving
    pipeline = {"workers": 2, "replicas": 1, "stages": 2, "micro_batches": 2, "schedule": "1f1b", "placement": "linear"}
    assert more(**pipeline) == working


def test_activations_wait_with_the_host_where_its_link_is_faster_than_computing_them_again():
    profile = chain([(10, 20)] * 8, [(8, 8)] * 8, 1 << 20)
    one = Evaluator(Space(inputs(profile, cluster(1, kind="cuda", host_link=1e9), memory_margin=1.0)))
    every = list(one.space.candidates(saving=True))
    loop = next(one for one in every if one.cut.offload)
    plain, again = (replace(loop, cut=replace(loop.cut, offload=False, recompute=on)) for on in (False, True))
    figures, moving = one.figures(plain), one.figures(loop)
    cross = [0] * loop.layout.stages
    for edge in figures.edges:
        cross[edge.source] += edge.bytes
    entering = one.figures(again).saved_bytes
    assert moving.saved_bytes == tuple(map(add, entering, cross))
    assert moving.again_bytes == tuple(map(sub, figures.saved_bytes, moving.saved_bytes))
    # A link of 1 GB/s takes 1 ms for 1 MB, and passes take longer only where that is longer.
    times = [1e3 * size / 1e9 for size in moving.again_bytes]
    slow = Evaluator(Space(replace(one.space.inputs, cluster=cluster(1, kind="cuda", host_link=1e5))))
    assert one.costs(loop).forward_ms == one.costs(plain).forward_ms
    assert slow.costs(loop).backward_ms == pytest.approx(
        [max(1e4 * time, back) for time, back in zip(times, slow.costs(plain).backward_ms, strict=True)]
    )
    assert not any(one.cut.offload for one in Space(inputs(profile, cluster(1, kind="cuda"))).candidates(saving=True))


@pytest.mark.parametrize(
    ("rate", "told"), [(1e9, "activations in the host's memory"), (1e5, "activations computed again")]
)
def test_what_is_faster_of_moving_activations_and_computing_them_again_is_proposed(rate, told):
    profile = chain([(10, 20)] * 8, [(8, 8)] * 8, 100_000)
    graph = replace(profile.graph, saved=tuple(replace(one, bytes=8 << 20) for one in profile.graph.saved))
    space = {"most_stages": 8, "most_micro_batches": 1}
    profile = replace(profile, graph=graph)
    found = inputs(profile, cluster(1, kind="cuda", memory="70MB", host_link=rate), **space)
    answer = find_plan(found)
    plan = plan_of(answer)
    assert told in describe(answer.chosen.candidate, answer)
    assert bool(plan.pipeline.offload) != bool(plan.pipeline.recompute)
    assert plan.layout.kind == "loop", "stages of one device, one after the other"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_memory_decides_whether_an_optimizer_is_divided_or_activations_are_computed_again(kind):
    profile = chain([(1, 2)] * 4, [(256, 256)] * 4, 4 << 20)
    wide = inputs(profile, cluster(2, 1e9, kind=kind), batch=16, optimizer_copies=2)
    found = find_plan(wide)
    assert not any(one.candidate.sharded or one.candidate.cut.recompute for one in found.ranked)
    space = Space(wide)
    every = Evaluator(space)
    plain = min(every.outcome(one).memory_bytes for one in space.candidates())
    saving = [(every.outcome(one).memory_bytes, one) for one in space.candidates(saving=True)]
    least, _ = min(saving, key=lambda pair: pair[0])
    assert least < plain
    narrow = replace(wide, cluster=cluster(2, 1e9, kind=kind, memory=int(least) + 1))
    answer = find_plan(narrow)
    chosen = answer.chosen.candidate
    assert chosen.sharded or chosen.cut.recompute
    assert answer.chosen.memory_bytes <= least + 1
    plan = plan_of(answer)
    assert (plan.sync.shard_optimizer, bool(plan.pipeline.recompute)) == (chosen.sharded, chosen.cut.recompute)
    with pytest.raises(PlanError, match="Use devices of") as error:
        find_plan(replace(wide, cluster=cluster(2, 1e9, kind=kind, memory=int(least) - 1000)))
    said = float(re.search(r"Use devices of ([0-9.]+) MB", str(error.value))[1])
    assert int(least) <= 1e6 * said <= int(least) + 100_000


@pytest.mark.parametrize("schedule", [None, *(name for name in SCHEDULES if name != "accumulate")])
def test_what_runs_and_what_is_drawn_is_what_was_predicted(schedule):
    """Also on a slow link, for which `greedy` makes other orders, where passes are done twice, and with skip edges."""
    profile = chain([(10, 20)] * 4, [(64, 64)] * 4, 200_000)
    values = list(profile.graph.values)
    values[0] = replace(values[0], consumers=(1, 3))
    profile = replace(profile, graph=replace(profile.graph, values=tuple(values)), update_ms=2.0)
    fixed = Fixed(schedule=schedule)
    answer = find_plan(inputs(profile, cluster(2, 1.25e7, host_link=1e10), most_stages=4, batch=16, fixed=fixed))
    evaluator, checked = answer.evaluator, set[str]()
    for one in [*evaluator.space.candidates(), *evaluator.space.candidates(saving=True)][::4]:
        outcome = evaluator.outcome(one)
        plan = parse_plan(json.loads(plan_of(answer, outcome).to_json()))
        drawn = timeline_of_plan(plan)
        ends = [span.end_ms for row in drawn.rows for span in row.spans.spans]
        passes = replace(evaluator.costs(one), buckets=(), step_ms=None, control_ms=0.0)
        assert max(ends) == pytest.approx(evaluator.simulation(one, passes).step_ms, rel=0.01)
        predicted = tuple(evaluator.schedule(one, replica).rows for replica in one.layout.kinds)
        assert tuple(order.rows for order in plan.orders()) == predicted
        if one.layout.positions == 2:
            resolved = resolve(TrainConfig(batch_size=16), 2, plan)
            example = torch.empty(evaluator.samples(one.layout, one.micro_batches), 1)
            given = resolved, example, World(size=2), torch.device("cpu")
            options = pipeline_options(*given, one.micro_batches)
            assert options.order(0, one.micro_batches).rows == predicted[0]
            checked.add(one.schedule)
    assert checked if schedule is None else checked == {schedule}
