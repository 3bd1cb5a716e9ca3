"""Which choices of a plan the options of a run make, so that they are not searched for.

`Fixed` is a part of what a search reads, so that the same options give the same plan again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hybridpar.compress import read_policy
from hybridpar.config import TrainConfig
from hybridpar.config.sync import AllReduce


@dataclass(frozen=True)
class Fixed:
    """What is decided; None leaves it to the search.

    Attributes:
        workers: Workers that are used, neither more nor fewer.
        stages: Stages of the model.
        replicas: Copies of the pipeline.
        micro_batches: Per replica and step, also where layers normalise over a micro-batch.
        schedule: Order of the passes, where there are several stages.
        placement: How stages are dealt out to lanes, likewise.
        codecs: Codec of each parameter; the gradients of others are sent as they are.
        every_step: Gradients are exchanged in every step: options were given that an outer loop does not know.
        exchanged: Only plans with several replicas: something was asked for that acts on what replicas exchange.
        staged: Only plans with several stages: something was asked for that acts on stages.
        equal: Replicas have equal numbers of workers: options were given that need it.
        shard_optimizer: Whether replicas divide the optimizer's state; None where memory may decide.
    """

    workers: int | None = None
    stages: int | None = None
    replicas: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    placement: Literal["linear", "loop", "v"] | None = None
    codecs: Mapping[str, str] | None = None
    every_step: bool = False
    exchanged: bool = False
    staged: bool = False
    equal: bool = False
    shard_optimizer: bool | None = None


def decided_options(config: TrainConfig) -> frozenset[str]:
    """The options that the user set: those that were named, and those that are not at their default."""
    left = set()
    if config.searches:  # `auto` of a single option leaves it to the search
        left = {name for name in ("compress", "memory_format") if getattr(config, name) == "auto"}
    return config.named - left


def needs_replicas(config: TrainConfig, named: Collection[str]) -> str:
    """The named option that acts on what replicas exchange, so that it does nothing with one; empty where none does."""
    asked = {
        f"--compress {config.compress}": "compress" in named
        and not config.chooses
        and not read_policy(config.compress).changes_nothing,
        f"--sync {config.sync}": "sync" in named
        and (config.outer is not None or config.late != "off" or config.is_onebit),
        "--shares auto": "shares" in named and config.shares.strip() == "auto",
        "--batch-norm sync": "batch_norm" in named and config.batch_norm == "sync",
        "--shard-optimizer": "shard_optimizer" in named and config.shard_optimizer,
    }
    return next((option for option, set_ in asked.items() if set_), "")


def needs_stages(config: TrainConfig, named: Collection[str]) -> str:
    """The named option that acts on stages, so that it does nothing for a whole model; empty where none does."""
    asked = {
        f"--schedule {config.schedule}": "schedule" in named and config.schedule is not None,
        f"--placement {config.placement}": "placement" in named and config.placement is not None,
        f"--recompute {' '.join(map(str, config.recompute))}": "recompute" in named and bool(config.recompute),
        f"--offload {' '.join(map(str, config.offload))}": "offload" in named and bool(config.offload),
    }
    return next((option for option, set_ in asked.items() if set_), "")


def fixed_by(
    config: TrainConfig, decided: Collection[str], workers: int, names: Sequence[str], named: Collection[str] = ()
) -> Fixed:
    """What options leave to the search, and what not."""
    shape = ("stages", "replicas", "micro_batches", "schedule", "placement")
    chosen = {option: getattr(config, option) for option in shape if option in decided}
    codecs, is_captured = None, config.cuda_graph == "on"
    if "compress" in decided and not config.chooses:
        policy = read_policy(config.compress)
        codecs = {name: text for name in names if (text := policy.text_of(name)) != "none"}
    # A step of such an optimizer depends on all parameters together, which a part of them does not tell.
    looks_at_all = config.optim.name.startswith(("timm/lamb", "timm/kron"))
    return Fixed(
        workers=workers,
        codecs=codecs,
        every_step="sync" in decided or codecs is not None or is_captured or config.shares.strip() != "equal",
        exchanged=bool(needs_replicas(config, named)),
        staged=bool(needs_stages(config, named)),
        equal=not config.may_be_unequal,
        shard_optimizer=config.shard_optimizer if "shard_optimizer" in decided or looks_at_all else None,
        **chosen,
    )


def not_modelled(config: TrainConfig) -> str:
    """An option that the simulator knows nothing of, so that a prediction would be wrong; empty where there is none."""
    reasons = {
        "--recompute": bool(config.recompute),
        "--offload": bool(config.offload),
        "--cuda-graph on": config.cuda_graph == "on",
        f"--placement {config.placement}": config.layout is not None,
        "--batch-norm sync": config.batch_norm == "sync",
        f"--sync {config.sync}": type(config.sync_mode) is not AllReduce or config.late != "off",
        f"--select-batch {config.select_batch}": bool(config.select_batch),
        f"--kernels {config.kernels}": config.kernels.strip() not in ("off", "auto"),
    }
    return next((option for option, set_ in reasons.items() if set_), "")
