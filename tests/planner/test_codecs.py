"""What layers are sent as, from known figures, and how fast codecs are."""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import parse_codec
from hybridpar.errors import UsageError
from hybridpar.planner.codecs import FIDELITIES, PROVEN, WITHOUT_ENDS, fastest_codecs, proof_lines, small_ends
from hybridpar.planner.inputs import check_fidelity
from hybridpar.planner.profile import Parameter
from hybridpar.planner.rates import CodecRate, measure_codec

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
