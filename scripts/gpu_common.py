"""What the packs of `scripts/gpu_check.py` share: a run of one of them, and what becomes of its checks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.rig.records import append_dicts
from benchmarks.rig.rows import commit, now
from hybridpar.run.worker import device_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "gpu" / "results"

#: What a check finds: a value, its limit, and whether it holds.
Outcome = tuple[float, float, bool]


class SkippedCheck(Exception):
    """This machine or this version of PyTorch has not what the check is about."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a check: its value, the limit, and `ok`, `FAILED` or `skipped`."""

    name: str
    value: float | str
    limit: float | str
    verdict: str


@dataclasses.dataclass
class Pack:
    """A run of a pack.

    Attributes:
        device: Where it runs.
        out: Folder of the tables that rows are added to.
        dry: It runs on a CPU, in tiny settings, to show that it would run.
        only: Settings whose name begins so.
        prebuilt: Folder of machine code that was compiled elsewhere; None compiles here.
        seconds: How long it may take: what would begin later is left out.
    """

    device: torch.device
    out: Path = RESULTS
    dry: bool = False
    only: str = ""
    prebuilt: Path | None = None
    seconds: float = 225.0

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self._began)

    def has_time_for(self, what: str) -> bool:
        """Whether something may still begin; says so where not."""
        if self.left <= 0:
            print(f"left out, as {self.seconds:.0f} s are over: {what}", flush=True)
        return self.left > 0

    def facts(self) -> dict[str, str]:
        """What rows begin with: when, which code, on what."""
        return {"date": now(), "commit": commit(), "device": device_name(self.device), "torch": torch.__version__}

    def write_checks(self, results: Sequence[Result]) -> bool:
        """Add checks to their table; whether none failed."""
        rows = [
            self.facts()
            | {
                "check": result.name,
                "value": f"{result.value:.3g}" if isinstance(result.value, float) else result.value,
                "limit": result.limit,
                "passed": result.verdict != "FAILED",
            }
            for result in results
        ]
        if rows:
            append_dicts(self.out / "checks.csv", rows)
        return not any(result.verdict == "FAILED" for result in results)


def versions() -> dict[str, str]:
    """Of what kernels come from, where there is a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}


def run_each(checks: Mapping[str, Callable[[], Outcome]]) -> Iterator[Result]:
    """Run checks, printing each; one that fails or cannot run says so, and the next one follows."""
    for name, check in checks.items():
        try:
            value, limit, passed = check()
            result = Result(name, value, limit, "ok" if passed else "FAILED")
        except SkippedCheck as reason:
            result = Result(name, str(reason), "", "skipped")
        except Exception as error:  # one that fails must not hide the others
            result = Result(name, f"{type(error).__name__}: {error}".replace("\n", " ")[:300], "", "FAILED")
        print(f"{result.verdict:8}{name}: {result.value} (limit {result.limit})", flush=True)
        yield result
