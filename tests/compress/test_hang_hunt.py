"""Every codec with several buckets on several lanes: it never hangs, no access is a race, and replicas stay equal."""

from __future__ import annotations

import torch

from hybridpar.compress import CODECS
from tests.compress import hang_hunt
from tests.ranks import run_ranks

NAMES = list(CODECS)


def chased(workers: int, seed: int, *, checked: bool = False) -> list[list[torch.Tensor]]:
    lanes = hang_hunt.LANES
    return run_ranks(
        hang_hunt.chase_all, workers, NAMES, seed, 4, checked, lanes=lanes, timeout=150, shared_memory=False
    )


def test_some_steps_of_every_codec_on_three_workers() -> None:
    hang_hunt.require_equal(NAMES, chased(3, 3))


def test_every_codec_on_two_workers_with_and_without_the_checking_lane() -> None:
    plain, checked = chased(2, 5), chased(2, 5, checked=True)
    for codec, one, other in zip(NAMES, plain[0], checked[0], strict=True):
        assert torch.equal(one, other), codec
    hang_hunt.require_equal(NAMES, checked)
