"""`HybridparStrategy`: compressed gradients in Lightning.

    trainer = Trainer(devices=4, strategy=HybridparStrategy(compress="onebit"))

It is Lightning's `DDPStrategy` with the model wrapped as `hybridpar.DataParallel`. Checkpoints of the trainer hold what
the codecs have not sent, so that `fit(ckpt_path=...)` goes on bit for bit.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from hybridpar.compress import Policy
from hybridpar.compress.policy import check_compression, is_auto
from hybridpar.errors import UsageError
from hybridpar.integrations.data_parallel import DataParallel

#: Where a checkpoint holds the states of all workers.
KEY = "hybridpar_compression"


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
    """Lightning's `DDPStrategy` with compressed gradients.

    Args:
        compress: How gradients are sent, as `hybridpar.DataParallel` takes it.
        seed: For what codecs draw at random; equal on all processes.
        fidelity: What `auto` may choose from: `exact`, `close` or `lossy`.
        options: Those of `DDPStrategy`, among them those of DDP, but for another communication hook.
    """

    model: Any

    def __init__(
        self, *, compress: str | Policy = "none", seed: int = 0, fidelity: str = "exact", **options: Any
    ) -> None:
        super().__init__(**options)
        self._compression: dict[str, Any] = {"compress": compress, "seed": seed, "fidelity": fidelity}
        self._restored: list[Any] = []
        self._wrapped: DataParallel | None = None

    def configure_ddp(self) -> None:
        """Wrap the model, and go on from the checkpoint that was loaded, if any; Lightning calls this before `fit`."""
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
        if self._wrapped is not None:
            parameters = dict(trainer.lightning_module.named_parameters())
            check_compression(self._compression["compress"], parameters, self.world_size, self.optimizers, tell=False)

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
        return checkpoint

    def teardown(self) -> None:
        """End the threads of the hook; its state can still be saved."""
        if self._wrapped is not None:
            self._wrapped.close()
        self._restored = []
        super().teardown()
