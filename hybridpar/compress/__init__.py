"""Gradient codecs, error feedback and their exchange, for any training loop.

A step of it::

    codec = parse_codec("onebit:decay=0.9,warmup=20")
    coders = [bind(codec, TensorSpec(name, (*p.shape,), rank, workers)) for name, p in model.named_parameters()]
    exchange = Exchange(coders)
    exchange.run(TorchGroup(), gradients, gradients)   # flat float32 gradients become their mean over the workers
    exchange.commit()                                  # only where the step counts
"""

from hybridpar.comm.group import Group, TorchGroup
from hybridpar.compress.codec import CODECS, Codec, Coder, Collective, Round, TensorSpec
from hybridpar.compress.codecs.none import Cast
from hybridpar.compress.exchange import Exchange, PhaseTimer, Traffic
from hybridpar.compress.feedback import ErrorFeedback
from hybridpar.compress.policy import Policy, bind, check_optimizer, format_codec, parse_codec, read_policy

__all__ = [
    "CODECS",
    "Cast",
    "Codec",
    "Coder",
    "Collective",
    "ErrorFeedback",
    "Exchange",
    "Group",
    "PhaseTimer",
    "Policy",
    "Round",
    "TensorSpec",
    "TorchGroup",
    "Traffic",
    "bind",
    "check_optimizer",
    "format_codec",
    "parse_codec",
    "read_policy",
]
