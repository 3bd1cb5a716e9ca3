"""What gradients are sent as, from known figures; how fast codecs are; outer loops; and `--compress auto` by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.compress import parse_codec
from hybridpar.errors import UsageError
from hybridpar.machine.cluster_file import ClusterSpec, Hosts, LinkLevel
from hybridpar.plan import Sync
from hybridpar.planner import codecs
from hybridpar.planner.codecs import (
    FIDELITIES,
    PROVEN,
    WITHOUT_ENDS,
    OuterSteps,
    expected_steps,
    fastest_codecs,
    proof_lines,
    small_ends,
)
from hybridpar.planner.inputs import check_fidelity
from hybridpar.planner.profile import Parameter
from hybridpar.planner.rates import CodecRate, measure_codec
from hybridpar.planner.record import plan_of
from hybridpar.planner.resolve import resolve
from hybridpar.planner.search import find_plan
from tests.planner.small import RATES, chain, cluster, inputs
from tests.ranks import run_ranks
from tests.sync.test_compression import Net, batch
from tests.sync.test_meetings import TwoTypes
from tests.sync.test_reducer import make_data

BUCKETS = [
    [Parameter("fc.weight", (1000, 512), 0)],
    [
        Parameter("conv.weight", (256, 256, 3, 3), 0),
        Parameter("bn.weight", (256,), 0),
        Parameter("bn.bias", (256,), 0),
    ],
]
#: A pass over float32 at 2 GB/s to write and one to read, per element.
SLOW_CPU = CodecRate(((1 << 20, 2.1, 2.1),))


def chosen(megabytes_per_second: float, *texts: str) -> dict[str, str]:
    return fastest_codecs(BUCKETS, dict.fromkeys(texts, SLOW_CPU), 2, 1 / (1e3 * megabytes_per_second))


def test_a_slow_link_gets_a_codec_and_a_fast_one_none():
    assert chosen(12.5, "fp16") == dict.fromkeys(("fc.weight", "conv.weight", "bn.weight", "bn.bias"), "fp16")
    assert chosen(5000.0, "fp16") == {}
    # A tenth at least must be gained.
    assert chosen(1 / 2.1e-3, "fp16") == {}


def test_of_several_codecs_the_fastest_is_taken_layer_by_layer():
    # Vectors do not fit onebit, and with it they travel as they are.
    assert chosen(12.5, "fp16", "onebit") == {"fc.weight": "onebit", "conv.weight": "onebit"}


def test_small_first_and_last_layers_are_sent_as_they_are_with_codecs_that_need_it():
    sizes = {"conv1.weight": (64, 3, 7, 7), "wide": (4096, 4096), "fc.weight": (10, 512), "fc.bias": (10,)}
    layers = {name: Parameter(name, shape, 0) for name, shape in sizes.items()}
    ends = small_ends([*layers.values()])
    assert ends == {"conv1.weight", "fc.weight"}
    # Large tensors have buckets of their own, so the last layer need not be in the first bucket.
    buckets = [[layers["wide"]], [layers[name] for name in ("fc.bias", "fc.weight", "conv1.weight")]]
    for text in (*WITHOUT_ENDS, "onebit"):
        named = {"wide"} if text in WITHOUT_ENDS else {"wide", "fc.weight", "conv1.weight"}
        assert fastest_codecs(buckets, {text: SLOW_CPU}, 2, 1 / 12.5e3, ends).keys() == named
    alike = [Parameter("a", (64, 64), 0), Parameter("b", (512, 512), 0), Parameter("c", (64, 64), 0)]
    assert small_ends(alike) == frozenset(), "they are not small"


def test_fidelity_says_what_may_be_chosen():
    assert {"exact": (), "close": ("fp16", "bf16"), "lossy": ("fp16", "bf16", *PROVEN)} == FIDELITIES
    for texts in FIDELITIES.values():
        assert all(parse_codec(text) for text in texts)
    with pytest.raises(UsageError, match="unknown fidelity 'closer'") as caught:
        check_fidelity("closer")
    assert "close" in caught.value.fix


@pytest.mark.parametrize("codec", [*PROVEN, "fp16"])
def test_codecs_that_lose_something_come_with_what_is_known_of_it(codec: str) -> None:
    lines = proof_lines([codec, codec])
    assert [f"learning rate of {PROVEN[codec]:g}" in line for line in lines] == [True] * (codec in PROVEN)


@pytest.mark.parametrize("text", ["onebit:warmup=5", "qsgd_mn", "powersgd"])
def test_a_codec_is_tried_on_pieces_of_the_model(text):
    codec = parse_codec(text)
    rate = measure_codec(codec, {(4096, 1024), (64, 64), (8,)}, 3, torch.device("cpu"))
    most, *times = rate.tried[-1]
    assert most <= 1 << 20
    assert all(min(encode, decode) >= 0 and encode + decode > 0 for _, encode, decode in rate.tried)
    assert rate.times(2 * most) == pytest.approx([2 * part for part in times])
    assert not measure_codec(parse_codec("powersgd"), {(8,), (3, 3)}, 3, torch.device("cpu")).tried


def test_between_sizes_that_were_tried_a_codec_takes_what_the_line_between_says():
    rate = CodecRate(((100, 1.0, 3.0), (1100, 2.0, 3.0), (2100, 6.0, 4.0)))
    assert rate.times(100) == (1.0, 3.0)
    assert rate.times(600) == pytest.approx((1.5, 3.0))
    assert rate.times(1600) == pytest.approx((4.0, 3.5))
    assert rate.times(4200) == pytest.approx((12.0, 8.0)), "beyond, in proportion"
    assert rate.times(1) == (1.0, 3.0), "a call takes its time, however little it is given"
    assert CodecRate(((1000, 1.0, 2.0),)).times(500) == (0.5, 1.0), "one size says nothing about calls"


# --------------------------------------------------------------------------------------------------------- outer loops


GOOD = OuterSteps(16, 4, "onebit", 230, 5, 0.1, 1.02, 1.1)
PLAIN = OuterSteps(16, 4, "none", 230, 5, -0.2, 0.95, 0.98)
SLOW = 1.25e6


@pytest.fixture
def outer_table(monkeypatch):
    monkeypatch.setattr(codecs, "OUTER_STEPS", (GOOD, PLAIN))


def asked(bandwidth: float = SLOW, **options: Any) -> Any:
    given = {"fidelity": "lossy", "run_steps": 230, "most_stages": 1, **options}
    given.setdefault("rates", {**RATES, "onebit": CodecRate(((1 << 20, 1.0, 1.0),))})
    return inputs(spec=cluster(given.pop("workers", 2), bandwidth), **given)


def chosen_of(answer: Any) -> Any:
    return answer.chosen.candidate.codec


@pytest.mark.usefixtures("outer_table")
def test_a_slow_link_gets_an_outer_loop_and_a_fast_one_does_not():
    long = chain([(100, 200)] * 2, [(512, 512)] * 2)
    slow, fast = find_plan(asked(profile=long)), find_plan(asked(1.25e10, profile=long))
    assert chosen_of(slow).outer == GOOD
    assert chosen_of(fast).every == 1


@pytest.mark.usefixtures("outer_table")
@pytest.mark.parametrize(
    "options",
    [
        {"fidelity": "exact"},
        {"fidelity": "close"},
        {"run_steps": None},
        {"run_steps": 206},
        {"workers": 8, "batch": 16},
    ],
    ids=["exact", "close", "no length", "a shorter run", "more workers"],
)
def test_it_is_no_choice_without_a_measurement_that_says_so(options):
    answer = find_plan(asked(**options))
    assert all(one.every == 1 for one in answer.evaluator.space.codec_choices if one.codecs or options.get("fidelity"))
    assert chosen_of(answer).every == 1


@pytest.mark.usefixtures("outer_table")
def test_a_step_is_computing_and_a_part_of_the_exchange():
    answer = find_plan(asked())
    space, evaluator = answer.evaluator.space, answer.evaluator
    plain = next(one for one in answer.ranked if one.candidate.codec.outer == PLAIN)
    alone = evaluator.outcome(replace(plain.candidate, schedule="accumulate", codec=space.codec_choices[0]))
    size = 4 * sum(one.count for one in space.inputs.profile.parameters)
    assert plain.bytes_sent == pytest.approx(size / 16, rel=1e-3)
    parts = evaluator.parts(plain.candidate)
    assert parts.compute + parts.bubble + parts.sync + parts.codec + parts.update == pytest.approx(parts.step)
    assert parts.step == pytest.approx(plain.step_ms)
    assert size / 16 / SLOW * 1e3 <= plain.step_ms - parts.compute - parts.update < alone.step_ms
    # It is not taken to need fewer steps than training in synchrony.
    assert plain.score == pytest.approx(1.05 * plain.step_ms)


@pytest.mark.usefixtures("outer_table")
def test_the_plan_says_it():
    answer = find_plan(asked())
    plan = plan_of(answer)
    assert plan.sync is not None
    assert (plan.sync.outer, plan.sync.codec) == (16, "onebit")
    assert not plan.is_edited
    assert plan.model_copy(update={"sync": plan.sync.model_copy(update={"outer": 8})}).is_edited
    resolved = resolve(TrainConfig(fidelity="lossy"), 2, plan)
    assert resolved.sync.outer == 16
    assert resolve(TrainConfig(sync="outer:4"), 2, plan).sync.outer == 4
    assert resolve(TrainConfig(), 2).sync == Sync()


def test_of_the_table_the_row_of_the_fewest_workers_counts_and_of_the_longest_run_that_is_no_longer(monkeypatch):
    longer, wide = replace(GOOD, length=460, high=1.2), replace(GOOD, workers=8)
    monkeypatch.setattr(codecs, "OUTER_STEPS", (GOOD, longer, wide))
    assert expected_steps(2, 500) == [longer]
    assert expected_steps(4, 413) == [GOOD], "less than 0.9 of the longer one"
    assert expected_steps(4, 414) == [longer], "a length is known about"
    assert expected_steps(5, 413) == [wide]
    assert expected_steps(9, 413) == []
    assert GOOD.factor == 1.1
    assert replace(GOOD, high=0.8).factor == 1.05


# ------------------------------------------------------------------------------ a loop that says nothing of its inputs


def sent_by_a_loop(world: World, fidelity: str, megabytes_per_second: float) -> tuple[str, tuple[str, ...]]:
    """What a loop that says nothing of its inputs sends, over a link of a speed that is given."""
    config = TrainConfig(compress="auto", fidelity=fidelity)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        level = LinkLevel(bandwidth=1e6 * megabytes_per_second, latency_ms=1e-3)
        cluster = ClusterSpec(hosts=(Hosts(devices=2),), inside=level)
        patch.setattr(codecs, "measure_cluster", lambda world: cluster)
        torch.manual_seed(0)
        with Trainer(Net(), config=config, world=world) as trainer:
            trainer.step(batch(world.rank, 0))
            return str(trainer.engine.wire_format().policy), trainer.planned.lines


@pytest.mark.parametrize(
    ("fidelity", "shared", "speed", "policy", "line"),
    [
        ("exact", False, 0.01, "none", "none: fidelity exact allows nothing else"),
        ("close", True, 0.01, "none", "none: in shared memory gradients"),
        ("close", False, 0.01, "fp16", "fp16 (of none, fp16, bf16)"),
        ("close", False, 1e9, "none", "none (of none, fp16, bf16)"),
        ("lossy", False, 0.01, None, "compared at a learning rate of 0.01"),
    ],
)
def test_all_workers_take_the_codec_whose_exchange_takes_least(fidelity, shared, speed, policy, line):
    first, other = run_ranks(sent_by_a_loop, 2, fidelity, speed, shared_memory=shared)
    assert first == other
    text, lines = first
    if policy is None:
        assert "onebit" in text
    elif policy == "fp16":
        assert text in ("fp16", "bf16")
        line = line.replace("fp16 (", f"{text} (")
    else:
        assert text == policy
    assert any(line in said for said in lines), lines


def with_two_types(world: World, plan: str) -> tuple[str, tuple[str, ...]]:
    torch.manual_seed(0)
    config = TrainConfig(compress="auto", fidelity="close", plan=plan)  # type: ignore[arg-type]
    known = {"example": torch.zeros(8, 3, 8, 8), "total_steps": 10**6}
    with Trainer(TwoTypes(), config=config, world=world, **known) as trainer:  # type: ignore[arg-type]
        trainer.step(make_data(8, seed=world.rank))
        return str(trainer.engine.wire_format().policy), trainer.planned.lines


@pytest.mark.parametrize("plan", ["none", "auto"])
def test_a_model_with_other_types_than_float32_is_sent_as_it_is(plan: str) -> None:
    for policy, lines in run_ranks(with_two_types, 2, plan, shared_memory=False):
        assert policy == "none"
        assert any("none: the parameter 'second.weight' is torch.float64" in line for line in lines), lines


def test_a_single_worker_has_nothing_to_choose_and_is_told_so(caplog):
    with Trainer(Net(), config=TrainConfig(compress="auto", fidelity="close"), world=World()) as trainer:
        assert trainer.plan.sync.codec == "none"
        assert "a single replica" in trainer.planned.lines[0]
        assert not caplog.records
