"""Command for all tables of gradient compression, losses included.

python -m benchmarks.sync.main --peers DIR                     # all tables, as root for the shaped links
python -m benchmarks.sync.main --table links --links 1gbit     # one of them
python -m benchmarks.sync.main --table auto                    # does auto take the fastest codec?
python -m benchmarks.sync.main --quick                         # small, and nothing is written: does it run?
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.rig.command import measure_in_ranks, run_command
from benchmarks.rig.network import LOOPBACK, Network, bits_per_second, missing, parse_link
from hybridpar.errors import UsageError
from hybridpar.planner.codecs import FIDELITIES, PROVEN

RESULTS = Path(__file__).parent / "results"

CODECS = (
    "onebit",
    "qsgd_mn:bits=3,meet=shard",
    "qsgd_mn:bits=4,meet=shard",
    "powersgd:rank=1",
    "powersgd:rank=2",
    "powersgd:rank=4",
    "twobit",
    "hylo",
    "fp16",
)
BASELINES = ("none", "ddp", "ddp-fp16", "ddp-psgd1", "ddp-psgd4", "epfml-psgd1", "epfml-psgd4")
FIELD = (
    *("grace-qsgd", "grace-onebit", "grace-topk", "grace-terngrad"),
    *("seed-qsgdmax6", "seed-twoscale", "seed-randk"),
)
#: Two ranks of a slow link: everything. Four ranks on two cores, and a link without a limit: what is judged there.
FEW = ("own:onebit", "own:qsgd_mn:bits=4,meet=shard", "own:powersgd:rank=1", "own:powersgd:rank=4", "hook:onebit")
OTHER_PLACES = {
    (LOOPBACK, 2): (*BASELINES, "own:auto", "own:none", *FEW),
    ("1gbit", 4): ("none", "ddp", "ddp-fp16", "ddp-psgd1", "epfml-psgd4", *FEW),
}
#: What `--compress auto --fidelity lossy` is called, and what it chooses from.
AUTO, AMONG = "own:auto:lossy", tuple(f"own:{text}" for text in ("none", *FIDELITIES["lossy"]))
#: The check of `auto`: what is measured where. In full precision a step takes half a minute on the slowest.
AUTO_LINKS = {
    "1gbit": (*AMONG, AUTO),
    "100mbit": (*AMONG, AUTO),
    "10mbit+50ms": (*(f"own:{text}" for text in PROVEN), AUTO),
}
QUICK = ("none", "ddp", "ddp-fp16", "ddp-psgd1", "own:auto", "own:onebit", "hook:powersgd:rank=1")
#: Fewer rounds where the slowest peers take seconds for a step; the rig wants at least 20.
ROUNDS = {1e8: 20}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure compressed gradient exchange against what others offer."""

    table: Literal["links", "loss", "codecs", "auto", "all"] = "all"
    """Steps on links, losses after 100 steps, codecs on one core; `auto`, not in `all`: what `--compress auto
    --fidelity lossy` chooses on three links, beside steps with all that it chooses from."""
    links: tuple[str, ...] = (LOOPBACK, "1gbit", "1gbit:4", "100mbit")
    """Links as `benchmarks/README.md` tells, and after a colon what they join where it is not 2 ranks: 4, or 2x4."""
    methods: tuple[str, ...] = ()
    """Only these methods; their names are told in benchmarks/sync/methods.py."""
    codecs: tuple[str, ...] = CODECS
    """Codecs of ours, as `--compress` takes them; each through the trainer, the first and PowerSGD through the hook."""
    model: str = "resnet18"
    """Of torchvision, for `links`."""
    size: int = 32
    """Rows and columns of an image, for `links`."""
    peers: Path | None = None
    """Folder with checkouts of the peers; see benchmarks/sync/peers.py. Without it they have no rows."""
    rounds: int | None = None
    """Rounds to keep; default 30, and 20 on 100 Mbit/s."""
    seeds: int = 5
    """Seeds of the losses. A method that the table has with as many is not trained again."""
    quick: bool = False
    """Small settings, busy rounds kept, nothing written."""
    keep_busy: bool = False
    """Keep rounds in which others used the machine; rows then say `loaded`."""
    output: Path = RESULTS
    """Folder of the tables to add rows to."""


