"""Why: a convolution sums up its results only where a record says that the norm behind it gains more than that costs.

It is as with convolutions and norms, see `choice`: decided once, with one log line. It rests on three records: those of
the two parts, which must run on their own kernels, and the one of both together. A missing one is no error where
`HYBRIDPAR_KERNELS` is `strict`: the parts are on kernels without it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridpar.codegen.cache import KernelsUnavailable, wanted
from hybridpar.tvm_kernels.choice import Choices
from hybridpar.tvm_kernels.compiled import Asked, compiled_kernels
from hybridpar.tvm_kernels.conv_norm_records import ConvNormKey, ConvNormRecord, ConvNormShape, conv_norm_versions
from hybridpar.tvm_kernels.database import KernelKey, why_unused
from hybridpar.tvm_kernels.device import cpu_fingerprint
from hybridpar.tvm_kernels.kernel import MomentsVariant, TunedKernel
from hybridpar.tvm_kernels.norm_choice import judge_norm
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConvNormDecision:
    """Whether a convolution leaves its moments to the norm behind it.

    Attributes:
        key: The two.
        kernel: The kernel that leaves them; None where the norm finds them itself.
        record: What the decision rests on, if there is a record.
        why: Why there is no such kernel; empty where there is one.
    """

    key: ConvNormKey
    kernel: TunedKernel | None
    record: ConvNormRecord | None
    why: str = ""


def convolution_of(key: ConvNormKey) -> KernelKey:
    """The convolution's part of a pair."""
    return KernelKey(Direction.FORWARD, key.shape.convolution, key.layout, key.threads, key.device)


def choose_moments(
    choices: Choices,
    sizes: Sequence[int],
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    act: str,
) -> TunedKernel | None:
    """The kernel that computes a convolution and leaves its moments, or None; on the CPU, float32, channels_last.

    Args:
        choices: What decides.
        sizes: Of the input: N, C, H, W.
        taps: Rows and columns of a filter.
        stride: Two numbers, as the next ones.
        padding: As torch has it.
        dilation: As torch has it.
        act: Activation behind the norm behind it.
    """
    pairs = ((int(one[0]), int(one[1])) for one in (taps, stride, padding, dilation))
    shape = ConvNormShape(ConvShape(*map(int, sizes), *pairs), act)  # type: ignore[arg-type]
    return decide_conv_norm(choices, ConvNormKey(shape, torch.get_num_threads(), cpu_fingerprint())).kernel


def decide_conv_norm(choices: Choices, key: ConvNormKey) -> ConvNormDecision:
    """Whether a convolution leaves its moments to the norm behind it; decided once for the records in use."""
    known: ConvNormDecision | None = choices.found_pairs.get(key)
    return known or prepare_conv_norms(choices, [key])[0]


def prepare_conv_norms(choices: Choices, keys: Sequence[ConvNormKey]) -> list[ConvNormDecision]:
    """Decide for pairs before they run, and load their kernels together; each is told in one log line."""
    winners: dict[ConvNormKey, ConvNormRecord] = {}
    for key in dict.fromkeys(keys):
        if key not in choices.found_pairs:
            record = choices.database.best_conv_norm(key)
            why = _why_apart(choices, key, record)
            if record is None or why:
                _settle(choices, ConvNormDecision(key, None, record, why))
            else:
                winners[key] = record
    for (key, record), kernel in zip(winners.items(), moments_kernels([*winners.values()]), strict=True):
        if isinstance(kernel, KernelsUnavailable):
            _log.warning("no kernel for %s, both stay apart: %s", key.shape.text, kernel)
            _settle(choices, ConvNormDecision(key, None, record, f"its kernel cannot be had: {kernel}"))
        else:
            _settle(choices, ConvNormDecision(key, kernel, record))
    return [choices.found_pairs[key] for key in keys]


def _settle(choices: Choices, decision: ConvNormDecision) -> None:
    choices.found_pairs[decision.key] = decision
    _log.info("%s", describe_conv_norm_decision(decision))


def _why_apart(choices: Choices, key: ConvNormKey, record: ConvNormRecord | None) -> str:
    """Why a convolution leaves no moments; empty where it does."""
    if not wanted():
        return "HYBRIDPAR_KERNELS is off"
    if record is None:
        old = choices.database.best_conv_norm(key, current=False)
        return "there is no record of both together" if old is None else why_unused(old, conv_norm_versions())
    if not record.wins:
        return "the record says that both are as fast apart"
    if choices.prepare([convolution_of(key)])[0].kernel is None:
        return "the convolution runs on torch"
    return "" if judge_norm(choices.database, key.norm).fused else "the norm runs on torch"


def moments_kernels(records: Sequence[ConvNormRecord]) -> list[TunedKernel | KernelsUnavailable]:
    """The kernels of some records, together: what is not in the cache of this machine is built.

    Returns:
        For each record its kernel, or why there is none, for instance because its parameters are no kernel's.
    """
    asked = [
        Asked(one.key.shape.convolution, Direction.FORWARD, Layout.CHANNELS_LAST, one.parameters, 4, one.threads)
        for one in records
    ]
    return compiled_kernels(MomentsVariant, asked)


def describe_conv_norm_decision(decision: ConvNormDecision) -> str:
    """One line that says what runs and why."""
    key, record = decision.key, decision.record
    times = "" if record is None else f" ({record.ms:.3f} ms together, {record.apart_ms:.3f} ms apart)"
    runs = "leaves its moments" if decision.kernel is not None else f"leaves no moments, as {decision.why}"
    return f"{key.shape.text} {key.layout}, {key.threads} thread(s), {runs}{times}"
