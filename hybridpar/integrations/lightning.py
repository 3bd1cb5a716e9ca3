"""`HybridparStrategy`: compressed gradients and pipelines in Lightning.

    trainer = Trainer(devices=4, strategy=HybridparStrategy(stages=2, compress="onebit"))

`training_step` runs on hybridpar's engine (`hybridpar.integrations.engine_step`): it is the forward pass, or with
stages its one call of the model is the forward passes of a pipeline. Hooks, clipping and the optimizer are Lightning's,
on every worker. What is not one forward and one backward pass (manual optimization, a `backward` of the module's own),
or uses options of DDP, runs in Lightning's `DDPStrategy` with the model wrapped as `hybridpar.DataParallel`.

Checkpoints of the trainer hold the whole model, and what the codecs have not sent, so that `fit(ckpt_path=...)` goes on
bit for bit.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hybridpar.compress import Policy
from hybridpar.errors import UsageError
from hybridpar.integrations.data_parallel import DataParallel, check_options
from hybridpar.integrations.engine_step import EngineStep
from hybridpar.sync.policy import check_compression, is_auto

#: Where a checkpoint holds the states of all workers.
KEY = "hybridpar_compression"
ENGINE_KEY = "hybridpar_engine"


def _find_strategy() -> Any:
    """`DDPStrategy` of the package that the script uses: a trainer takes no strategy of the other one."""
    problem: ImportError | None = None
    for package in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(f"{package}.strategies").DDPStrategy
        except ImportError as error:
            problem = problem or error
    fix = "Install it: pip install 'hybridpar[integrations]'"
    raise UsageError(f"HybridparStrategy needs Lightning, which cannot be imported: {problem}", fix=fix)


DDPStrategy = _find_strategy()


class HybridparStrategy(DDPStrategy):  # type: ignore[misc, valid-type]
    """Lightning's `DDPStrategy` with hybridpar's sync, compressed gradients, and stages.

    Args:
        compress: How gradients are sent, as `hybridpar.DataParallel` takes it.
        seed: For what codecs draw at random; equal on all processes.
        fidelity: What `auto` may choose from: `exact`, `close` or `lossy`.
        stages: Stages that the model is cut into. All workers of a pipeline get the same batch, and metrics are the
            same on them. `training_step` calls the model, or one sub-module with all that is trained, once, with one
            tensor.
        replicas: Copies of the pipeline; default: as many as the workers allow.
        micro_batches: Micro-batches that a batch is divided into, where there are stages.
        options: Those of `DDPStrategy`, among them those of DDP where there are no stages.

    Raises:
        UsageError: There is no such option, there is another communication hook, or one of DDP's is given with stages.
    """

    model: Any
    _layer_sync: Any

    def __init__(
        self,
        *,
        compress: str | Policy = "none",
        seed: int = 0,
        fidelity: str = "close",
        stages: int = 1,
        replicas: int | None = None,
        micro_batches: int = 4,
        **options: Any,
    ) -> None:
        takers = HybridparStrategy.__init__, DDPStrategy.__init__, DistributedDataParallel.__init__
        check_options("HybridparStrategy", options, takers)
        for name in ("ddp_comm_hook", "ddp_comm_wrapper"):
            if str(compress) != "none" and options.get(name) is not None:
                raise UsageError(
                    f"compress={str(compress)!r} with {name}", "DDP has one hook.", "Leave out one of them."
                )
        super().__init__(**options)
        if stages > 1 and self._ddp_kwargs:
            raise UsageError(
                f"HybridparStrategy with stages={stages} and {', '.join(sorted(self._ddp_kwargs))}",
                "These are options of DistributedDataParallel, which does not run a pipeline.",
                "Leave them out.",
            )
        #: Runs the steps; None where DistributedDataParallel does.
        self._engine: EngineStep | None = None
        self._stages: dict[str, Any] = {"stages": stages, "replicas": replicas, "micro_batches": micro_batches}
        self._compression: dict[str, Any] = {"compress": compress, "seed": seed, "fidelity": fidelity}
        self._ended: Any = None
        self._on_engine = self._sync_batch_norm = False
        self._engine_state: dict[str, Any] | None = None
        self._restored: list[Any] = []
        self._wrapped: DataParallel | None = None

    def setup(self, trainer: Any) -> None:
        """Lightning calls this before it trains or evaluates.

        Args:
            trainer: Lightning's trainer.
        """
        self._ended = None
        self._on_engine = trainer.state.fn == "fit" and self._fits_engine(trainer.lightning_module)
        self._sync_batch_norm = self._on_engine and self._layer_sync is not None
        if self._on_engine:  # the engine sees to BatchNorm itself
            self._layer_sync = None
        super().setup(trainer)

    def _fits_engine(self, module: Any) -> bool:
        """Whether one `training_step` is one forward and one backward pass, and nothing is asked of DDP."""
        hooks = (self._ddp_comm_hook, self._ddp_comm_wrapper, self._ddp_comm_state, self._model_averaging_period)
        own = type(module).backward.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")
        plain = module.automatic_optimization and not own and not self._ddp_kwargs and not any(hooks)
        return plain or self._stages["stages"] > 1

    def configure_ddp(self) -> None:
        """Wrap the model, and go on from the checkpoint that was loaded, if any; Lightning calls this before `fit`."""
        if self._on_engine:
            self._engine = EngineStep(**self._stages, **self._compression, sync_batch_norm=self._sync_batch_norm)
            self._engine.restored = self._engine_state
            self._engine.join(self.model, self.world_size, self.precision_plugin)
            return
        super().configure_ddp()
        asked = dict(self._compression)
        if is_auto(asked["compress"]) and self._restored:
            asked["compress"] = self._restored[0]["codec"]  # measured when the run began
        self._wrapped = self.model = DataParallel.adopt(self.model, **asked)
        self._wrapped.load_compression_state_dict(self._restored)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, and refuse momentum that a codec keeps as well.

        Args:
            trainer: Lightning's trainer.

        Raises:
            UsageError: Momentum would be kept twice.
        """
        super().setup_optimizers(trainer)
        if self._wrapped is not None or self._engine is not None:
            names = [name for name, _ in trainer.lightning_module.named_parameters()]
            replicas = self.world_size if self._engine is None else self._engine.replicas
            check_compression(self._compression["compress"], names, replicas, self.optimizers, tell=False)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which share of the data this process gets: that of its replica, while a pipeline trains."""
        engine = self._engine
        if engine is None or not engine.joined:
            return super().distributed_sampler_kwargs  # type: ignore[no-any-return]
        return {"num_replicas": engine.replicas, "rank": engine.replica}

    # ----------------------------------------------------------- of the engine

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """Lightning's, on the engine.

        Args:
            arguments: As `DDPStrategy` takes them.
            options: As `DDPStrategy` takes them.

        Returns:
            What the module's `training_step` does.
        """
        if self._engine is None:
            return super().training_step(*arguments, **options)
        with self.precision_plugin.train_step_context():
            return self._engine.step(self.lightning_module, arguments, options)

    def backward(self, closure_loss: Tensor, optimizer: Any, *arguments: Any, **options: Any) -> Tensor:
        """Lightning's, with the backward passes of the engine before the hooks that look at gradients.

        Args:
            closure_loss: The loss.
            optimizer: As `DDPStrategy` takes it.
            arguments: For the loss's backward pass.
            options: For the loss's backward pass.

        Returns:
            The loss, detached.
        """
        if self._engine is None:
            return super().backward(closure_loss, optimizer, *arguments, **options)  # type: ignore[no-any-return]
        plugin, module = self.precision_plugin, self.lightning_module
        loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(loss, module, optimizer, *arguments, **options)
        self._engine.backward(module)
        return plugin.post_backward(loss, module)  # type: ignore[no-any-return]

    def on_validation_start(self) -> None:
        """Make the model whole on every process."""
        self._make_whole()

    def on_train_end(self) -> None:
        """Make the model whole on every process, and keep what a checkpoint after the training holds."""
        self._make_whole()
        if self._engine is not None and self._engine.model is not None:
            model = self._engine.model
            self._ended = model.state_dict(), [self.optimizer_state(one) for one in self.optimizers]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model; a collective."""
        self._make_whole()
        return super().lightning_module_state_dict()  # type: ignore[no-any-return]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer for all stages, on the process that writes; a collective.

        Args:
            optimizer: One of `optimizers`.
        """
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self._engine is None or self._engine.model is None:
            ended = () if self._ended is None else zip(self.optimizers, self._ended[1], strict=True)
            return next((kept for one, kept in ended if one is optimizer), state)
        return self._engine.model.gather_state(state, optimizer.param_groups)

    def _make_whole(self) -> None:
        if self._engine is not None and self._engine.model is not None:
            self._engine.model.make_whole()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, with what the codecs of all processes have not sent; a collective.

        Args:
            checkpoint: What Lightning saves. One of weights alone is written as it is.
            filepath: Where to.
            storage_options: For Lightning's `CheckpointIO`.
        """
        if self._wrapped is not None and "optimizer_states" in checkpoint:
            workers = self._wrapped.gather_compression()
            if workers:
                checkpoint = {**checkpoint, KEY: workers}
        model = self._engine.model if self._engine is not None else None
        if "optimizer_states" in checkpoint and (model is not None or self._ended is not None):
            state = model.state_dict() if model is not None else self._ended[0]
            checkpoint = {**checkpoint, ENGINE_KEY: state}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint; what the codecs had not sent is used when the model is wrapped.

        Args:
            arguments: As `DDPStrategy` takes them.
            options: As `DDPStrategy` takes them.

        Returns:
            What Lightning has saved.
        """
        checkpoint: dict[str, Any] = super().load_checkpoint(*arguments, **options)
        self._restored = checkpoint.get(KEY, [])
        self._engine_state = checkpoint.get(ENGINE_KEY)
        return checkpoint

    def teardown(self) -> None:
        """End the threads of the hook; its state can still be saved."""
        if self._wrapped is not None:
            self._wrapped.close()
        if self._engine is not None:
            self._engine.close()
        self._engine = self._engine_state = None
        self._restored = []
        super().teardown()
