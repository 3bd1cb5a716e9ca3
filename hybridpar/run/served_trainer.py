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
from hybridpar.compress import Policy
from hybridpar.config import TrainConfig
from hybridpar.models import model_fingerprint
from hybridpar.models.random_state import random_state, restore_random_state
from hybridpar.models.state import twin_of
from hybridpar.models.state_dicts import copy_of
from hybridpar.observe.metrics import read_metrics
from hybridpar.optim.build import build_optimizer, load_optimizer_state
from hybridpar.plan import ResolvedPlan
from hybridpar.planner.planned_run import PlannedRun
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
from hybridpar.server.stripes import Stripe, trained_parameters
from hybridpar.server.wire import Start
from hybridpar.train.checkpoint import CheckpointData, load_checkpoint, require_model, save_checkpoint, usable
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
        place: Place,
        plan: ResolvedPlan,
        stripes: list[Stripe],
        policy: Policy,
        clipping: Clipping,
        at: Standing,
        name: str,
        **known: Any,
    ) -> None:
        self._asked, self._process, self._stripes, self._clipping, self._at = config, place, stripes, clipping, at
        self._name = name
        assert config.parameter_servers is not None
        self._barrier = config.parameter_servers.waits_for_all
        device = next(model.parameters()).device
        host = {
            name: own.data if device.type == "cpu" else torch.empty_like(own.data, device="cpu").pin_memory()
            for name, own in trained_parameters(model).items()
        }
        #: What became of the weights that the run started from; on worker 0, which brings them to the shards.
        self.weights_lines: list[str] = []
        self.links = self._open_links(model, policy, host)
        self._servers = Servers(place.rank, self.links, host, self._barrier, clipping)
        # Workers in step keep one average, else worker 0 does.
        ema = config.model_ema if self._barrier or place.rank == 0 else None
        alone = replace(config, sync="allreduce", compress="none", model_ema=ema)
        world = World(device=device, timeout=config.timeout)
        if self._barrier:
            world = PresentWorkers(self.links, "run", place.rank, range(place.workers), device, config.timeout)
        super().__init__(model, config=alone, world=world, plan=PlannedRun(plan), **known)

    def _open_engine(self, optimizer: Any, plan: ResolvedPlan, example: Tensor | None) -> ServedEngine:
        self._channels_last, self.peak_rate = plan.channels_last, self.config.peak_lr
        world = World(device=self.world.device, timeout=self.config.timeout)
        parts = EngineParts(self.model, plan, None, _no_optimizer, self._loss, self.config, world, self.lanes)
        return ServedEngine(parts, self._servers)

    def _open_links(self, model: nn.Module, policy: Policy, host: dict[str, Tensor]) -> Links:
        process, timeout = self._process, self._asked.timeout
        options = LinkOptions(
            *(process.rank, model_fingerprint(model), policy, process.token, timeout), returns=not self._barrier
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
        run_place = find_place(self._asked, self._name) if main else None
        written = _last_step(run_place.directory) if run_place is not None and joins else 0
        welcome = self.links.hello(flat_buffers(self.model).numel(), written if main else None)
        if main and any(one.values is None for one in welcome):
            welcome = self.links.start(self._starts(run_place, total, images), welcome)
        elif run_place is not None:
            at.tested, at.resumed_from = list(read_metrics(run_place.directory).epochs), written
        rest = welcome[0].rest
        facts = rest["facts"]
        self.model.load_state_dict(rest["tensors"], strict=False)
        self.engine.gradients.place_gradients()
        at.directory = Path(facts["directory"])
        if not main:
            at.tested = read_tests(facts["best"])  # all must agree on what is worth a checkpoint
        self.steps_done = at.own_steps = welcome[0].step if joins else int(facts["step"])
        checkpoint = None if facts["checkpoint"] is None else Path(facts["checkpoint"])
        if joins:
            checkpoint = latest_checkpoint(at.checkpoints) or checkpoint
        elif checkpoint is not None:
            self._load_own(checkpoint)
        self.engine.load_average_state(self.model.state_dict())
        self.engine.go_on_from(self.steps_done)
        if checkpoint is not None and (self.engine.averages or self._plateau is not None):
            with usable(checkpoint):
                data = load_checkpoint(checkpoint)
                if data.average is not None and self.engine.averages:
                    self.engine.load_average_state(data.average)
                    self.engine.go_on_from(data.step)
                if self._plateau is not None and (saved := data.training.get("plateau")) is not None:
                    self._plateau.load_state_dict(saved)
        if joins:
            self.hear(welcome[0].lowered)

    def _starts(self, place: RunPlace | None, total: int, images: Mapping[str, Any] | None) -> list[Start]:
        """What shards begin with: weights at the start, or of the checkpoint that the run goes on from."""
        assert place is not None
        workers, optimizer, progress, step, clock = self._process.workers, None, [], 0, 0
        if place.checkpoint is not None:
            data = load_checkpoint(place.checkpoint)
            with usable(place.checkpoint):
                require_model(place.checkpoint, data, self.fingerprint, self.model)
                self._at.go_on_from(data.training["extra"], self._asked, place.checkpoint)
                self.model.load_state_dict(data.model)
                optimizer = data.training["optimizer"]
                # Only to have it refused where it is of another kind.
                load_optimizer_state(build_optimizer(self.model, self._asked), self.model, dict(optimizer or {}))
                step = self._at.resumed_from = data.step
                progress = data.training.get("server", {}).get("shards", [])
                clock = max((int(one["clock"]) for one in progress), default=step)
        else:
            self.weights_lines = start_from_weights(self._asked, self._name, self.model)
        place = claim_place(place, self._asked, self._name, {"torch": torch.__version__}, images=images)
        return shard_starts(
            self.model,
            self._stripes,
            limit=total * workers,
            optimizer=optimizer,
            progress=progress,
            taken=step * workers,
            clock=clock,
            clipping=self._clipping,
            facts={
                "directory": str(place.directory),
                "checkpoint": None if place.checkpoint is None else str(place.checkpoint),
                "step": step,
                "best": plain_tests(keep_rule(self._asked).best(self._at.tested)),
            },
        )

    def _load_own(self, path: Path) -> None:
        """What belongs to this worker, where as many workers wrote it."""
        data, device = load_checkpoint(path, self._process.rank), self.world.device
        own, scale = data.local, data.training.get("loss_scale")
        if not self._barrier and own is not None and data.workers == self._process.workers:
            scale = own.get("server", {}).get("loss_scale", scale)
        with usable(path):
            if scale is not None:
                self.engine.load_loss_scale_state(scale)
            if own is None or data.workers != self._process.workers:
                torch.manual_seed(self._asked.seed + 1000003 * data.step + self._process.rank)
                return
            restore_random_state(own["random"], device)
            if "server" in own:
                self._at.own_steps = int(own["server"]["own_steps"])
                self.links.load_coders(own["server"]["codecs"])

    # -------------------------------------------------------------------- save

    def save_together(self, occasion: str, states: list[dict[str, Any]] | None, steps_per_epoch: int) -> Path | None:
        """Write a checkpoint, of what worker 0 heard from the servers; called by all workers on the same occasion."""
        rank, at, device = self._process.rank, self._at, self.world.device
        taken = None if states is None else int(states[0]["taken"]) // self._process.workers
        items = self.links.gather(f"{occasion}/0", taken)
        step = items.get(0)
        if not isinstance(step, int):
            return None
        world = PresentWorkers(self.links, occasion, rank, list(items), device, self._asked.timeout)
        scale = self.engine.loss_scale_state()
        own: dict[str, Any] = {"own_steps": at.own_steps, "codecs": self.links.coder_states()}
        local = {"random": random_state(device), "sync": {}, "server": own}
        if scale is not None:
            own["loss_scale"] = scale
        at.epoch, at.epoch_step = divmod(step, steps_per_epoch)
        model, training = self._whole(states, scale) if states is not None else ({}, {})
        average = copy_of(self.engine.kept_averages(), "cpu") if self.engine.averages else None
        data = CheckpointData(step, self.fingerprint, model, training, local, average=average)
        return save_checkpoint(at.checkpoints, data, world)

    def _whole(self, states: list[dict[str, Any]], scale: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The model, and what else there is of it, as the shards have it."""
        model = twin_of(self.model).cpu()
        optimizer, progress = merged_states(model, self._stripes, states)
        kind = type(build_optimizer(model, self._asked)).__name__
        if states[0]["buffers"].numel():
            put_buffers(model, states[0]["buffers"])
        training = {
            "optimizer": {"kind": kind, **optimizer},
            "extra": self._at.to_extra(self._asked),
            "server": {"shards": progress},
        }
        if scale is not None:
            training["loss_scale"] = scale
        if self._plateau is not None:
            training["plateau"] = self._plateau.state_dict()
        return dict(model.state_dict()), training


def _no_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    raise AssertionError("servers run the optimizer")


def _last_step(directory: Path) -> int:
    steps = read_metrics(directory).steps["step"]
    return int(steps[-1]) if len(steps) else 0
