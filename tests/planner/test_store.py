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
