"""What was measured is found again, unless it is stale, damaged, or about something else."""

from __future__ import annotations

import json

import pytest

from hybridpar.planner import store

KIND, KEY = "profile", {"workers": [1, 2]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path))


def test_what_is_kept_is_found_under_its_key_alone():
    assert store.load(KIND, KEY) is None
    store.store(KIND, KEY, {"ms": 1.0})
    assert store.load(KIND, KEY) == {"ms": 1.0}
    assert store.load("calibration", KEY) is None
    assert store.load(KIND, {"workers": [1, 3]}) is None
    assert list(store.entries(KIND)) == [(KEY, {"ms": 1.0})]
    assert store.forget(KIND, KEY)
    assert not store.forget(KIND, KEY)
    assert list(store.entries(KIND)) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"data": 1}', json.dumps({"key": {"workers": [9]}, "data": 1})])
def test_what_is_damaged_or_of_another_key_is_as_nothing(text):
    store.store(KIND, KEY, {"ms": 1.0})
    store.path_of(KIND, KEY).write_text(text)
    assert store.load(KIND, KEY) is None


def test_a_cache_that_cannot_be_written_is_no_error_and_is_told(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "file"))
    store.store(KIND, KEY, {})
    assert store.load(KIND, KEY) is None
    assert f"{KIND} is not kept, and will be measured again: cannot write" in caplog.text


def test_what_repetitions_do_not_agree_on_is_measured_again_and_not_kept(tmp_path, caplog):
    noises = iter([0.9, 0.5, 0.7])

    def measure() -> dict[str, float]:
        noise = next(noises)
        return {"ms": 10 * noise, store.NOISE: noise}

    assert store.remembered(KIND, KEY, tmp_path, measure) == {"ms": 5.0}, "the least noisy"
    assert f"{KIND}: repeated measurements lie 50 % apart; they are used now and not kept" in caplog.text
    assert store.load(KIND, KEY, tmp_path) is None
    noises = iter([0.9, 0.1])
    assert store.remembered(KIND, KEY, tmp_path, measure) == {"ms": 1.0}
    assert store.load(KIND, KEY, tmp_path) == {"ms": 1.0}
    assert store.remembered(KIND, KEY, tmp_path, measure) == {"ms": 1.0}, "it is kept"
