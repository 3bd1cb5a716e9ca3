"""Tests the exchange of gradients: fused messages save collectives and change no result."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rig.in_process import InProcessGroup, Meeting
from hybridpar.compress import Exchange, TensorSpec, Traffic, parse_codec
from hybridpar.errors import UsageError
from tests.compress.team import Team, run_together, same_bits

SHAPES = {"a": (40, 33), "b": (9,), "c": (7, 40), "d": (5, 4, 3, 3)}


def exchange_of(texts: dict[str, str], rank: int = 0, workers: int = 2) -> Exchange:
    return Exchange(
        [parse_codec(text).bind(TensorSpec(name, SHAPES[name], rank, workers)) for name, text in texts.items()]
    )


@pytest.mark.parametrize("text", ["none", "onebit"])
def test_together_is_as_one_by_one(text: str) -> None:
    team = Team(text, SHAPES, 3)
    apart = {name: Team(text, {name: shape}, 3) for name, shape in SHAPES.items()}
    for seed in range(3):
        gradients = team.gradients(seed)
        fused = team.step(gradients)
        for index, name in enumerate(SHAPES):
            (single,) = apart[name].step([[own[index]] for own in gradients])
            assert same_bits(fused[index], single)


def test_messages_that_meet_alike_travel_together() -> None:
    exchange = exchange_of({"a": "onebit:meet=shard", "b": "none", "c": "onebit:meet=shard", "d": "fp16"}, workers=1)
    gradients = [torch.randn(coder.spec.count) for coder in exchange.coders]
    (group,) = run_together([exchange], [gradients], [gradients])
    assert group.calls == ["all_to_all", "all_gather", "all_reduce SUM", "all_reduce SUM"]


def test_bytes_on_the_wire() -> None:
    none = exchange_of({"a": "none"}, workers=4).traffic
    assert none == Traffic(payload=4 * 1320, wire=2 * 4 * 1320 * 3 // 4)
    # 10 of 40 rows of 33 values for each of 4 workers: 80 bytes of levels, 330 bits in 42 bytes, up to a multiple of 8
    one = exchange_of({"a": "onebit"}, workers=4).traffic
    assert one == Traffic(payload=5 * 128, wire=(3 + 3) * 128)
    # 14 of 1320 values and their places in 16 bits, to 3 others
    top = exchange_of({"a": "topk"}, workers=4).traffic
    assert top == Traffic(payload=56 + 32, wire=3 * 88)
    assert top + one == Traffic(payload=88 + 640, wire=3 * 88 + 6 * 128)


@pytest.mark.parametrize(
    "gradient",
    [
        torch.zeros(9, dtype=torch.float64),
        torch.zeros(9, dtype=torch.complex64),
        torch.zeros(9).to_sparse(),
        torch.zeros(9, 1),
        torch.zeros(8),
    ],
    ids=["type", "complex", "sparse", "shape", "size"],
)
def test_gradients_that_do_not_fit_are_named(gradient: torch.Tensor) -> None:
    exchange = exchange_of({"a": "onebit", "b": "none"}, workers=1)
    tensors = [torch.zeros(1320), gradient]
    with pytest.raises(UsageError, match=r"gradient of 'b' is .* and torch.float32 of shape"):
        exchange.run(InProcessGroup(Meeting(1), 0), tensors, tensors)
    # Nothing was started.
    right = [[torch.zeros(1320), torch.zeros(9)]]
    run_together([exchange], right, right)
