"""Tests the exchange of gradients: fused messages save collectives and change no result."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hybridpar.compress import Collective, Exchange, TensorSpec, Traffic, bind, parse_codec, run_together
from hybridpar.compress.codec import Full
from hybridpar.compress.exchange import AllGather, AllReduce, AllToAll
from hybridpar.compress.quantised import cut_stripes
from hybridpar.compress.together import meet
from hybridpar.errors import UsageError
from tests.compress.team import Team, same_bits

SHAPES = {"a": (40, 33), "b": (9,), "c": (7, 40), "d": (5, 4, 3, 3)}


def exchange_of(texts: dict[str, str], rank: int = 0, workers: int = 2) -> Exchange:
    return Exchange(
        [bind(parse_codec(text), TensorSpec(name, SHAPES[name], rank, workers)) for name, text in texts.items()]
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
    kinds = []
    for request in exchange.requests(gradients, gradients):
        kinds.append(type(request))
        if isinstance(request, AllReduce):
            assert request.collective is Collective.SUM
        else:
            request.out.copy_(request.inp)
    assert kinds == [AllToAll, AllGather, AllReduce, AllReduce]


def test_what_is_at_work_writes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def note(coders: Sequence[Full], index: int, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        calls.append([coder.spec.name for coder in coders])
        for coder, own in zip(coders, parts, strict=True):
            coder.write(index, own)

    monkeypatch.setattr(Full, "write_together", note)
    exchange = exchange_of({"a": "powersgd:warmup=1", "b": "none", "c": "onebit", "d": "none"}, workers=1)
    gradients = [torch.randn(coder.spec.count) for coder in exchange.coders]
    for _ in range(2):
        list(exchange.requests(gradients, gradients))
        exchange.commit()
    assert calls == [["a", "b", "d"], ["b", "d"]]  # during the warm-up, and then


def test_bytes_on_the_wire() -> None:
    none = exchange_of({"a": "none"}, workers=4).traffic
    assert none == Traffic(payload=4 * 1320, wire=2 * 4 * 1320 * 3 // 4, pull=4 * 1320 * 3 // 4)
    # 10 of 40 rows of 33 values for each of 4 workers: 80 bytes of levels, 330 bits in 42 bytes, up to a multiple of 8
    one = exchange_of({"a": "onebit"}, workers=4).traffic
    assert one == Traffic(payload=5 * 128, wire=(3 + 3) * 128, pull=3 * 128)
    assert one.push == 3 * 128
    # 14 of 1320 values and their places in 16 bits, to 3 others
    top = exchange_of({"a": "topk"}, workers=4).traffic
    assert top == Traffic(payload=56 + 32, wire=3 * 88)
    assert top + one == Traffic(payload=88 + 640, wire=3 * 88 + 6 * 128, pull=3 * 128)


def test_stripes_are_cut_as_cntk_does() -> None:
    assert cut_stripes(10, 1, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert cut_stripes(2, 1, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]
    assert cut_stripes(70, 32, 2) == [(0, 64), (64, 70)]
    assert cut_stripes(0, 1, 2) == [(0, 0), (0, 0)]


def test_coders_of_different_workers_are_refused() -> None:
    codec = parse_codec("none")
    with pytest.raises(ValueError, match="one worker"):
        Exchange([codec.bind(TensorSpec("a", (3,), 0, 2)), codec.bind(TensorSpec("b", (3,), 1, 2))])
    with pytest.raises(ValueError, match="different parameters"):
        Exchange([codec.bind(TensorSpec("a", (3,))), codec.bind(TensorSpec("a", (3,)))])


def test_workers_that_do_not_match_are_noticed() -> None:
    pair = [exchange_of({"b": "none"}, 0), exchange_of({"b": "fp16"}, 1)]
    tensors = [[torch.zeros(9)], [torch.zeros(9)]]
    with pytest.raises(ValueError, match="different tensors"):
        run_together(pair, tensors, tensors)


@pytest.mark.parametrize(
    ("gradient", "fix"),
    [
        (torch.zeros(9, dtype=torch.float64), "in float32"),
        (torch.zeros(9, dtype=torch.complex64), "view_as_real"),
        (torch.zeros(9).to_sparse(), "sparse=False"),
        (torch.zeros(9, 1), "view"),
        (torch.zeros(8), "Bind a new coder"),
    ],
    ids=["type", "complex", "sparse", "shape", "size"],
)
def test_gradients_that_do_not_fit_are_named(gradient: torch.Tensor, fix: str) -> None:
    exchange = exchange_of({"a": "onebit", "b": "none"}, workers=1)
    tensors = [torch.zeros(1320), gradient]
    with pytest.raises(UsageError, match=r"gradient of 'b' is .* and torch.float32 of shape") as caught:
        next(exchange.requests(tensors, tensors))
    assert fix in caught.value.fix
    exchange.rollback()  # nothing was started
    right = [torch.zeros(1320), torch.zeros(9)]
    exchange.run(_Copies(), right, right)
    exchange.commit()


class _Solo:
    """A group of one that carries out nothing."""

    size, rank = 1, 0


class _Copies(_Solo):
    """A group of one."""

    def all_reduce(self, tensor: torch.Tensor, collective: Collective) -> None:
        pass

    def all_to_all(
        self, out: torch.Tensor, inp: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> None:
        out.copy_(inp)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        out.copy_(inp)


def test_a_group_of_other_workers_is_refused() -> None:
    tensors = [torch.zeros(9)]
    with pytest.raises(ValueError, match="worker 1 of 2 on worker 0 of 1"):
        exchange_of({"b": "none"}, rank=1).run(_Solo(), tensors, tensors)  # type: ignore[arg-type]


def test_and_and_max_meet() -> None:
    words = [torch.tensor([7, 12]), torch.tensor([5, 10])]
    meet([AllReduce(word, Collective.AND) for word in words])
    assert [word.tolist() for word in words] == [[5, 8], [5, 8]]
    values = [torch.tensor([1.0, -2.0]), torch.tensor([0.0, 3.0])]
    meet([AllReduce(value, Collective.MAX) for value in values])
    assert [value.tolist() for value in values] == [[1.0, 3.0], [1.0, 3.0]]
