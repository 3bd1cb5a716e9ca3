"""Parameter servers: workers of unequal speed, or on slow links, send gradients to them instead of to each other.

The shards' rules (`Shard`, `Rules`) know nothing of processes; `hybridpar train --sync ps|ps-async|softsync:N` runs
shards on processes.
"""

from hybridpar.server.encoding import PushDecoder, PushEncoder
from hybridpar.server.rules import Rules
from hybridpar.server.shard import Answer, Push, Shard
from hybridpar.server.staleness import SCALES, StalenessHistogram
from hybridpar.server.stripe_optimizer import described_parameters, optimizer_of
from hybridpar.server.stripes import Piece, Stripe, cut_model

__all__ = [
    "SCALES",
    "Answer",
    "Piece",
    "Push",
    "PushDecoder",
    "PushEncoder",
    "Rules",
    "Shard",
    "StalenessHistogram",
    "Stripe",
    "cut_model",
    "described_parameters",
    "optimizer_of",
]
