"""Gradient codecs, error feedback and their exchange, for any training loop.

A step of it::

    codec = parse_codec("onebit:decay=0.9,warmup=20")
    coders = [codec.bind(TensorSpec(name, (*p.shape,), rank, workers)) for name, p in model.named_parameters()]
    exchange = Exchange(coders)
    exchange.run(TorchGroup(), gradients, gradients)   # flat float32 gradients become their mean over the workers
    exchange.commit()                                  # only where the step counts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridpar.registry import lazy_names

if TYPE_CHECKING:
    from hybridpar.comm.group import Group as Group
    from hybridpar.comm.group import TorchGroup as TorchGroup
    from hybridpar.compress.codec import CODECS as CODECS
    from hybridpar.compress.codec import Codec as Codec
    from hybridpar.compress.codec import Coder as Coder
    from hybridpar.compress.codec import Collective as Collective
    from hybridpar.compress.codec import Round as Round
    from hybridpar.compress.codec import TensorSpec as TensorSpec
    from hybridpar.compress.exchange import Exchange as Exchange
    from hybridpar.compress.exchange import PhaseTimer as PhaseTimer
    from hybridpar.compress.exchange import Traffic as Traffic
    from hybridpar.compress.policy import Policy as Policy
    from hybridpar.compress.policy import check_optimizer as check_optimizer
    from hybridpar.compress.policy import format_codec as format_codec
    from hybridpar.compress.policy import parse_codec as parse_codec
    from hybridpar.compress.policy import read_policy as read_policy

_MODULES = {
    "hybridpar.comm.group": "Group TorchGroup",
    "codec": "CODECS Codec Coder Collective Round TensorSpec",
    "exchange": "Exchange PhaseTimer Traffic",
    "policy": "Policy check_optimizer format_codec parse_codec read_policy",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULES)
