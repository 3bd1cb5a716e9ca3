from __future__ import annotations

from pathlib import Path

from hybridpar.formats.cache import cache_directory


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
