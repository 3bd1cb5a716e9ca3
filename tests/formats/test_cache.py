from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from hybridpar.formats.cache import (
    cache_directory,
    load_measurement,
    measurement_file,
    store_measurement,
)

KIND, KEY, TYPES = "test", {"workers": [1, 2]}, TypeAdapter(dict[str, float])


def test_where_the_cache_is(monkeypatch):
    assert cache_directory().name == "cache"
    monkeypatch.delenv("HYBRIDPAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_directory() == Path("/elsewhere/hybridpar")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_directory() == Path("/home/me/.cache/hybridpar")


def test_a_user_without_a_home_still_has_a_cache(monkeypatch):
    monkeypatch.delenv("HYBRIDPAR_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_directory().name.startswith("hybridpar-")


def test_what_is_kept_is_found_under_its_key_alone():
    assert load_measurement(KIND, KEY, TYPES) is None
    store_measurement(KIND, KEY, {"ms": 1.0})
    assert load_measurement(KIND, KEY, TYPES) == {"ms": 1.0}
    assert load_measurement("another", KEY, TYPES) is None
    assert load_measurement(KIND, {"workers": [1, 3]}, TYPES) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"data": 1}', *(json.dumps({"key": key, "data": 1}) for key in (KEY, {"workers": [9]}, 3))]
)
def test_what_is_damaged_or_of_another_key_is_as_nothing(text):
    store_measurement(KIND, KEY, {"ms": 1.0})
    measurement_file(KIND, KEY).write_text(text)
    assert load_measurement(KIND, KEY, TYPES) is None


def test_a_cache_that_cannot_be_written_is_no_error_and_is_told(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "file"))
    store_measurement(KIND, KEY, {})
    assert load_measurement(KIND, KEY, TYPES) is None
    assert f"{KIND} will be measured again: cannot write" in caplog.text
