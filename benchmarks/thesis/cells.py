"""Settings and methods of the table, and which of them are already measured."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.rig.paired import LEAST_ROUNDS, Paired
from benchmarks.rig.rows import Row

CLAIM = "thesis"
MODELS = ("resnet18", "resnet34", "resnet50")
DATA = ("cifar10", "cifar100", "caltech101")

#: Published speed-ups over "the traditional training method". What that is, on which and how many GPUs, at which batch,
#: the abstract does not say.
PUBLISHED = {"resnet18": 1.47, "resnet34": 1.39, "resnet50": 2.44}

#: Where a data set can be had, and what of it must lie in the data root.
SOURCES = {
    "cifar10": ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "cifar-10-batches-py/"),
    "cifar100": ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "cifar-100-python/"),
    "caltech101": ("https://data.caltech.edu/records/mzrjq-6wc02", "caltech101/101_ObjectCategories/"),
}

ONE = "one device"
ONE_GRAPH = "one device, CUDA graph"
ONE_COMPILED = "one device, torch.compile"
DATA_PARALLEL = "nn.DataParallel"
DDP = "DDP"
DDP_GRAPH = "DDP, CUDA graph"
DDP_COMPILED = "DDP, torch.compile"
OURS = "hybridpar"
METHODS = (ONE, ONE_GRAPH, ONE_COMPILED, DATA_PARALLEL, DDP, DDP_GRAPH, DDP_COMPILED, OURS)

#: The first epoch finds shapes, compiles and captures; it trains, and is not timed.
WARMUP_EPOCHS = 1
LEAST_EPOCHS = LEAST_ROUNDS + WARMUP_EPOCHS

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained; equal for all methods.

    Attributes:
        model: Name of the model, see `hybridpar.models.build_model`.
        data: Name of the data set.
        data_root: Directory of its files.
        batch: Samples per step, over all workers.
        epochs: Epochs of training, the warm-up epoch included.
        most_steps: Steps after which an epoch is cut off; None for whole epochs.
        lr: Peak learning rate: SGD with momentum 0.9, one epoch of warm-up, half a cosine.
        loaders: Loader processes of all workers together, where images are read from files.
    """

    model: str
    data: str
    data_root: str
    batch: int
    epochs: int
    most_steps: int | None = None
    lr: float
    stem: str
    image_size: int | None = None
    loaders: int = 2

    def __str__(self) -> str:
        """In words, for the table: everything that speed or accuracy depend on."""
        size = f" at {self.image_size}x{self.image_size}" if self.image_size else ""
        cut = f" of {self.most_steps} steps" if self.most_steps else ""
        stem = f" ({self.stem} stem)" if self.model.startswith("resnet") else ""
        return f"{self.model}{stem}, {self.data}{size}, batch {self.batch}, {self.epochs} epochs{cut}, lr {self.lr:g}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where it is trained, and by which code.

    Attributes:
        device: "cpu" or "cuda".
        workers: Number of processes, each with a device of its own.
        name: What the maker calls the devices, for the table.
        commit: See `benchmarks.rig.rows.commit`.
        code: Digest of the sources; tells two states of a changed checkout apart.
    """

    device: str
    workers: int
    name: str
    commit: str
    code: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one start of the workers measures: the missing cells of one model on one data set.

    Attributes:
        setting: What is trained.
        place: Where.
        methods: All methods that were asked for.
        missing: Seed, and the methods that it still needs.
        output: The table.
        cuda_graph: Also try hybridpar's own CUDA graphs, where it has them.
        probe_steps: Timed steps of each layout that hybridpar could use.
        most_stages: Layouts of more stages are not tried.
    """

    setting: Setting
    place: Place
    methods: Sequence[str]
    missing: Sequence[tuple[int, Sequence[str]]]
    output: str
    cuda_graph: bool
    probe_steps: int
    most_stages: int = 4

    def told(self) -> dict[str, Any]:
        """As plain values, for the workers."""
        return asdict(self)

    @classmethod
    def heard(cls, told: dict[str, Any]) -> Job:
        """What `told` returned."""
        return cls(**told | {"setting": Setting(**told["setting"]), "place": Place(**told["place"])})


