"""The state of a run with parameter servers: brought to the shards at the start, and collected for checkpoints.

Shards hold weights, momentum and clocks; each worker its place in the data, its random numbers and the residuals of its
codecs. Worker 0 brings the shards their first state, and asks them for it when a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.compress import Policy
from hybridpar.config import TrainConfig
from hybridpar.config.rates import OnPlateau
from hybridpar.models import model_fingerprint
from hybridpar.models.random_state import random_state, restore_random_state
from hybridpar.models.state import twin_of
from hybridpar.models.state_dicts import copy_of
from hybridpar.observe.metrics import read_metrics
from hybridpar.optim.build import build_optimizer, load_optimizer_state
from hybridpar.optim.ema import ModelAverage
from hybridpar.optim.loss_scale import LossScale
from hybridpar.optim.schedule import Plateau, warmup_length
from hybridpar.run.best import keep_rule
from hybridpar.run.data import start_from_weights
from hybridpar.run.directory import RunPlace, claim_place, find_place
from hybridpar.run.position import Standing, plain_tests, read_tests
from hybridpar.server.checkpoints import merged_states, shard_starts
from hybridpar.server.clipping import Clipping
from hybridpar.server.encoding import PushEncoder
from hybridpar.server.ledger import StepRow
from hybridpar.server.link import LinkOptions, Links, ServerLink
from hybridpar.server.place import Place
from hybridpar.server.present import PresentWorkers
from hybridpar.server.running import flat_buffers, put_buffers
from hybridpar.server.stripes import Stripe, piece_views, trained_parameters
from hybridpar.server.wire import Start
from hybridpar.train.checkpoint import (
    CheckpointData,
    load_checkpoint,
    require_model,
    save_checkpoint,
    usable,
)
from hybridpar.train.checkpoint_files import latest_checkpoint


class ServedState:
    """One worker's model, and its ways to the shards."""

    def __init__(
        self,
        config: TrainConfig,
        model_name: str,
        model: nn.Module,
        stripes: list[Stripe],
        place: Place,
        policy: Policy,
        barrier: bool,
        clipping: Clipping,
        at: Standing,
    ) -> None:
        self._at, self._clipping = at, clipping
        self._config, self._name, self._place = config, model_name, place
        self._stripes, self._barrier = stripes, barrier
        self.model = model
        #: What became of the weights that the run started from; on worker 0, which brings them to the shards.
        self.weights_lines: list[str] = []
        self.fingerprint = model_fingerprint(model)
        self.device = next(model.parameters()).device
        parameters = trained_parameters(model)
        #: Where weights arrive, by name: in the parameters, or for those of a GPU beside them.
        self.host: dict[str, Tensor] = {
            name: own.data if self.device.type == "cpu" else torch.empty_like(own.data, device="cpu").pin_memory()
            for name, own in parameters.items()
        }
        self.links = self._open_links(policy)
        #: What losses are multiplied with (`--amp fp16`): the same on all workers where they are in step, else its own.
        self.loss_scale = LossScale(self.device) if config.amp == "fp16" else None
        # What workers in step decide alike of `--lr-schedule plateau`, else worker 0 for all.
        schedule = config.rate_schedule
        self._plateau = Plateau(config.peak_lr, schedule) if isinstance(schedule, OnPlateau) else None
        self._told: float | None = None
        #: The moving average (`--model-ema`), on all workers where they are in step, else on worker 0; from `begin` on.
        self.average: ModelAverage | None = None
        self._averaged = 0  # steps that it has followed

    def _open_links(self, policy: Policy) -> Links:
        place, config = self._place, self._config
        options = LinkOptions(
            worker=place.rank,
            fingerprint=self.fingerprint,
            policy=str(policy),
            token=place.token,
            timeout=config.timeout,
            returns=not self._barrier,
        )
        links = []
        for number, (address, stripe) in enumerate(zip(place.find(config.timeout), self._stripes, strict=True)):
            name, views = f"{number} of {place.shards}", piece_views(stripe, self.host)
            links.append(ServerLink(name, address, stripe, views, PushEncoder(policy, stripe), options))
        return Links(links)

    # ------------------------------------------------------------------- begin

    def begin(self, total: int, images: Mapping[str, Any] | None = None) -> None:
        """Connect to the shards, bring them the weights if they have none, and find out how far the run is."""
        main, joins = self._place.rank == 0, self._place.joins
        at = self._at
        run_place = find_place(self._config, self._name) if main else None
        written = _last_step(run_place.directory) if run_place is not None and joins else 0
        buffers = flat_buffers(self.model).numel()
        welcome = self.links.hello(buffers, written if main else None)
        if main and any(one.values is None for one in welcome):
            welcome = self.links.start(self._starts(run_place, total, images), welcome)
        elif run_place is not None:
            at.tested, at.resumed_from = list(read_metrics(run_place.directory).epochs), written
        rest = welcome[0].rest
        facts = rest["facts"]
        self.model.load_state_dict(rest["tensors"], strict=False)
        self.take_weights()
        at.directory = Path(facts["directory"])
        if not main:
            at.tested = read_tests(facts["best"])  # all must agree on what is worth a checkpoint
        at.step = at.own_steps = int(facts["step"])
        checkpoint = None if facts["checkpoint"] is None else Path(facts["checkpoint"])
        if joins:
            at.step = at.own_steps = welcome[0].step
            self.hear(welcome[0].lowered)
            checkpoint = latest_checkpoint(at.checkpoints) or checkpoint
        elif checkpoint is not None:
            self._load_own(checkpoint)
        if self._config.model_ema is not None and (main or self._barrier):
            self._begin_average(checkpoint)
        if self._plateau is not None and checkpoint is not None:
            with usable(checkpoint):
                if (saved := load_checkpoint(checkpoint).training.get("plateau")) is not None:
                    self._plateau.load_state_dict(saved)

    def take_weights(self) -> None:
        """Put into the model what the shards sent last."""
        statistics = self.links.links[0].statistics
        if statistics.numel():
            put_buffers(self.model, statistics)
        if self.device.type != "cpu":
            with torch.no_grad():
                for name, parameter in trained_parameters(self.model).items():
                    parameter.copy_(self.host[name], non_blocking=True)

    def _starts(self, place: RunPlace | None, total: int, images: Mapping[str, Any] | None) -> list[Start]:
        """What shards begin with: weights at the start, or of the checkpoint that the run goes on from."""
        assert place is not None
        workers = self._place.workers
        optimizer: dict[str, Any] | None = None
        progress: list[dict[str, Any]] = []
        step = clock = 0
        if place.checkpoint is not None:
            data = load_checkpoint(place.checkpoint)
            with usable(place.checkpoint):
                require_model(place.checkpoint, data, self.fingerprint, self.model)
                self._at.go_on_from(data.training["extra"], self._config, place.checkpoint)
                self.model.load_state_dict(data.model)
                optimizer = data.training["optimizer"]
                # Only to have it refused where it is of another kind.
                load_optimizer_state(build_optimizer(self.model, self._config), self.model, dict(optimizer or {}))
                step = self._at.resumed_from = data.step
                progress = data.training.get("server", {}).get("shards", [])
                clock = max((int(one["clock"]) for one in progress), default=step)
        else:
            self.weights_lines = start_from_weights(self._config, self._name, self.model)
        place = claim_place(place, self._config, self._name, {"torch": torch.__version__}, images=images)
        checkpoint = None if place.checkpoint is None else str(place.checkpoint)
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
                "checkpoint": checkpoint,
                "step": step,
                "best": plain_tests(keep_rule(self._config).best(self._at.tested)),
            },
        )

    def _load_own(self, path: Path) -> None:
        """What belongs to this worker, where as many workers wrote it."""
        data = load_checkpoint(path, self._place.rank)
        own, scale = data.local, data.training.get("loss_scale")
        if not self._barrier and own is not None and data.workers == self._place.workers:
            scale = own.get("server", {}).get("loss_scale", scale)
        if self.loss_scale is not None and scale is not None:
            with usable(path):
                self.loss_scale.load_state_dict(scale)
        if own is None or data.workers != self._place.workers:
            torch.manual_seed(self._config.seed + 1000003 * data.step + self._place.rank)
            return
        with usable(path):
            restore_random_state(own["random"], self.device)
            if "server" in own:
                self._at.own_steps = int(own["server"]["own_steps"])
                self.links.load_coders(own["server"]["codecs"])

    # ------------------------------------------------------------------- rates

    @property
    def lowered(self) -> float:
        """What learning rates are multiplied with."""
        if self._told is not None:
            return self._told
        return 1.0 if self._plateau is None else self._plateau.factor

    def hear(self, lowered: float | None) -> None:
        """Follow what worker 0 says of learning rates, unless this worker decides itself."""
        if not self._decides:
            self._told = self._told if lowered is None else lowered

    @property
    def tells(self) -> float | None:
        """What the other workers are to be told of learning rates; None for nothing."""
        return self.lowered if self._plateau is not None and self._place.rank == 0 and not self._barrier else None

    @property
    def _decides(self) -> bool:
        """Whether this worker follows the tests: all that are in step do, else worker 0."""
        return self._barrier or self._place.rank == 0

    def note_metric(self, metric: float, total: int, steps_per_epoch: int) -> None:
        """Take the result of a test into account for `--lr-schedule plateau`."""
        if self._plateau is not None and self._at.step > warmup_length(total, steps_per_epoch, self._config):
            self._plateau.step(metric)

    # ----------------------------------------------------------------- average

    def _begin_average(self, checkpoint: Path | None) -> None:
        """Begin with the average of a checkpoint, or where it has none with the weights as they are."""
        ema = self._config.ema
        assert ema is not None
        self.average = ModelAverage(self.model, ema.decay, warmup=ema.warmup, every=ema.every)
        self._averaged = self._at.step
        if checkpoint is None or (data := load_checkpoint(checkpoint)).average is None:
            return
        with usable(checkpoint):
            self.average.load_state_dict(data.average)
        self._averaged = data.step

    def follow(self, step: int, *, applied: bool = True) -> None:
        """Move the average towards the weights of now, once for each step that the servers have done
        since last time.
        """
        if self.average is not None and (applied or not self._barrier):
            for number in range(self._averaged + 1, step + 1):
                self.average.update(number)
        self._averaged = step

    # -------------------------------------------------------------------- save

    def snapshot(self) -> tuple[list[dict[str, Any]], list[StepRow]]:
        """Worker 0: the state of each shard, and the steps that it has not been told of."""
        answers = self.links.states()
        return [one.state for one in answers], answers[0].rows

    def save(self, occasion: str, states: list[dict[str, Any]] | None, steps_per_epoch: int) -> Path | None:
        """Write a checkpoint; called by all workers on the same occasion."""
        taken = None if states is None else int(states[0]["taken"]) // self._place.workers
        items = self.links.gather(f"{occasion}/0", taken)
        step = items.get(0)
        if not isinstance(step, int):
            return None
        world = PresentWorkers(self.links, occasion, self._place.rank, list(items), self.device, self._config.timeout)
        local: dict[str, Any] = {
            "random": random_state(self.device),
            "sync": {},
            "server": {"own_steps": self._at.own_steps, "codecs": self.links.coder_states()},
        }
        if self.loss_scale is not None:
            local["server"]["loss_scale"] = self.loss_scale.state_dict()
        self._at.epoch, self._at.epoch_step = divmod(step, steps_per_epoch)
        model, training = self._whole(states) if states is not None else ({}, {})
        average = None
        if self.average is not None:
            average = copy_of(self.average.state_dict(), "cpu")
        data = CheckpointData(step, self.fingerprint, model, training, local, average=average)
        return save_checkpoint(self._at.checkpoints, data, world)

    def _whole(self, states: list[dict[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The model, and what else there is of it, as the shards have it."""
        model = twin_of(self.model).cpu()
        optimizer, progress = merged_states(model, self._stripes, states)
        kind = type(build_optimizer(model, self._config)).__name__
        if states[0]["buffers"].numel():
            put_buffers(model, states[0]["buffers"])
        training = {
            "optimizer": {"kind": kind, **optimizer},
            "extra": self._at.to_extra(self._config),
            "server": {"shards": progress},
        }
        if self.loss_scale is not None:
            training["loss_scale"] = self.loss_scale.state_dict()
        if self._plateau is not None:
            training["plateau"] = self._plateau.state_dict()
        return dict(model.state_dict()), training


def _last_step(directory: Path) -> int:
    steps = read_metrics(directory).steps["step"]
    return int(steps[-1]) if len(steps) else 0
