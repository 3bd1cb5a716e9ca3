"""Tests how many bytes each codec sends for the layers of known models.

Small layers can cost more than compression of the large ones saves.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torchvision import models

from hybridpar.compress import Exchange, TensorSpec, Traffic, parse_codec


@functools.cache
def shapes(model: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(one.shape) for name, one in getattr(models, model)().named_parameters()}


def traffic(text: str, model: str, workers: int = 2) -> Traffic:
    """Bytes of a step, of shapes alone: no memory is touched."""
    codec, meta = parse_codec(text), torch.device("meta")
    specs = [TensorSpec(name, shape, 0, workers, device=meta) for name, shape in shapes(model).items()]
    return Exchange([codec.bind(spec) for spec in specs]).traffic


def ratio(text: str, model: str) -> float:
    """Bytes that the all-reduce of float32 sends, over bytes that are sent."""
    return traffic("none", model).wire / traffic(text, model).wire


@pytest.mark.parametrize(
    ("text", "least"),
    [
        # resnet18, resnet50, vgg16, mobilenet_v2. Of MobileNetV2 1 % of the elements is in vectors, which go in full.
        ("onebit", (28, 28, 31, 10)),
        ("qsgd_mn:bits=3,meet=shard", (7.5, 7.5, 7.5, 7.4)),
        ("qsgd_mn:bits=4,meet=shard", (5.9, 5.9, 5.9, 5.6)),
        ("qsgd_mn:bits=3", (5, 5, 5, 5)),
        ("hylo", (4, 3.5, 12, 2)),
        ("powersgd:rank=2", (100, 100, 700, 35)),
        ("twobit", (15, 15, 15, 13)),
        ("signsgd", (30, 30, 31, 23)),
        ("terngrad", (10.3, 10, 10.4, 9)),
        ("topk", (45, 45, 45, 30)),
        ("topk:cast=bf16", (60, 58, 60, 39)),
        ("grandk_mn", (340, 240, 470, 75)),
        ("qsgd_mn_ts", (4, 4, 4, 4)),
        ("qsgd_mn_ms", (3.5, 3.5, 3.5, 3.5)),
        ("qsgd", (7.5, 7.5, 7.5, 7)),
        ("nuqsgd", (7.5, 7.5, 7.5, 7)),
        ("bf16", (2, 2, 2, 2)),
    ],
)
def test_bytes_of_models(text: str, least: tuple[float, ...]) -> None:
    for model, bound in zip(("resnet18", "resnet50", "vgg16", "mobilenet_v2"), least, strict=True):
        assert ratio(text, model) >= bound, model


@pytest.mark.parametrize("text", ["onebit", "qsgd_mn:meet=shard", "twobit", "powersgd", "hylo", "signsgd"])
def test_bytes_do_not_grow_with_the_workers(text: str) -> None:
    """Twice (K - 1) / K of a message that is the same for all K, but for what stripes are rounded up to.

    Sums of whole numbers need log K more bits: `qsgd_mn` where codes are added, and `terngrad`.
    """
    assert traffic(text, "resnet18", 16).wire < 2.1 * traffic(text, "resnet18", 2).wire


def test_gathered_messages_grow_until_the_whole_is_smaller() -> None:
    wires = {workers: traffic("topk:rate=0.05", "resnet18", workers).wire for workers in (2, 3, 9, 64)}
    full = traffic("none", "resnet18", 64).wire
    assert wires[3] == pytest.approx(2 * wires[2], rel=0.05)
    assert wires[9] == pytest.approx(8 * wires[2], rel=0.05)
    assert wires[64] == full
