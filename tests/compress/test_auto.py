"""The measured choice: what is predicted from known figures, and that measured figures are those of the link."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.compress import CODECS, Collective, Exchange, TensorSpec, bind, parse_codec
from hybridpar.compress.auto import (
    FIDELITIES,
    PLAIN,
    PROVEN,
    WITHOUT_ENDS,
    Layers,
    candidates_of,
    choose,
    kinds_of,
    predict,
    small_ends,
)
from hybridpar.compress.exchange import PhaseTimes
from hybridpar.compress.rates import CodecRate, LinkCost, measure_codec, measure_link, meet_over
from hybridpar.errors import UsageError
from tests.ranks import run_ranks

BUCKETS = [
    [("fc.weight", (1000, 512))],
    [("conv.weight", (256, 256, 3, 3)), ("bn.weight", (256,)), ("bn.bias", (256,))],
]
HALF = (Collective.SUM, torch.float16)
BYTES = (Collective.SHARD, torch.uint8)
ALL = (Collective.GATHER, torch.uint8)
#: A pass over float32 at 2 GB/s to write and one to read, per element.
SLOW_CPU = CodecRate({1 << 20: (2.1, 2.1)})


def link(megabytes_per_second: float, latency_ms: float = 0.1) -> dict[Any, LinkCost]:
    cost = LinkCost(latency_ms, 1 / (1e3 * megabytes_per_second))
    return dict.fromkeys((PLAIN, HALF, BYTES, ALL), cost)


def chosen(layers: Layers, speed: float, *texts: str, latency_ms: float = 0.1) -> str:
    codecs = {text: parse_codec(text) for text in texts or ("fp16",)}
    return str(choose([layers], codecs, dict.fromkeys(codecs, SLOW_CPU), link(speed, latency_ms))[0])


def test_a_slow_link_gets_a_codec_and_a_fast_one_none():
    layers = Layers(BUCKETS, workers=2)
    assert chosen(layers, 12.5) == "fp16"
    assert chosen(layers, 5000.0) == "none"


def test_of_several_codecs_the_fastest_is_taken_layer_by_layer():
    text = chosen(Layers(BUCKETS, workers=2), 12.5, "fp16", "onebit")
    # Vectors do not fit onebit, and with it they travel as they are.
    assert text == "fc.weight -> onebit; conv.weight -> onebit"


def test_small_first_and_last_layers_are_sent_as_they_are_with_codecs_that_need_it():
    sizes = {"conv1.weight": (64, 3, 7, 7), "wide": (4096, 4096), "fc.weight": (10, 512), "fc.bias": (10,)}
    ends = small_ends([*sizes.items()])
    assert ends == {"conv1.weight", "fc.weight"}
    # Large tensors have buckets of their own, so the last layer need not be in the first bucket.
    buckets = [[("wide", sizes["wide"])], [(name, sizes[name]) for name in ("fc.bias", "fc.weight", "conv1.weight")]]
    for text in (*WITHOUT_ENDS, "onebit"):
        codecs = {text: parse_codec(text)}
        policy, _, _ = choose([Layers(buckets, 2)], codecs, {text: SLOW_CPU}, link(12.5), ends=ends)
        named = {"wide"} if text in WITHOUT_ENDS else {"wide", "fc.weight", "conv1.weight"}
        assert {name for name in sizes if policy.text_of(name) != "none"} == named
    assert small_ends([("a", (64, 64)), ("b", (512, 512)), ("c", (64, 64))]) == frozenset(), "they are not small"


def test_small_layers_stay_as_they_are_where_a_message_costs_more_than_their_bytes():
    small = [[("a", (64,)), ("b", (64,))], *BUCKETS]
    text = chosen(Layers(small, workers=2), 12.5, latency_ms=1.0)
    assert "a ->" not in text
    assert "fc.weight -> fp16" in text


def test_what_backward_hides_needs_no_codec():
    assert chosen(Layers(BUCKETS, workers=2, backward_ms=20.0), 12.5) == "fp16"
    # Only the first layer's gradient, the last to come, has nothing to hide behind.
    buckets = [*BUCKETS, [("first.weight", (512, 512))]]
    assert chosen(Layers(buckets, workers=2, backward_ms=5000.0), 12.5) == "first.weight -> fp16"
    assert chosen(Layers(buckets, workers=2), 12.5) == "fp16"


def test_where_lanes_share_cores_with_backward_what_it_hides_gets_one_too():
    layers = Layers([*BUCKETS, [("first.weight", (512, 512))]], workers=2, backward_ms=5000.0)
    policy, _, _ = choose([layers], {"fp16": parse_codec("fp16")}, {"fp16": SLOW_CPU}, link(12.5), hides=False)
    assert str(policy) == "fp16"


def test_both_predictions_come_with_the_choice():
    layers = Layers(BUCKETS, workers=2)
    codecs = {"fp16": parse_codec("fp16")}
    _, (predicted,), (without,) = choose([layers], codecs, {"fp16": SLOW_CPU}, link(12.5))
    elements = sum(torch.Size(shape).numel() for bucket in BUCKETS for _, shape in bucket)
    assert without.sync_ms == pytest.approx(elements * 4 / 12.5e3 + 2 * 0.1)
    codec_ms = elements / (1 << 20) * 4.2
    assert predicted.sync_ms == pytest.approx(elements * 2 / 12.5e3 + 2 * 0.1 + codec_ms)


def test_positions_wait_for_the_one_whose_sync_ends_last():
    codecs = {"fp16": parse_codec("fp16")}
    large = Layers(BUCKETS[1:], workers=2, backward_ms=5.0, after_ms=1.0)

    def chosen_beside(other: Layers) -> tuple[str, float, float]:
        policy, predicted, without = choose([other, large], codecs, {"fp16": SLOW_CPU}, link(12.5))
        assert len(predicted) == len(without) == 2
        return str(policy), predicted[0].exposed_ms, without[0].exposed_ms

    # What ends before the others do travels as it is, also where a codec would make it faster.
    text, with_it, without = chosen_beside(Layers([[("fc.weight", (100, 512))]], workers=2, backward_ms=5.0))
    assert text == "conv.weight -> fp16; bn.weight -> fp16; bn.bias -> fp16"
    assert with_it == without > 0
    # Once it is the last, it is what counts.
    text, with_it, without = chosen_beside(Layers([[("wide", (4096, 512))]], workers=2, backward_ms=5.0))
    assert "wide -> fp16" in text
    assert "conv.weight" not in text
    assert with_it < without


@pytest.mark.parametrize(
    ("lanes", "backward", "sync", "exposed"),
    [
        (1, None, 2 * (1 + 10 + 2), 26.0),
        # Both lanes write at once; the second message waits for the link; the first is read meanwhile.
        (2, None, 1 + 10 + 10 + 2, 23.0),
        # Half of the bytes are there after half of backward, the rest at its end.
        (2, 100.0, 26.0, 13.0),
    ],
)
def test_lanes_work_side_by_side_and_share_the_link(lanes, backward, sync, exposed):
    layers = Layers([[("a", (8,))], [("b", (8,))]], workers=2, lanes=lanes, backward_ms=backward)
    found = predict([PhaseTimes(1.0, 10.0, 2.0)] * 2, layers)
    assert (found.sync_ms, found.exposed_ms) == pytest.approx((sync, exposed))


def test_fidelity_says_what_may_be_chosen():
    assert list(candidates_of("exact")) == []
    assert list(candidates_of("close")) == ["fp16", "bf16"]
    assert list(candidates_of("lossy")) == ["fp16", "bf16", *PROVEN]
    for texts in FIDELITIES.values():
        assert all(parse_codec(text) for text in texts)
    with pytest.raises(UsageError, match="unknown fidelity 'closer'") as caught:
        candidates_of("closer")
    assert "close" in caught.value.fix


def test_the_kinds_are_those_of_the_messages_that_travel():
    codecs = {text: parse_codec(text) for text in ("fp16", "onebit:warmup=5", "powersgd")}
    assert kinds_of({}, [Layers(BUCKETS, 2)]) == [PLAIN]
    assert kinds_of(codecs, [Layers(BUCKETS, 2)]) == [PLAIN, HALF, ALL]
    assert kinds_of(codecs, [Layers(BUCKETS[:1], 3), Layers(BUCKETS[1:], 3)]) == [PLAIN, HALF, BYTES]


@pytest.mark.parametrize("text", ["onebit:warmup=5", "qsgd_mn", "powersgd"])
def test_a_codec_is_tried_on_pieces_of_the_model(text):
    codec = parse_codec(text)
    rate = measure_codec(codec, {(4096, 1024), (64, 64), (8,)}, 3, torch.device("cpu"))
    assert rate is not None
    assert max(rate.tried) <= 1 << 20
    assert all(min(times) >= 0 and sum(times) > 0 for times in rate.tried.values())
    encode, decode = rate.times(2 * max(rate.tried))
    assert (encode, decode) == pytest.approx([2 * part for part in rate.tried[max(rate.tried)]])
    assert measure_codec(parse_codec("powersgd"), {(8,), (3, 3)}, 3, torch.device("cpu")) is None


def test_between_sizes_that_were_tried_a_codec_takes_what_the_line_between_says():
    rate = CodecRate({100: (1.0, 3.0), 1100: (2.0, 3.0), 2100: (6.0, 4.0)})
    assert rate.times(100) == (1.0, 3.0)
    assert rate.times(600) == pytest.approx((1.5, 3.0))
    assert rate.times(1600) == pytest.approx((4.0, 3.5))
    assert rate.times(4200) == pytest.approx((12.0, 8.0)), "beyond, in proportion"
    assert rate.times(1) == (1.0, 3.0), "a call takes its time, however little it is given"
    assert CodecRate({1000: (1.0, 2.0)}).times(500) == (0.5, 1.0), "one size says nothing about calls"


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("workers", [2, 4])
def test_bytes_of_rounds_are_those_that_an_exchange_counts(name, workers):
    codec, shape = parse_codec(name), (256, 256)
    wires = []
    for rank in range(workers):
        coder = bind(codec, TensorSpec("weight", shape, rank, workers))
        wires.append(Exchange([coder]).traffic.wire)
    assert sum(entry.sent(workers) for entry in coder.rounds) == pytest.approx(sum(wires) / workers, rel=0.01)


def measured(world: World) -> dict[Any, LinkCost]:
    group = world.lane_groups[0]  # type: ignore[attr-defined]
    return measure_link([PLAIN, BYTES], meet_over(group), world.device)


def test_all_workers_know_the_same_link():
    one, *others = run_ranks(measured, 3, shared_memory=False)
    assert list(one) == [PLAIN, BYTES]
    assert all(cost.latency_ms > 0 and cost.ms_per_byte >= 0 for cost in one.values())
    assert others == [one, one]
