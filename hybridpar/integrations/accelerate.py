"""Compressed gradients in loops of Hugging Face Accelerate, and in the Trainer of transformers, which is such a loop.

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, compress="onebit")

in the place of `accelerator.prepare(model, optimizer, loader)`. Accelerate wraps the model in DistributedDataParallel
there; the hook is registered with that, and `accelerator.save_state` and `load_state` then keep what was not sent.
Nothing of accelerate is imported: the accelerator is the caller's.

    trainer = compress_trainer(transformers.Trainer(model, arguments, ...), compress="onebit")

does the same to a Trainer, whose checkpoints then have a file more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from hybridpar.compress import Policy
from hybridpar.compress.policy import check_compression
from hybridpar.errors import CheckpointError, UsageError
from hybridpar.integrations.data_parallel import DataParallel

_log = logging.getLogger(__name__)


def prepare(
    accelerator: Any,
    *objects: Any,
    compress: str | Policy = "none",
    seed: int = 0,
    fidelity: str = "exact",
    device_placement: list[bool] | None = None,
) -> Any:
    """`accelerator.prepare`, with compressed gradients; a collective of all processes.

    Args:
        accelerator: An `accelerate.Accelerator` that trains by data parallelism, or in one process.
        objects: What `accelerator.prepare` takes: models, optimizers, loaders, schedulers.
        compress: How gradients are sent, as `hybridpar.DataParallel` takes it.
        seed: For what codecs draw at random; equal on all processes.
        fidelity: What `auto` may choose from: `exact`, `close` or `lossy`.
        device_placement: As `accelerator.prepare` takes it.

    Returns:
        What `accelerator.prepare` returns. Models are `hybridpar.DataParallel`, unless there is one process.

    Raises:
        UsageError: There is no such codec, the processes do not agree, or no model was wrapped in
            DistributedDataParallel, as with FSDP or DeepSpeed.
    """
    modules = [item for item in objects if isinstance(item, torch.nn.Module)]
    optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
    for module in modules:
        parameters = dict(module.named_parameters())
        check_compression(compress, parameters, accelerator.num_processes, optimizers, tell=False)
    prepared = accelerator.prepare(*objects, device_placement=device_placement)
    items = prepared if isinstance(prepared, tuple) else (prepared,)
    models = _adopt(accelerator, items, compress=compress, seed=seed, fidelity=fidelity)
    if str(compress) != "none":
        # Accelerate refuses a checkpoint of more or fewer objects, so one process and a choice of none have them, too.
        states = [SavedCompression(model) for model in models] or [SavedCompression(None) for _ in modules]
        accelerator.register_for_checkpointing(*states)
    return prepared


def compress_trainer(trainer: Any, *, compress: str | Policy, seed: int = 0, fidelity: str = "exact") -> Any:
    """Have a Trainer of Hugging Face transformers send compressed gradients; to be called before `trainer.train()`.

    Each checkpoint gets a file `hybridpar_compression.pt` with what was not sent, from which a resumed run goes on.

    Args:
        trainer: A `transformers.Trainer`, started on several processes by torchrun or `accelerate launch`.
        compress: How gradients are sent, as `hybridpar.DataParallel` takes it.
        seed: For what codecs draw at random; equal on all processes.
        fidelity: What `auto` may choose from: `exact`, `close` or `lossy`.

    Returns:
        The same Trainer.

    Raises:
        UsageError: There is no such codec, or the processes do not agree. `trainer.train()` raises it where the model
            is not wrapped in DistributedDataParallel, as with FSDP or DeepSpeed.
    """
    from transformers import TrainerCallback

    accelerator = trainer.accelerator
    wrap = accelerator.prepare_model
    parameters = dict(trainer.model.named_parameters())
    optimizers = [trainer.optimizer] if trainer.optimizer is not None else []
    check_compression(compress, parameters, accelerator.num_processes, optimizers, tell=False)
    saved = SavedCompression(None)

    def prepare_model(model: Any, *args: Any, **options: Any) -> Any:
        nonlocal saved
        wrapped = wrap(model, *args, **options)
        if not options.get("evaluation_mode"):
            models = _adopt(accelerator, [wrapped], compress=compress, seed=seed, fidelity=fidelity)
            saved = SavedCompression(models[0] if models else None)
        return wrapped

    class Compression(TrainerCallback):  # type: ignore[misc]
        """Keeps what was not sent in the Trainer's checkpoints."""

        def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            """Write the file, on the first process; a collective."""
            compression = saved.state_dict()
            if accelerator.is_main_process:
                torch.save(compression, _file_of(args, state))

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            """Read the file of the checkpoint that the run goes on from."""
            if not state.global_step:
                return
            if (file := _file_of(args, state)).exists():
                saved.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
            else:
                _log.warning("%s is missing: what had not been sent is dropped", file)

    accelerator.prepare_model = prepare_model
    trainer.add_callback(Compression())
    return trainer


def _file_of(args: Any, state: Any) -> Path:
    """Where a Trainer's checkpoint of a step keeps what was not sent."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}", "hybridpar_compression.pt")


def _adopt(accelerator: Any, items: Sequence[Any], compress: str | Policy, **options: Any) -> list[DataParallel]:
    """Give each DDP in what Accelerate has prepared the codec, also one that torch.compile has wrapped."""
    inner = [getattr(item, "_orig_mod", item) for item in items]
    models = [DataParallel.adopt(ddp, compress=compress, **options) for ddp in inner if isinstance(ddp, DDP)]
    if not models and accelerator.num_processes > 1:
        raise UsageError(
            f"compress={str(compress)!r} with {accelerator.distributed_type}, and no model that it wraps in DDP",
            "Gradients are compressed in the hook of DistributedDataParallel.",
            "Give prepare the model, and let Accelerate use plain data parallelism.",
        )
    return models


class SavedCompression:
    """What `accelerator.save_state` and `load_state` keep of a model's codecs."""

    def __init__(self, model: DataParallel | None) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """The codec, and the residuals of all processes on the first one, which writes the file; a collective."""
        if self._model is None:
            return {"codec": "none", "workers": []}
        return {"codec": self._model.compress, "workers": self._model.gather_compression()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; each process reads the same file."""
        if state["codec"] != "none" and not state["workers"]:
            raise CheckpointError(
                "a custom_checkpoint file without the state of the codecs",
                "With save_on_each_node, only the file of the first node has it.",
                "Copy that file to the other nodes.",
            )
        if self._model is not None:
            self._model.load_compression_state_dict(state["workers"])
        elif state["workers"]:
            _log.warning("what codec %s has not sent is dropped: one process sends no gradients", state["codec"])
