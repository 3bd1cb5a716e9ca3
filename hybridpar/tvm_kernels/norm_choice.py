"""Why: a fused norm is used only where a record says that it beats torch, on this device and with these threads.

It is as with convolutions, see `choice`: what was decided is kept with the records in use, so a call costs one look
into a dictionary; one log line per shape says what runs and why; `HYBRIDPAR_KERNELS` may say `off` or `strict`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hybridpar.codegen.cache import wanted
from hybridpar.errors import KernelError
from hybridpar.tvm_kernels import norm_kernels
from hybridpar.tvm_kernels.choice import Choices, active_choices, apart, how_to_tune, is_strict
from hybridpar.tvm_kernels.database import Database, why_unused
from hybridpar.tvm_kernels.device import cpu_fingerprint
from hybridpar.tvm_kernels.norm_records import NormKey, NormRecord, NormShape, norm_versions

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NormDecision:
    """What a norm and its activation run on.

    Attributes:
        key: The norm.
        record: What the decision rests on, if there is a record.
        why: Why it is torch; empty where the kernels run.
    """

    key: NormKey
    record: NormRecord | None
    why: str = ""

    @property
    def fused(self) -> bool:
        """Whether the kernels run."""
        return not self.why


def decide_norm(database: Database, key: NormKey) -> NormDecision:
    """What a norm runs on.

    Raises:
        KernelError: There is no record, or no kernel, and HYBRIDPAR_KERNELS is `strict`.
    """
    decision = judge_norm(database, key)
    missing = not decision.fused and (decision.record is None or decision.record.wins)
    if missing and is_strict():
        raise KernelError(
            f"no kernel for {describe_norm(key)}: {decision.why}",
            "HYBRIDPAR_KERNELS is strict, so every norm that kernels can do needs a record, and kernels.",
            how_to_tune(key),
        )
    return decision


def judge_norm(database: Database, key: NormKey) -> NormDecision:
    """As `decide_norm`, and never an error."""
    record = database.best_norm(key)
    if not wanted():
        return NormDecision(key, None, "HYBRIDPAR_KERNELS is off")
    if record is None:
        return NormDecision(key, None, why_no_norm_record(database, key))
    if not record.wins:
        return NormDecision(key, record, "the record says that torch is as fast")
    if not norm_kernels.table():
        return NormDecision(key, record, "its kernels cannot be had")
    return NormDecision(key, record)


def choose_norm(rows: int, channels: int, act: str, threads: int) -> bool:
    """Whether the records in use say that the kernels are faster: the `choice` that `optimize` gives to `fuse_norms`.

    Args:
        rows: Pixels of all images.
        channels: Channels.
        act: Activation.
        threads: Of torch.

    Raises:
        KernelError: There is no record, or no kernel, and HYBRIDPAR_KERNELS is `strict`.
    """
    choices = active_choices()
    if choices is None:
        return False
    call = (rows, channels, act, threads)
    try:
        return choices.found_norms[call]
    except KeyError:
        return _find(choices, call)


def _find(choices: Choices, call: tuple[int, int, str, int]) -> bool:
    rows, channels, act, threads = call
    decision = decide_norm(choices.database, NormKey(NormShape(rows, channels, act), threads, cpu_fingerprint()))
    choices.found_norms[call] = decision.fused
    _log.info("%s", describe_norm_decision(decision))
    return decision.fused


def why_no_norm_record(database: Database, key: NormKey) -> str:
    """What the nearest record of another key differs in."""
    if (own := database.best_norm(key, current=False)) is not None:
        return why_unused(own, norm_versions())
    near: list[tuple[int, str]] = []
    for other in database.norm_keys:
        if (other.dtype, other.shape.channels, other.shape.act) != (key.dtype, key.shape.channels, key.shape.act):
            continue
        differing = []
        if other.shape.rows != key.shape.rows:
            differing.append(f"{other.shape.rows} rows")
        differing += apart(other, key)
        near.append((len(differing), ", ".join(differing)))
    return f"its record is for {min(near)[1]}" if near else "there is no record"


def describe_norm(key: NormKey) -> str:
    """The norm in words."""
    return f"{key.op} {key.shape.text} {key.layout}, {key.threads} thread(s)"


def describe_norm_decision(decision: NormDecision) -> str:
    """One line that says what runs and why."""
    record = decision.record
    times = "" if record is None else f" ({record.ms:.3f} ms against {record.stock_ms:.3f} ms)"
    runs = "fused kernels" if decision.fused else f"torch, as {decision.why}"
    return f"{describe_norm(decision.key)} runs on {runs}{times}"
