"""What repetitions agree on is kept."""

from __future__ import annotations

from hybridpar.formats.cache import load_measurement
from hybridpar.planner import store

KIND, KEY = "profile", {"workers": [1, 2]}


def test_what_repetitions_do_not_agree_on_is_measured_again_and_not_kept(tmp_path, caplog):
    noises = iter([0.9, 0.5, 0.7])

    def measure() -> dict[str, float]:
        noise = next(noises)
        return {"ms": 10 * noise, store.NOISE: noise}

    assert store.remembered(KIND, KEY, tmp_path, measure) == {"ms": 5.0}, "the least noisy"
    assert f"{KIND}: repeated measurements lie 50 % apart; they are used now and not kept" in caplog.text
    assert load_measurement(KIND, KEY, tmp_path) is None
    noises = iter([0.9, 0.1])
    assert store.remembered(KIND, KEY, tmp_path, measure) == {"ms": 1.0}
    assert load_measurement(KIND, KEY, tmp_path) == {"ms": 1.0}
    assert store.remembered(KIND, KEY, tmp_path, measure) == {"ms": 1.0}, "it is kept"
