"""Parameter servers: workers of unequal speed, or on slow links, send gradients to them instead of to each other.

The shards' rules (`Shard`, `Rules`) know nothing of processes; `hybridpar train --sync ps|ps-async|softsync:N` runs
shards on processes.
"""

from hybridpar.server.encoding import PushDecoder, PushEncoder
from hybridpar.server.ledger import Push
from hybridpar.server.rules import SCALES, Rules
from hybridpar.server.shard import Answer, Shard
from hybridpar.server.stripes import Piece, Stripe, cut_model, described_parameters

__all__ = [
    "SCALES",
    "Answer",
    "Piece",
    "Push",
    "PushDecoder",
    "PushEncoder",
    "Rules",
    "Shard",
    "Stripe",
    "cut_model",
    "described_parameters",
]
