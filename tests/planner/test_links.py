"""The workers of a job measure the links between themselves, agree on them, and remember them."""

from __future__ import annotations

import json
import os

import pytest

from hybridpar.pipeline.world import World
from hybridpar.planner import store
from hybridpar.planner.links import KIND, forget_links, measure_cluster
from tests.ranks import run_ranks


def measured(world, cache):
    os.environ["HYBRIDPAR_CACHE"] = cache
    first, second = measure_cluster(world), measure_cluster(world)
    forgotten = world.from_main(lambda: forget_links(first.key))
    again = measure_cluster(world)
    return first, second, forgotten, again


@pytest.mark.parametrize("shared_memory", [True, False])
def test_workers_agree_on_their_links_and_keep_them(tmp_path, shared_memory):
    answers = run_ranks(measured, 2, str(tmp_path), shared_memory=shared_memory)
    (first, second, forgotten, again), other = answers
    assert first.spec == other[0].spec == second.spec == other[1].spec
    assert (first.cached, second.cached, forgotten, again.cached) == (False, True, True, False)
    spec = first.spec
    assert (spec.workers, len(spec.hosts), spec.hosts[0].devices, spec.between) == (2, 1, 2, None)
    assert spec.inside is not None
    assert 1e6 < spec.inside.bandwidth <= 1e12
    assert max(spec.inside.efficiency.model_dump().values()) == 1.0
    assert ("gloo" in spec.name) is not shared_memory
    assert spec.hosts[0].core_bandwidth == spec.inside.bandwidth


def test_one_worker_has_no_links(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path))
    found = measure_cluster(World())
    assert (found.spec.workers, found.spec.inside, found.spec.between) == (1, None, None)
    assert not (tmp_path / "planner").exists()


def test_what_is_stale_damaged_or_of_another_key_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path))
    key = {"workers": [1, 2]}
    assert store.load(KIND, key) is None
    store.store(KIND, key, {"bandwidth": 1.0})
    assert store.load(KIND, key, 60.0) == {"bandwidth": 1.0}
    assert store.load(KIND, {"workers": [1, 3]}) is None
    assert list(store.entries(KIND)) == [(key, {"bandwidth": 1.0})]
    path = store.path_of(KIND, key)
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "measured_at": entry["measured_at"] - 3600}))
    assert store.load(KIND, key, 1800.0) is None
    assert store.load(KIND, key, 7200.0) == {"bandwidth": 1.0}
    path.write_text(json.dumps({**entry, "key": {"workers": [9]}}))
    assert store.load(KIND, key) is None
    path.write_text("{")
    assert store.load(KIND, key) is None
    assert list(store.entries(KIND)) == []
    assert store.forget(KIND, key)
    assert not store.forget(KIND, key)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "file"))
    store.store(KIND, {"a": 1}, {})
    assert store.load(KIND, {"a": 1}) is None
