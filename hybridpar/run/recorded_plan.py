"""The plan of a run: what it does, with what was predicted for it, so that another run can do the same."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridpar.compress import format_codec
from hybridpar.config import TrainConfig
from hybridpar.config.sync import Exchange
from hybridpar.plan import ResolvedPlan, SyncRule
from hybridpar.spec import with_options
from hybridpar.sync.compression_table import WireFormat
from hybridpar.train.trainer import Trainer


def plan_of_run(trainer: Trainer, device: str, wire_format: WireFormat) -> ResolvedPlan:
    """The plan of a run as it is written down."""
    plan, rules = trainer.plan, wire_format.applied.rules
    update: dict[str, object] = {}
    if plan.inputs is None:  # a search has said of every parameter what it is sent as
        policy = tuple(SyncRule(pattern=rule.pattern, codec=format_codec(rule.codec)) for rule in rules)
        update["sync"] = plan.sync.model_copy(update={"policy": policy})
    if plan.measured.profile is None:  # else it says what the times of stages are from, which may be another machine
        here = {"device": device, "threads": torch.get_num_threads(), "versions": {"torch": torch.__version__}}
        update["measured"] = plan.measured.model_copy(update=here)
    return plan.model_copy(update=update)


def sync_of(config: TrainConfig, plan: ResolvedPlan) -> str:
    """How replicas are kept in step, as `--sync` takes it."""
    outer = plan.sync.outer is not None and config.outer is None
    return f"outer:{plan.sync.outer}" if outer else config.sync.strip()


def as_asked(config: TrainConfig, plan: ResolvedPlan) -> TrainConfig:
    """The options of a run as a resumed run is to recall them, which does not recall a plan's file.

    Workers join by what the file says of the exchange, before they can read the run's own plan.
    """
    if config.plan_file is None:
        return config
    sync = plan.sync
    return replace(
        config,
        sync=with_options(sync_of(config, plan), lanes=None if sync.lanes == Exchange().lanes else sync.lanes),
        batch_norm=sync.batch_norm,
        compress=sync.codec,
        shard_optimizer=sync.shard_optimizer,
    )
