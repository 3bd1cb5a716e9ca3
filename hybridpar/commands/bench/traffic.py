"""Bytes that a codec sends for a model, computed from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hybridpar.compress import Codec, ErrorFeedback, Exchange, TensorSpec, bind


def wire_bytes(codec: Codec, shapes: Mapping[str, Sequence[int]], workers: int) -> int:
    """Bytes that a worker sends in a step with all parameters in one message, warm-up steps aside.

    Args:
        codec: What they travel as.
        shapes: Of the parameters, by name.
        workers: How many there are.
    """
    codec = after_warmup(codec)
    specs = [TensorSpec(name, tuple(shape), 0, workers) for name, shape in shapes.items()]
    return Exchange([bind(codec, spec) for spec in specs]).traffic.wire


def after_warmup(codec: Codec) -> Codec:
    """The codec as it is when its first steps in full precision are over.

    Args:
        codec: The codec.
    """
    return dataclasses.replace(codec, warmup=0) if isinstance(codec, ErrorFeedback) else codec
