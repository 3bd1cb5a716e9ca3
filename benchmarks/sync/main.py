"""Command for all tables of gradient compression, losses included.

python -m benchmarks.sync.main --peers DIR                     # all tables, as root for the shaped links
python -m benchmarks.sync.main --table links --links 1gbit     # one of them
python -m benchmarks.sync.main --quick                         # small, and nothing is written: does it run?
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.rig.launch import measure_in_ranks, possible_links, run_command
from benchmarks.rig.network import LOOPBACK, Network, bits_per_second, parse_link
from benchmarks.sync.methods import codec_of
from benchmarks.sync.peers import checkouts, missing_peers
from hybridpar.compress.policy import read_policy
from hybridpar.errors import UsageError

BASELINES = ("none", "ddp", "ddp-fp16", "ddp-psgd1", "ddp-psgd4", "epfml-psgd1", "epfml-psgd4")
FIELD = (
    *("grace-qsgd", "grace-onebit", "grace-topk", "grace-terngrad"),
    *("seed-qsgdmax6", "seed-twoscale", "seed-randk"),
)
CODECS = (
    *("own:onebit", "own:qsgd_mn:bits=3,meet=shard", "own:qsgd_mn:bits=4,meet=shard", "own:powersgd:rank=1"),
    *("own:powersgd:rank=2", "own:powersgd:rank=4", "own:twobit", "own:hylo", "own:fp16"),
)
HOOKS = ("hook:onebit", "hook:powersgd:rank=1", "hook:powersgd:rank=2", "hook:powersgd:rank=4")
#: Two ranks of a slow link: everything. Four ranks on two cores, and a link without a limit: what is judged there.
ALL = (*BASELINES, *FIELD, *CODECS, "own:onebit@1", "own:onebit@4", *HOOKS)
FEW = ("own:onebit", "own:qsgd_mn:bits=4,meet=shard", "own:powersgd:rank=1", "own:powersgd:rank=4", "hook:onebit")
OTHER_METHODS = {
    (LOOPBACK, 2): (*BASELINES, "own:none", *FEW),
    ("1gbit", 4): ("none", "ddp", "ddp-fp16", "ddp-psgd1", "epfml-psgd4", *FEW),
}
QUICK = ("none", "ddp", "ddp-fp16", "ddp-psgd1", "own:onebit", "hook:powersgd:rank=1")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure compressed gradient exchange against what others offer."""

    table: Literal["links", "loss", "all"] = "all"
    """Steps on links, and losses after 100 steps."""
    links: tuple[str, ...] = (LOOPBACK, "1gbit", "1gbit:4", "100mbit")
    """Links as in `benchmarks/README.md`, and after a colon what they join where it is not 2 ranks: 4, or 2x4."""
    methods: tuple[str, ...] = ()
    """Only these methods; their names are explained in benchmarks/sync/methods.py."""
    model: str = "resnet18"
    """Of torchvision, for `links`."""
    size: int = 32
    """Rows and columns of an image, for `links`."""
    peers: Path | None = None
    """Folder with checkouts of the peers; see benchmarks/sync/peers.py. Without it they have no rows."""
    rounds: int | None = None
    """Rounds to keep; default 30, and 20 where the slowest peers take seconds for a step, below 1 Gbit/s."""
    seeds: int = 5
    """Seeds of the losses. A method that the table has with as many is not trained again."""
    quick: bool = False
    """Small settings, busy rounds kept, nothing written."""
    keep_busy: bool = False
    """Keep rounds in which others used the machine; rows then say `loaded`."""
    output: Path = Path(__file__).parent / "results"
    """Folder of the tables to add rows to."""


def main(options: Options) -> None:
    """Take every table that is asked for."""
    for codec in filter(None, map(codec_of, options.methods)):
        read_policy(codec)
    layouts = {text: parse_layout(text) for text in options.links}
    if options.table in ("loss", "all"):
        names = options.methods or (QUICK if options.quick else (*BASELINES, *FIELD, *CODECS))
        with Network(2, LOOPBACK) as network:
            arguments: dict[str, Any] = {
                "seeds": 1 if options.quick else options.seeds,
                "output": _file(options, "loss"),
            }
            arguments["methods"] = [name for name in _measurable(options, names, 2) if name != "none"]
            arguments |= {"quick": options.quick, "peers": options.peers}
            measure_in_ranks(network, "benchmarks.sync.losses", arguments, timeout=5400)
    for link, ranks, per_node in layouts.values() if options.table in ("links", "all") else ():
        names = options.methods or (QUICK if options.quick else OTHER_METHODS.get((link, ranks), ALL))
        is_slow = options.quick or (bits_per_second(link) or 1e9) < 1e9
        for possible in possible_links([link]):
            with Network(ranks, possible, per_node) as network:
                arguments = {
                    "quick": options.quick,
                    "methods": _measurable(options, names, ranks),
                    "model": options.model,
                    "size": options.size,
                    "rounds": options.rounds or (20 if is_slow else 30),
                    "keep_busy": options.keep_busy or options.quick,
                    "output": _file(options, "links"),
                    "peers": options.peers,
                }
                measure_in_ranks(network, "benchmarks.sync.links", arguments, timeout=5400)


def parse_layout(text: str) -> tuple[str, int, int]:
    """A link, its number of ranks, and how many of them share a node.

    `1gbit:4` is a link of 1 Gbit/s for each of 4 ranks, and `1gbit:2x4` for each of 2 nodes of 4 ranks; without a
    number there are 2 ranks.

    Raises:
        UsageError: It is no link, or no number of ranks.
    """
    rate, colon, layout = text.partition(":")
    parse_link(rate)
    match = re.fullmatch(r"([2-8])(?:x([1-4]))?", layout if colon else "2")
    if match is None or (ranks := int(match[1]) * int(match[2] or 1)) > 8:
        raise UsageError(f"{layout!r} ranks in {text!r}", "There are 2 to 8.", f"Try {rate}:4 or {rate}:2x2.")
    return rate, ranks, int(match[2] or 1)


def _file(options: Options, table: str) -> Path | None:
    return None if options.quick else options.output / f"{table}.csv"


def _measurable(options: Options, names: Sequence[str], ranks: int) -> list[str]:
    """Without those that cannot be measured here; a line says why."""
    lacking = missing_peers(names, checkouts(options.peers), ranks)
    for why in dict.fromkeys(lacking.values()):
        print(f"no rows for {', '.join(name for name in lacking if lacking[name] == why)}: {why}")
    return [name for name in names if name not in lacking]


if __name__ == "__main__":
    run_command(main, Options)
