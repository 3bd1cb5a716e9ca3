"""Why: with servers nobody waits for everybody, so the loop of a run is another one, though what it leaves is the same.

Every worker computes gradients until the servers have taken in as many as the run is to have; a *step* is as many as
there are workers, whoever they came from. Worker 0 tests, draws and writes, and learns from shard 0 what each step did.
Its own place can be taken by another process: what it must know is in the run directory and at shard 0.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridpar.checkpoint import load_checkpoint, prune_checkpoints
from hybridpar.compress import check_optimizer, read_policy
from hybridpar.config import TrainConfig
from hybridpar.data import Batch, ImageData, TestBatches, TrainBatches, load_dataset
from hybridpar.errors import CheckpointError, SyncError, UsageError
from hybridpar.evaluation import Evaluation, evaluate
from hybridpar.launch import StopRequest, leave_verdict
from hybridpar.models import build_model, model_fingerprint, parameter_count
from hybridpar.observe import (
    EpochRecord,
    MetricsWriter,
    Progress,
    RunInfo,
    StepRecord,
    draw_loss,
    draw_staleness,
    open_progress,
    print_report,
    read_metrics,
    summarize,
    write_summary,
)
from hybridpar.observe.files import replace_file
from hybridpar.optim import build_optimizer, load_optimizer_state, rate_factor
from hybridpar.pipeline.world import World, default_device
from hybridpar.plan import ModelInfo, trivial_plan
from hybridpar.run_server_state import ServedState, load_position, position_of
from hybridpar.rundir import RunPlace, claim_place, find_place
from hybridpar.save_rule import SaveRule
from hybridpar.server.learner import Exchanged, Learner
from hybridpar.server.link import LinkOptions, Links, ShardLink
from hybridpar.server.optimize import described_parameters
from hybridpar.server.place import Place, find_own_place
from hybridpar.server.present import exchange
from hybridpar.server.process import OwnShard, serve_shard
from hybridpar.server.encoding import PushEncoder
from hybridpar.server.rules import Rules
from hybridpar.server.staleness import StalenessHistogram
from hybridpar.server.stripes import cut_model, piece_views, trained_parameters
from hybridpar.worker import device_name, tune_worker


def run_served(config: TrainConfig, model_name: str) -> int:
    """Train on this worker, or serve on this server, until the run is finished or interrupted.

    Returns:
        0, or 130 or 143 where a signal stopped the run and no launcher reports it.

    Raises:
        HybridparError: Whatever ends the run before its time.
    """
    try:
        rule = SaveRule.parse(config.checkpoint_every)
        place = find_own_place(config, config.timeout)
        config.split_count(place.workers)
        if not place.is_worker:
            with _ignoring_signals():
                serve_shard(config, place)
            return 0
        with contextlib.ExitStack() as stack:
            run = ServedRun(config, model_name, place, rule)
            if place.servers == 0:
                stack.enter_context(OwnShard(config, place))
            return run.execute()
    except BaseException as error:
        leave_verdict(error, debug=config.debug)  # before the peers notice that this process is gone
        raise


@contextlib.contextmanager
def _ignoring_signals() -> Iterator[None]:
    """A server ends when the workers have ended; until then they need it to save."""
    stop = StopRequest()
    try:
        yield
    finally:
        stop.release()


@dataclass
class _Times:
    """One value per push of this worker."""

    compute_ms: list[float] = field(default_factory=list)
    exposed_ms: list[float] = field(default_factory=list)
    data_ms: list[float] = field(default_factory=list)
    pushed: list[float] = field(default_factory=list)
    pulled: list[float] = field(default_factory=list)

    def add(self, result: Exchanged, data_ms: float) -> None:
        """Take in a push."""
        self.compute_ms.append(result.compute_ms)
        self.exposed_ms.append(result.exposed_ms)
        self.data_ms.append(data_ms)
        self.pushed.append(result.pushed)
        self.pulled.append(result.pulled)

    def medians(self) -> dict[str, float]:
        """Without the first three, where there are others."""
        known = {name: values[3:] or values for name, values in vars(self).items()}
        return {name: statistics.median(values) for name, values in known.items() if values}


class ServedRun:
    """One worker's part of a run with servers.

    Args:
        config: Options.
        model_name: What the user calls the model.
        place: What this process is.
        rule: When to save.
    """

    def __init__(self, config: TrainConfig, model_name: str, place: Place, rule: SaveRule) -> None:
        self.config, self.model_name, self.place, self.rule = config, model_name, place, rule
        self.worker, self.workers = place.rank, place.workers
        self.is_main = self.worker == 0
        self.barrier = Rules.of(config, self.workers).barrier
        self.device = default_device()
        tune_worker(config, World(device=self.device))
        data = self._load_data()
        self.sample_shape = data.sample_shape
        common: dict[str, Any] = {
            "loader_workers": config.loader_workers,
            "device": self.device,
            "channels_last": config.uses_channels_last,
        }
        self.batches = TrainBatches(
            data,
            seed=config.seed,
            batch_size=config.batch_size,
            rank=self.worker,
            workers=self.workers,
            micro_batches=config.micro_batches,
            **common,
        )
        # Where nobody waits, worker 0 tests alone while the others go on.
        parts = (self.worker, self.workers) if self.barrier else (0, 1)
        size = max(2, config.batch_size // self.workers)
        self.test = TestBatches(data, batch_size=size, rank=parts[0], workers=parts[1], **common)
        self.per_epoch = self.batches.steps_per_epoch
        self.total = config.steps if config.steps is not None else config.epochs * self.per_epoch
        torch.manual_seed(config.seed)
        self.model = build_model(model_name, data.classes, stem=config.stem).to(self.device)
        if config.uses_channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.fingerprint = model_fingerprint(self.model)
        self.policy = read_policy(config.compress)
        self.policy.check(list(trained_parameters(self.model)))
        for compression in self.policy.rules:
            check_optimizer(compression.codec, build_optimizer(self.model, config))
        self.stripes = cut_model(described_parameters(self.model), place.shards)
        self.loss = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
        torch.manual_seed(config.seed * 1000 + 1 + self.worker)
        self.times = _Times()
        self.own_steps = 0
        self.step = 0
        self.best: tuple[float, int] | None = None
        self.resumed_from: int | None = None
        self._saved: object = None
        self._sound = True
        self._wish = False
        self._last_save = time.monotonic()
        self._epoch_started, self._losses = time.monotonic(), list[tuple[float, int]]()

    def _load_data(self) -> ImageData:
        """Load the data set; where it may be downloaded, worker 0 goes first."""
        if self.config.download and self.workers > 1:
            if self.is_main:
                data = load_dataset(self.config)
                self.place.store.set("data", "there")
                return data
            self.place.wait_for("data", 3600.0)
        return load_dataset(self.config)

    # ------------------------------------------------------------------- start

    def _open_links(self) -> Links:
        config = self.config
        tensors = self._host_tensors()
        coded = not self.policy.changes_nothing
        links = []
        for number, (address, token) in enumerate(self.place.find(config.timeout)):
            stripe = self.stripes[number]
            options = LinkOptions(
                worker=self.worker,
                shards=self.place.shards,
                fingerprint=self.fingerprint,
                policy=str(self.policy),
                token=token,
                timeout=config.timeout,
                half=config.pull == "fp16",
                returns=not self.barrier,
            )
            encoder = PushEncoder(self.policy, stripe) if coded else None
            links.append(ShardLink(number, address, stripe, piece_views(stripe, tensors), encoder, options))
        return Links(links)

    def _host_tensors(self) -> dict[str, torch.Tensor]:
        """Where weights arrive: in the parameters, or beside those of a GPU."""
        parameters = trained_parameters(self.model)
        if self.device.type == "cpu":
            return {name: own.data for name, own in parameters.items()}
        return {name: torch.empty_like(own.data, device="cpu").pin_memory() for name, own in parameters.items()}

    def _begin(self, links: Links) -> Path:
        """Come to the shards, bring them the weights if they have none, and find out where the run stands.

        Returns:
            The run directory.
        """
        run_place = find_place(self.config, self.model_name) if self.is_main else None
        rows = 0
        if run_place is not None and self.place.joins:
            rows = _last_step(run_place.directory)
        welcome = links.hello(sum(b.numel() for b in self.model.buffers() if b.is_floating_point()), rows if self.is_main else None)
        if run_place is not None and not all(one["initialised"] for one in welcome):
            run_place = self._bring_weights(links, run_place)
        elif run_place is not None:
            self.best = _best_of(run_place.directory)
            self.resumed_from = rows or None
        facts = links.links[0].unpack_rest()
        self.state.take_over(links)
        self.step = int(facts["step"]) if self.barrier or not self.place.joins else int(welcome[0]["step"])
        self.own_steps = self.step
        if facts["checkpoint"] is not None and not self.place.joins:
            self.own_steps = load_position(Path(facts["checkpoint"]), self, links) or self.step
        return Path(facts["directory"])

    def _bring_weights(self, links: Links, place: RunPlace) -> RunPlace:
        """Worker 0: the weights at the start, or those of the checkpoint that the run goes on from."""
        optimizer: dict[str, Any] | None = None
        progress: list[dict[str, Any]] = []
        step = clock = 0
        if place.checkpoint is not None:
            data = load_checkpoint(place.checkpoint)
            extra = position_of(self.config, data, place.checkpoint, self.fingerprint)
            self.model.load_state_dict(data.model)
            load_optimizer_state(build_optimizer(self.model, self.config), self.model, data.training["optimizer"])
            optimizer = data.training["optimizer"]
            step = clock = self.resumed_from = data.step
            known = data.training.get("server", {})
            progress = known.get("shards", [])
            clock = max((int(one["clock"]) for one in progress), default=step)
            self.best = (extra["best_accuracy"], extra["best_step"]) if extra["best_step"] is not None else None
        place = claim_place(place, self.config, self.model_name, {"torch": torch.__version__})
        facts = {
            "directory": str(place.directory),
            "checkpoint": None if place.checkpoint is None else str(place.checkpoint),
            "step": step,
        }
        starts = self.state.starts(
            limit=self.total * self.workers,
            optimizer=optimizer,
            progress=progress,
            taken=step * self.workers,
            clock=clock,
            facts=facts,
        )
        links.initialise(starts)
        return place
