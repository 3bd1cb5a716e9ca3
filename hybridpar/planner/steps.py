"""How many more training steps a codec takes to the same loss, from committed measurements.

Only what was measured counts: a codec that is not in the table is not planned with, however fast it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybridpar.compress.auto import FIDELITIES

#: Training steps until a loss is reached, over those that float32 takes. From benchmarks/sync/results/loss.csv
#: (ResNet-18 on digits, two workers, means of three seeds): the codec's loss after 100 steps against the line through
#: the losses of float32 after 50 and 100 steps. Casts count as they do for `close`: their rounding is that of mixed
#: precision. Seeds differ by more than these factors do from each other, so none of them is better than the next.
STEPS_TO_TARGET = {
    "none": 1.0,
    "fp16": 1.0,
    "bf16": 1.0,
    "onebit:decay=0.9": 1.083,
    "qsgd_mn:bits=4": 1.093,
    "hylo": 1.09,
}


def steps_factor(codecs: Iterable[str]) -> float:
    """Steps to the target over those of float32; of several codecs the most.

    Args:
        codecs: Their texts, all in `STEPS_TO_TARGET`.
    """
    return max((STEPS_TO_TARGET[text] for text in codecs), default=1.0)


def planned_codecs(fidelity: str) -> tuple[str, ...]:
    """The codecs that a fidelity allows and whose steps to a target are known, `none` not among them.

    Args:
        fidelity: `exact`, `close` or `lossy`.
    """
    return tuple(text for text in FIDELITIES[fidelity] if text in STEPS_TO_TARGET)


def left_out(fidelity: str) -> tuple[str, ...]:
    """The codecs that a fidelity would allow, but for a measurement that is missing.

    Args:
        fidelity: `exact`, `close` or `lossy`.
    """
    return tuple(text for text in FIDELITIES[fidelity] if text not in STEPS_TO_TARGET)
