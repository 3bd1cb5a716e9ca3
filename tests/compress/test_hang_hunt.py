"""Every codec with several buckets on several lanes: it never hangs, no access is a race, and replicas stay equal."""

from __future__ import annotations

import pytest

from hybridpar.compress import CODECS
from tests.compress import hang_hunt
from tests.ranks import run_ranks


@pytest.mark.parametrize(("workers", "checked"), [(3, False), (2, True)])
def test_some_steps_of_every_codec(workers: int, checked: bool) -> None:
    where = {"lanes": hang_hunt.LANES, "timeout": 150, "shared_memory": False}
    found = run_ranks(hang_hunt.chase_all, workers, list(CODECS), 3, 4, checked, **where)
    hang_hunt.require_equal(CODECS, found)