def main(options: Options) -> int:
    """Take every table that is asked for."""
    _check(options)
    if options.table == "auto":
        for link, names in AUTO_LINKS.items():
            _links(replace(options, links=(link,), methods=options.methods or names))
    for name, start in (("codecs", _throughput), ("loss", _loss), ("links", _links)):
        if options.table in (name, "all"):
            start(options)
    return 0


def methods_at(options: Options, link: str, ranks: int) -> list[str]:
    """Names of the methods that are measured somewhere, in the table's order."""
    if options.methods:
        return list(options.methods)
    if options.quick:
        return list(QUICK)
    if options.codecs == CODECS and (link, ranks) in OTHER_PLACES:
        return list(OTHER_PLACES[link, ranks])
    hooked = [codec for codec in options.codecs if codec == options.codecs[0] or codec.startswith("powersgd")]
    lanes = [f"own:{codec}@{count}" for codec in options.codecs[:1] for count in (1, 4)]
    ours = [*(f"own:{codec}" for codec in options.codecs), *lanes, *(f"hook:{codec}" for codec in hooked)]
    return [*BASELINES, *FIELD, *ours] if ranks == 2 else [*BASELINES, *ours]


def place_of(text: str) -> tuple[str, int, int]:
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


def _check(options: Options) -> None:
    from benchmarks.sync.methods import codec_of
    from hybridpar.compress.policy import read_policy

    for link in options.links:
        place_of(link)
    named = [codec for codec in map(codec_of, options.methods) if codec is not None]
    for codec in (*options.codecs, *named):
        if codec.partition(":")[0] != "auto":
            read_policy(codec)


def _links(options: Options) -> None:
    from benchmarks.sync.peers import checkouts

    commits = checkouts(options.peers)
    for rate, ranks, per_node in map(place_of, options.links):
        if rate != LOOPBACK and (lack := missing()):
            print(f"{rate}, {ranks} ranks: skipped, {lack}")
            continue
        told = {
            "methods": _measurable(options, methods_at(options, rate, ranks), ranks, f"{rate}, {ranks} ranks"),
            "model": options.model,
            "size": options.size,
            "rounds": options.rounds or (20 if options.quick else ROUNDS.get(bits_per_second(rate) or 0.0, 30)),
            "keep_busy": options.keep_busy or options.quick,
            "output": None if options.quick else str(options.output.resolve()),
            "peers": str(options.peers.resolve()) if options.peers else None,
            "commits": commits,
        }
        with Network(ranks, rate, per_node) as network:
            _start("links", network, options, told)


def _loss(options: Options) -> None:
    names = list(options.methods or (QUICK if options.quick else (*BASELINES[1:], *FIELD)))
    if not options.methods and not options.quick:
        names += [f"own:{codec}" for codec in options.codecs]
    told = {
        "methods": [name for name in _measurable(options, names, 2, "losses") if name not in ("none", "own:auto")],
        "seeds": 1 if options.quick else options.seeds,
        "output": None if options.quick else str(options.output.resolve()),
        "peers": str(options.peers.resolve()) if options.peers else None,
    }
    with Network(2, LOOPBACK) as network:
        _start("losses", network, options, told)


def _throughput(options: Options) -> None:
    from benchmarks.sync.throughput import measure

    measure(options.quick, None if options.quick else str(options.output / "codecs.csv"))


def _measurable(options: Options, names: list[str], ranks: int, where: str) -> list[str]:
    """Without those that cannot be measured, of which one line tells."""
    from benchmarks.sync.peers import checkouts, missing_peers

    lacking = missing_peers(names, checkouts(options.peers), ranks)
    for why in dict.fromkeys(lacking.values()):
        print(f"{where}: no rows for {', '.join(name for name in lacking if lacking[name] == why)}: {why}")
    return [name for name in names if name not in lacking]


def _start(module: str, network: Network, options: Options, told: dict[str, Any]) -> None:
    """Start `benchmarks.sync.MODULE.measure` in every rank of a network."""
    measure_in_ranks(network, f"benchmarks.sync.{module}", {"quick": options.quick, **told}, timeout=5400)


if __name__ == "__main__":
    run_command(main, Options)