def why_not(method: str, device: str, workers: int) -> str | None:
    """Why a method has nothing to run on here; None where it can.

    Args:
        method: One of `METHODS`.
        device: "cpu" or "cuda".
        workers: Number of workers.
    """
    if method == DATA_PARALLEL and (device != "cuda" or workers < 2):
        return "nn.DataParallel needs two GPUs"
    if method in (ONE_GRAPH, DDP_GRAPH) and device != "cuda":
        return "CUDA graphs need a GPU"
    if method in (DDP, DDP_GRAPH, DDP_COMPILED) and workers < 2:
        return "DistributedDataParallel needs two workers"
    if method in (ONE_GRAPH, ONE_COMPILED) and workers > 1:
        return "on several devices it is measured together with DDP"
    return None


def runnable(methods: Iterable[str], place: Place) -> tuple[list[str], dict[str, str]]:
    """The methods that can run in a place, and the reasons of the others."""
    reasons = {method: why_not(method, place.device, place.workers) for method in methods}
    return (
        [method for method, reason in reasons.items() if reason is None],
        {method: reason for method, reason in reasons.items() if reason is not None},
    )


def code_digest(folders: Sequence[str] = ("hybridpar", "benchmarks/rig", "benchmarks/thesis")) -> str:
    """Twelve hex digits over the sources of package, rig and this benchmark."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(_ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def finished(rows: Iterable[Row], setting: Setting, place: Place) -> set[tuple[int, str]]:
    """Seed and method of every cell that the table already has for this setting, place and code."""
    return {
        (int(entry.extra["seed"]), entry.method)
        for entry in rows
        if (entry.setting, entry.device, entry.ranks, entry.commit, entry.extra.get("code"))
        == (str(setting), place.name, place.workers, place.commit, place.code)
    }


def still_missing(
    rows: Iterable[Row], setting: Setting, place: Place, methods: Sequence[str], seeds: Iterable[int]
) -> list[tuple[int, list[str]]]:
    """Seeds that lack methods which can run here, with these methods."""
    done = finished(rows, setting, place)
    wanted, _ = runnable(methods, place)
    lacking = [(seed, [method for method in wanted if (seed, method) not in done]) for seed in seeds]
    return [(seed, left) for seed, left in lacking if left]


def needed(wanted: Sequence[str], methods: Sequence[str], place: Place) -> list[str]:
    """What must run so that wanted methods get their rows: ratios are taken within rounds, so others run again."""
    can, _ = runnable(methods, place)
    beside = can if OURS in wanted else [ONE, OURS]
    return [method for method in can if method in wanted or method in beside]


def comparisons(measured: Sequence[str], wanted: Sequence[str]) -> list[tuple[str, str]]:
    """The rows that wanted methods get: each over one device, and ours over each other method."""
    ours = measured if OURS in wanted else wanted
    return [
        *((method, ONE) for method in wanted),
        *((OURS, method) for method in ours if OURS in measured and method not in (ONE, OURS)),
    ]


def target_of(model: str, method: str, baseline: str, device: str) -> float | None:
    """What ours was promised to take at most, of the time of one GPU without graphs: one over what was published."""
    promised = method == OURS and baseline == ONE and device == "cuda" and model in PUBLISHED
    return round(1 / PUBLISHED[model], 6) if promised else None


def whole_steps(samples: int, batch: int, most_parts: int, most_steps: int | None = None) -> int:
    """Steps of an epoch that have exactly `batch` samples, however a step is divided into up to `most_parts` parts.

    The rest of an epoch is dropped for all methods: graphs and compiled models are made for one shape. Where the rest
    is too small for its parts, `hybridpar.data.cut_epoch` joins it to the step before, which then is not whole either.
    """
    steps, rest = divmod(samples, batch)
    if 0 < rest < 2 * most_parts:
        steps -= 1
    return steps if most_steps is None else min(steps, most_steps)


def per_step(result: Paired, steps: int) -> Paired:
    """Times of epochs as times of steps, which is what the columns of a table are in."""
    times = {name: tuple(time / steps for time in values) for name, values in result.milliseconds.items()}
    return Paired(times, result.dropped, result.load, result.loaded, result.seed)
