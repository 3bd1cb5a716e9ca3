"""A trainer whose gradients go to parameter servers, and what of its state is where.

Servers hold weights, momentum and clocks; each worker its position in the data, its random numbers and the residuals of
its codecs. Worker 0 brings the servers their first state, and asks them for it when a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.compress import check_optimizer, read_policy
from hybridpar.config import TrainConfig
from hybridpar.models import learning_rate_scales, model_fingerprint
from hybridpar.models.state import twin_of
from hybridpar.models.state_dicts import copy_of, load_values
from hybridpar.observe.metrics import read_metrics
from hybridpar.optim.build import build_optimizer
from hybridpar.plan import ResolvedPlan
from hybridpar.planner.planned_run import PlannedRun
from hybridpar.planner.resolve import resolve
from hybridpar.run.best import keep_rule
from hybridpar.run.data import start_from_weights
from hybridpar.run.directory import RunPlace, claim_place, find_place
from hybridpar.run.position import Standing, plain_tests, read_tests
from hybridpar.server.checkpoints import merged_states, shard_starts
from hybridpar.server.clipping import Clipping
from hybridpar.server.engine import ServedEngine
from hybridpar.server.gradients import Servers
from hybridpar.server.link import LinkOptions, Links
from hybridpar.server.place import Place
from hybridpar.server.present import PresentWorkers
from hybridpar.server.running import flat_buffers, put_buffers
from hybridpar.server.stripe_optimizer import described_parameters, needs_whole_parameters
from hybridpar.server.stripes import cut_model, trained_parameters
from hybridpar.server.wire import Start, Welcome
from hybridpar.train.checkpoint import load_checkpoint, usable
from hybridpar.train.checkpoint_files import latest_checkpoint
from hybridpar.train.engine import EngineParts
from hybridpar.train.step_result import StepResult
from hybridpar.train.trainer import Trainer


class ServedTrainer(Trainer):
    """One worker's part of a training with servers; `steps_done` are those of the servers."""

    engine: ServedEngine

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        process: Place,
        at: Standing,
        name: str,
        **known: Any,
    ) -> None:
        self._asked, self._process, self._at, self._name = config, process, at, name
        self.policy = read_policy(config.compress)
        self.policy.check(list(trained_parameters(model)))
        optimizer = build_optimizer(model, config)
        for entry in self.policy.rules:
            check_optimizer(entry.codec, optimizer)
        clipping, scales = Clipping.of(config, model, optimizer), None
        if config.scales_rates:
            scales = learning_rate_scales(model, config.layer_decay, config.head_lr_scale)
        described, whole = described_parameters(model, config.no_decay), needs_whole_parameters(config)
        self._stripes = cut_model(described, process.shards, scales, whole=whole)
        assert config.parameter_servers is not None
        self._barrier = config.parameter_servers.waits_for_all
        device = next(model.parameters()).device
        host = {
            name: held.data if device.type == "cpu" else torch.empty_like(held.data, device="cpu").pin_memory()
            for name, held in trained_parameters(model).items()
        }
        #: What became of the weights that the run started from; on worker 0, which brings them to the shards.
        self.weights_lines: list[str] = []
        self.links = self._open_links(model, host)
        self._servers = Servers(process.rank, self.links, host, self._barrier, clipping)
        # Workers in step all have the average, else worker 0 alone.
        ema = config.model_ema if self._barrier or process.rank == 0 else None
        alone = replace(config, sync="allreduce", compress="none", shares="equal", model_ema=ema)
        world = World(process.rank, process.workers, device, config.timeout)  # in which each is by itself
        super().__init__(model, config=alone, world=world, plan=PlannedRun(resolve(alone, 1)), **known)

    def _open_engine(self, optimizer: Any, plan: ResolvedPlan, example: Tensor | None) -> ServedEngine:
        self._channels_last, self.peak_rate = plan.channels_last, self.config.peak_lr
        world = World(device=self.world.device, timeout=self.config.timeout)
        parts = EngineParts(self.model, plan, None, _no_optimizer, self._loss, self.config, world, self.lanes)
        return ServedEngine(parts, self._servers)

    def _open_links(self, model: nn.Module, host: dict[str, Tensor]) -> Links:
        process, timeout = self._process, self._asked.timeout
        options = LinkOptions(
            *(process.rank, model_fingerprint(model), self.policy, process.token, timeout), returns=not self._barrier
        )
        return Links(process.find(timeout), self._stripes, host, options)

    def step(self, batch: Any, *, stop: bool = False, save: bool = False) -> StepResult:
        """Push the gradient of a batch; the weights are then those of the servers."""
        gradients = self.engine.gradients
        tells = self._plateau is not None and self._process.rank == 0 and not self._barrier
        gradients.lowered = self._plateau.factor if tells and self._plateau is not None else None
        result = super().step(batch, stop=stop, save=save)
        self.steps_done = gradients.answer.step
        self.hear(gradients.answer.lowered)
        return result

    def hear(self, lowered: float | None) -> None:
        """Follow what worker 0 says of learning rates, unless this worker decides itself: all that are in step do."""
        if self._plateau is not None and lowered is not None and not self._barrier and self._process.rank:
            self._plateau.load_state_dict({"lr": lowered * self.peak_rate})

    # ------------------------------------------------------------------- begin

    def begin(self, total: int, images: Mapping[str, Any] | None = None) -> None:
        """Connect to the servers, bring them the weights if they have none, and find out how far the run is."""
        main, joins, at = self._process.rank == 0, self._process.joins, self._at
        run = find_place(self._asked, self._name) if main else None
        written = _last_step(run.directory) if run is not None and joins else 0
        welcome = self.links.hello(flat_buffers(self.model).numel(), written if main else None)
        if main and any(known.values is None for known in welcome):
            welcome = self.links.start(self._starts(run, total, images), welcome)
        elif run is not None:
            at.tested, at.resumed_from = list(read_metrics(run.directory).epochs), written
        rest = welcome[0].rest
        facts = rest["facts"]
        at.directory = Path(facts["directory"])
        if not main:
            at.tested = read_tests(facts["best"])  # all must agree on what is worth a checkpoint
        self.model.load_state_dict(rest["tensors"], strict=False)
        self.engine.gradients.take_weights()
        checkpoint = None if facts["checkpoint"] is None else Path(facts["checkpoint"])
        if joins:
            self._follow_on(welcome[0], latest_checkpoint(at.checkpoints) or checkpoint)
        elif checkpoint is None:
            self.engine.load_average_state(self.model.state_dict())
        elif not main:
            came = copy_of(self.model.state_dict())  # other workers may have pushed since
            self.load(checkpoint)
            load_values(self.model, came)
        if self._barrier:
            known = range(self._process.workers), self.world.device, self._asked.timeout
            self.world = PresentWorkers(self.links, "run", self._process.rank, *known)

    def _follow_on(self, welcome: Welcome, checkpoint: Path | None) -> None:
        """In the stead of a worker that died: go on with the weights of now, and what a checkpoint says of all."""
        self.steps_done = welcome.step
        self.engine.load_average_state(self.model.state_dict())
        self.engine.go_on_from(welcome.step)
        if checkpoint is not None and (self.engine.averages or self._plateau is not None):
            with usable(checkpoint):
                data = load_checkpoint(checkpoint)
                if data.average is not None:
                    self.engine.load_average_state(data.average)
                    self.engine.go_on_from(data.step)
                if self._plateau is not None and (saved := data.training.get("plateau")) is not None:
                    self._plateau.load_state_dict(saved)
        self.engine.own_steps = welcome.step
        self.hear(welcome.lowered)

    def _starts(self, run: RunPlace | None, total: int, images: Mapping[str, Any] | None) -> list[Start]:
        """What shards begin with: weights at the start, or of the checkpoint that the run goes on from."""
        assert run is not None
        at, workers, progress = self._at, self._process.workers, []
        if run.checkpoint is not None:
            extra = self.load(run.checkpoint)
            with usable(run.checkpoint):
                at.go_on_from(extra, self._asked, run.checkpoint)
                at.resumed_from, progress = self.steps_done, extra.get("shards", [])
        else:
            self.weights_lines = start_from_weights(self._asked, self._name, self.model)
        run = claim_place(run, self._asked, self._name, {"torch": torch.__version__}, images=images)
        return shard_starts(
            self.model,
            self._stripes,
            limit=total * workers,
            optimizer=self.engine.saved[1],
            progress=progress,
            taken=self.steps_done * workers,
            clock=max((int(shard["clock"]) for shard in progress), default=self.steps_done),
            clipping=self._servers.clipping,
            facts={
                "directory": str(run.directory),
                "checkpoint": None if run.checkpoint is None else str(run.checkpoint),
                "best": plain_tests(keep_rule(self._asked).best(at.tested)),
            },
        )

    # -------------------------------------------------------------------- save

    def save_together(self, occasion: str, states: list[dict[str, Any]] | None, steps_per_epoch: int) -> Path | None:
        """Write a checkpoint, of what worker 0 heard from the servers; called by all workers on the same occasion."""
        at, usual = self._at, self.world
        taken = None if states is None else int(states[0]["taken"]) // self._process.workers
        items = self.links.gather(f"{occasion}/0", taken)
        if not isinstance(step := items.get(0), int):
            return None
        at.epoch, at.epoch_step = divmod(step, steps_per_epoch)
        extra = at.to_extra(self._asked)
        if states is not None:
            extra["shards"] = self._hold(states)
        self.steps_done = step
        self.world = PresentWorkers(
            self.links, occasion, self._process.rank, list(items), usual.device, self._asked.timeout
        )
        try:
            return self.save(at.checkpoints, extra)
        finally:
            self.world, self.engine.saved = usual, ({}, {})

    def _hold(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Put the model and its optimizer's state together, of what the shards have; their clocks and counts."""
        model = twin_of(self.model).cpu()
        optimizer, shards = merged_states(model, self._stripes, states)
        kind = type(build_optimizer(model, self._asked)).__name__
        if states[0]["buffers"].numel():
            put_buffers(model, states[0]["buffers"])
        self.engine.saved = dict(model.state_dict()), {"kind": kind, **optimizer}
        return shards


def _no_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    raise AssertionError("servers run the optimizer")


def _last_step(directory: Path) -> int:
    steps = read_metrics(directory).steps["step"]
    return int(steps[-1]) if len(steps) else 0
