"""Computes from shapes alone how many bytes a method sends, for any model and number of workers.

The same rule for both sides: bytes that a worker sends, by each collective's own factor, over those of an all-reduce of
float32. That what is declared is what leaves the machine is checked in `benchmarks.sync.links`, by the interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.pipeline.checks import Check, write_checks
from hybridpar.compress import Codec, ErrorFeedback, Exchange, TensorSpec, bind
from hybridpar.compress.policy import parse_codec
from hybridpar.errors import UsageError
from hybridpar.models import build_model


@dataclass(frozen=True)
class Claim:
    """A codec on some models.

    Attributes:
        codec: Its text.
        at_least: How many times less is sent, by model; None where it is only told.
        workers: How many there are.
    """

    codec: str
    at_least: Mapping[str, float | None]
    workers: int = 2


CLAIMS = (
    Claim("onebit", {"resnet18": 28, "mobilenet_v2": 10}),
    Claim("qsgd_mn:bits=3,meet=shard", {"resnet18": 7.5}),
    Claim("qsgd_mn:bits=4,meet=shard", {"resnet18": 6}),
    Claim("qsgd_mn:bits=3", {"resnet18": 5}),
    Claim("hylo", {"vgg16": 12, "resnet18": 4, "resnet50": 3.5}),
    Claim("twobit", dict.fromkeys(("resnet18", "mobilenet_v2"))),
    *(Claim(f"powersgd:rank={rank}", dict.fromkeys(("resnet18", "mobilenet_v2"))) for rank in (1, 2, 4)),
    *(Claim("onebit", {"resnet18": None}, workers) for workers in (4, 8)),
)
#: Classes of the data set for which the models are built, as torchvision's weights have them.
CLASSES = 1000


def measure(quick: bool, output: str | None, claims: Sequence[Claim] = CLAIMS) -> None:
    """Count, print and write; in this process.

    Args:
        quick: ResNet-18 alone.
        output: The table's file.
        claims: What to count.
    """
    rows = []
    for claim in claims:
        try:
            codec = parse_codec(claim.codec)
        except UsageError as error:
            print(f"no bytes of {claim.codec}: {error.what}")
            continue
        for name, at_least in claim.at_least.items():
            if quick and name != "resnet18":
                continue
            with torch.device("meta"):  # shapes are all that counts
                model = build_model(name, CLASSES)
            shapes = {key: tuple(one.shape) for key, one in model.named_parameters()}
            full, sent = (wire_bytes(one, shapes, claim.workers) for one in (parse_codec("none"), codec))
            rows.append(
                Check(
                    setting=f"{name}, {CLASSES} classes, {claim.workers} workers",
                    link="none",
                    what=f"float32 bytes over bytes, {claim.codec}",
                    value=full / sent,
                    low=full / sent,
                    high=full / sent,
                    at_least=at_least,
                    extra=f"{full / 1e6:.3f} MB, {sent / 1e6:.3f} MB",
                )
            )
    write_checks(rows, output, title="sync")


def wire_bytes(codec: Codec, shapes: Mapping[str, Sequence[int]], workers: int) -> int:
    """Bytes that a worker sends in a step with all parameters in one message, warm-up steps aside.

    Args:
        codec: What they travel as.
        shapes: Of the parameters, by name.
        workers: How many there are.
    """
    codec = replace(codec, warmup=0) if isinstance(codec, ErrorFeedback) else codec
    specs = [TensorSpec(name, tuple(shape), 0, workers) for name, shape in shapes.items()]
    return Exchange([bind(codec, spec) for spec in specs]).traffic.wire
