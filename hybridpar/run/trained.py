"""A trained model, for the commands that use it: the run or the file that it is in, its options, and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.config import TrainConfig
from hybridpar.config.train import TrainedOptions
from hybridpar.errors import CheckpointError, PlanError, UsageError, check, shortened
from hybridpar.formats.checkpoint_files import list_checkpoints, read_manifest, resolve_checkpoint, shards_of, step_of
from hybridpar.models import parse_arguments
from hybridpar.models.pretrained import is_file
from hybridpar.models.weights import check_file
from hybridpar.observe.metrics import read_metrics
from hybridpar.plan import read_plan
from hybridpar.run.directory import RUN_FILE, read_facts, recorded_config
from hybridpar.run.state import best_checkpoints

if TYPE_CHECKING:
    from torch import nn

    from hybridpar.data.sources import ImageFacts


@dataclass(frozen=True)
class Trained:
    """Where a trained model is, and what is known of it; its weights are not read yet.

    Attributes:
        config: Options of the run, with what is otherwise now.
        name: What the user calls the model.
        source: The run directory, the checkpoint or the weights, as they were named.
        checkpoint: The checkpoint of a run; None for weights that are not in one.
        why: Why it is this one, in a few words.
        average: Whether its weights are those of the moving average.
        images: What `run.json` says of images; None where it says nothing.
    """

    config: TrainConfig
    name: str
    source: str
    checkpoint: Path | None = None
    why: str = ""
    average: bool = False
    images: Mapping[str, Any] | None = None

    @property
    def step(self) -> int | None:
        """Steps that the weights were trained for; None where nothing says it."""
        return None if self.checkpoint is None else step_of(self.checkpoint)

    @property
    def weights(self) -> str | None:
        """`ema` or `raw`; None for weights that are not in a checkpoint."""
        return None if self.checkpoint is None else "ema" if self.average else "raw"

    def __str__(self) -> str:
        """The model in one line."""
        if self.checkpoint is None:
            return f"{self.name} with the weights {self.source}"
        kind = "moving average" if self.average else "weights"
        return f"{self.name}, {kind} of step {self.step:,}{self.why}: {self.checkpoint}"


def find_trained(source: str, options: TrainedOptions) -> Trained:
    """Find the model that options name, without importing torch."""
    words = set() if options.weights is None else {word.strip() for word in options.weights.split(",")}
    check(
        words <= {"best", "last", "ema", "raw"} and not (words >= {"best", "last"} or words >= {"ema", "raw"}),
        f"--weights {shortened(options.weights)}",
        "It names a checkpoint of the run (`best` or `last`), which of its weights (`ema` or `raw`), or both.",
        "Write for instance --weights last, or --weights last,raw.",
    )
    path = Path(source)
    if not path.is_dir():
        return _in_file(source, options)
    checkpoint, why = resolve_checkpoint(path if path.name else path.absolute()), ""
    # RUN/checkpoints/step-N
    folders = path, *checkpoint.absolute().parents[:2]
    run = next((folder for folder in folders if (folder / RUN_FILE).is_file()), path)
    facts = read_facts(run)
    if options.model is not None and options.data is not None:
        facts = facts or {"model": options.model, "options": {}}
    check(
        bool(facts) or (run / RUN_FILE).is_file(),
        f"{path} is not in the directory of a run: there is no {RUN_FILE}",
        "A run says of which model its weights are, and which data it was trained on.",
        "Name the model with --model and the data with --data.",
    )
    recorded = recorded_config(facts, run)
    is_run = not (path / "manifest.json").is_file()
    check(
        is_run or not words & {"best", "last"},
        f"--weights {options.weights} with the checkpoint {path}",
        "Of a run there may be several checkpoints, and this is one.",
        f"Name the run, {run}, or leave out `best` and `last`.",
    )
    if is_run:
        why, rule = ", the last", recorded.saving
        best = best_checkpoints(rule, read_metrics(run).epochs, list_checkpoints(run / "checkpoints"))
        if best and "last" not in words:
            checkpoint, why = best[0][1], f", the best by {rule.by}"
    config = replace(options.changed(recorded), plan="none", **_as_planned(run))  # a plan is for training
    config.check()
    has_average = bool(shards_of("model_ema", read_manifest(checkpoint)["files"]))
    check(
        has_average or "ema" not in words,
        f"--weights ema: {checkpoint} has no moving average",
        "It is kept by a run with --model-ema.",
        "Leave out --weights.",
    )
    average = has_average and "raw" not in words
    return Trained(config, options.model or str(facts["model"]), source, checkpoint, why, average, facts.get("images"))


def _in_file(source: str, options: TrainedOptions) -> Trained:
    """A model whose weights are in a file, or published."""
    is_published = options.model is not None and not is_file(source)
    check(
        Path(source).exists() or is_published or bool(Path(source).suffix),
        f"there is no run {shortened(source)}",
        "A run is the directory that `hybridpar train` reports at its end.",
        "Name such a directory, a checkpoint step-N in it, or a file of weights.",
    )
    if is_file(source):
        check_file(Path(source))
    if options.model is None or options.data is None:
        raise UsageError(
            f"the weights {shortened(source)} without {'--model' if options.model is None else '--data'}",
            "A file of weights does not say of which model they are, and what they tell apart.",
            "Name --model and --data, or a run directory instead.",
        )
    check(
        options.weights is None,
        f"--weights {options.weights} with the weights {shortened(source)}",
        "It chooses among the checkpoints of a run, and what they hold.",
        "Leave it out, or name a run directory.",
    )
    config = options.changed(TrainConfig(weights=source))
    config.check()
    return Trained(config, options.model, source)


def _as_planned(run: Path) -> dict[str, Any]:
    """The memory format and the precision that the run computed in, which its plan may have chosen."""
    try:
        compute = read_plan(run / "plan.json").compute
    except PlanError:
        return {}
    return {} if compute is None else {"memory_format": compute.memory_format, "amp": compute.amp}


def load_trained(trained: Trained, classes: int, *, channels_last: bool = False) -> nn.Module:
    """Build the model with its weights."""
    from hybridpar.formats.checkpoint_files import load_model_state
    from hybridpar.models.weights import load_weights

    model = build_trained(trained, classes, channels_last=channels_last)
    if trained.checkpoint is None:
        report = load_weights(model, trained.source, name=trained.name, args=parse_arguments(trained.config.model_arg))
        check(
            not report.new,
            f"the weights {shortened(report)}",
            "A model that is used as it is must have all of its weights.",
            "Name the model and the data that they were trained with.",
        )
        return model
    try:
        model.load_state_dict(load_model_state(trained.checkpoint, average=trained.average))
    except RuntimeError as error:
        problem = " ".join(str(error).partition("\n")[2].split())
        raise CheckpointError(
            f"the checkpoint {trained.checkpoint} is not of {trained.name} with {classes:,} classes: "
            f"{shortened(problem)}",
            "Names and shapes of all parameters and buffers must be equal.",
            "Leave out --model, --model-arg and --data, which the run knows.",
        ) from error
    return model


def build_trained(trained: Trained, classes: int, *, channels_last: bool = False) -> nn.Module:
    """Build the model with new weights, for those of another worker."""
    import torch

    from hybridpar.run.data import configured_model

    model = configured_model(trained.config, trained.name, classes).eval()
    return model.to(memory_format=torch.channels_last) if channels_last else model


def image_facts(trained: Trained, image_size: int | None = None) -> ImageFacts:
    """Classes and form of the images that a model was trained on: as its run says, else as its data set does."""
    from hybridpar.data import load_dataset
    from hybridpar.data.sources import ImageFacts

    facts = ImageFacts.read(trained.images) or ImageFacts.of(load_dataset(images_of_model(trained)))
    return replace(facts, test_size=image_size) if image_size is not None else facts


def images_of_model(trained: Trained) -> TrainConfig:
    """The options, with images as weights in a file or their model want them where nothing says otherwise."""
    from hybridpar.run.data import with_images_of_model

    return with_images_of_model(trained.config, trained.name) if trained.checkpoint is None else trained.config
