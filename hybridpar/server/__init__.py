"""Parameter servers: workers of unequal speed, or on slow links, send gradients to them instead of to each other.

The shards' rules (`Shard`, `Rules`) know nothing of processes; `hybridpar train --sync ps|ps-async|softsync:N` runs
shards on processes.
"""

from hybridpar.server.rules import SCALES, Rules
from hybridpar.server.shard import Push, Shard
from hybridpar.server.stripes import cut_model

__all__ = ["SCALES", "Push", "Rules", "Shard", "cut_model"]
