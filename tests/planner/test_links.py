"""What is measured between workers: both ways of using a link, equal everywhere, remembered while it holds."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from hybridpar.comm.world import World
from hybridpar.errors import SyncError
from hybridpar.machine.cluster_file import ClusterSpec, LinkLevel, parse_cluster
from hybridpar.planner import links
from hybridpar.planner.links import measure_cluster
from tests.ranks import run_ranks


def measured(world: World, cache: str, fresh: bool) -> tuple[str, int]:
    import os

    os.environ["HYBRIDPAR_CACHE"] = cache
    try:
        # It is remembered, whatever the machine does meanwhile.
        with mock.patch.object(links, "DRIFT", 1e9 if fresh else links.DRIFT):
            spec = measure_cluster(world, fresh=fresh, seconds=0.002)
    finally:
        del os.environ["HYBRIDPAR_CACHE"]
    return spec.model_dump_json(), len(list(Path(cache).glob("planner/links-*.json")))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_workers_measure_the_links_between_them_and_agree(tmp_path, shared_memory):
    answers = run_ranks(measured, 2, str(tmp_path), True, shared_memory=shared_memory)
    assert answers[0] == answers[1]
    spec = ClusterSpec.model_validate_json(answers[0][0])
    assert (spec.workers, spec.between) == (2, None)
    assert spec.hosts[0].devices == 2
    assert spec.hosts[0].memory is not None
    level = spec.inside
    assert level is not None
    assert level.bandwidth > 1e6
    assert level.latency_ms > 0
    assert max(level.efficiency.all_reduce, level.efficiency.send) == 1.0
    assert min(level.efficiency.all_reduce, level.efficiency.send) > 0
    assert spec.hosts[0].memory_bandwidth > 1e6


def measured_on_hosts(world: World, hosts: str, shared: bool) -> ClusterSpec:
    world.share_memory = shared
    found = mock.Mock(return_value=hosts[world.rank])
    with mock.patch.object(links, "host_identity", found), mock.patch("hybridpar.comm.world.host_identity", found):
        with mock.patch.object(links, "DRIFT", 1e9):
            return measure_cluster(world, fresh=True, seconds=0.002)


@pytest.mark.parametrize(("hosts", "shared"), [("aabb", True), ("aabb", False), ("abb", True), ("abc", True)])
def test_hosts_of_one_and_of_two_workers_are_measured_alike_by_all(tmp_path, monkeypatch, hosts, shared):
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path))
    specs = run_ranks(measured_on_hosts, len(hosts), hosts, shared, shared_memory=False)
    assert specs == specs[:1] * len(hosts)
    assert specs[0].workers == len(hosts)
    assert specs[0].between is not None
    assert (specs[0].inside is None) == (hosts == "abc")


def test_what_workers_of_a_host_send_over_its_link_confirms_it(monkeypatch):
    spec = parse_cluster(
        {"hosts": [{"count": 2, "devices": 4}], "inside": {"bandwidth": 1e9}, "between": {"bandwidth": 1e8}}
    )
    world = World(0, 8, transport="sockets", lane_groups=[mock.Mock()])
    # Of a message that is added up in 8 stripes each of 4 workers sends 4 to the other host, and what it has added up.
    monkeypatch.setattr(links, "laps_of", lambda work, message, repeats: [4 * message.nbytes / 1e8] * repeats)
    assert not links._still_true(parse_cluster({"hosts": [{"count": 8}], "between": {"bandwidth": 1e8}}), world)
    monkeypatch.setattr(links, "DRIFT", 1.01)
    assert links._still_true(spec, world)


def test_hosts_are_in_the_order_of_ranks_and_those_that_are_alike_are_equal():
    def devices_of(*workers: tuple[str, str, int]) -> list[tuple[int, int]]:
        places = [links._Worker(host, memory << 20, name) for host, name, memory in workers]
        link = LinkLevel(bandwidth=1)
        spec = ClusterSpec(hosts=links._hosts(places, "cpu"), inside=link, between=link)
        return [(number, host.memory >> 20) for number, host in spec.by_worker]

    assert devices_of(("a", "x", 1000), ("b", "x", 999), ("c", "y", 500)) == [(0, 999), (1, 999), (2, 500)]
    assert devices_of(("a", "x", 1000), ("a", "x", 1000), ("b", "x", 1000)) == [(0, 500), (0, 500), (1, 1000)]
    assert devices_of(("a", "x", 500), ("b", "y", 1000)) == [(0, 500), (1, 1000)]
    assert devices_of(("a", "x", 1000), ("b", "y", 800), ("a", "x", 1000)) == [(0, 500), (1, 800), (2, 500)]


def test_what_was_measured_is_remembered_until_the_link_has_changed(tmp_path):
    first = run_ranks(measured, 2, str(tmp_path), True)[0]
    assert first[1] == 1
    (path,) = tmp_path.glob("planner/links-*.json")

    # A link a thousand times as slow as this one: somebody has moved the workers since.
    kept = json.loads(path.read_text())
    kept["data"]["inside"]["bandwidth"] /= 1000
    path.write_text(json.dumps(kept))
    again = json.loads(run_ranks(measured, 2, str(tmp_path), False)[0][0])
    assert again["inside"]["bandwidth"] > kept["data"]["inside"]["bandwidth"] * 10

    path.write_text("damaged")
    assert json.loads(run_ranks(measured, 2, str(tmp_path), False)[0][0])["inside"]["bandwidth"] > 0


def warnings_of_links_that_change(world: World, cache: str) -> int:
    never = mock.patch.object(links, "_still_true", return_value=False)
    with mock.patch.dict("os.environ", HYBRIDPAR_CACHE=cache), never, mock.patch.object(links._log, "warning") as warn:
        measure_cluster(world, fresh=True, seconds=0.002)
    assert not list(Path(cache).glob("planner/links-*.json"))
    return warn.call_count


def test_links_that_change_are_told_once_and_not_remembered(tmp_path):
    assert run_ranks(warnings_of_links_that_change, 2, str(tmp_path)) == [1, 0]


def test_one_worker_has_no_links(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path))
    rates = iter((1e9, 2e9))
    monkeypatch.setattr(links, "_copy_rate", lambda *_: next(rates))
    spec = measure_cluster(World())
    assert spec.workers == 1
    assert spec.inside is None
    assert spec.between is None
    assert measure_cluster(World()) == spec, "it is remembered"
    assert measure_cluster(World(), fresh=True).hosts[0].memory_bandwidth == 4e9


def broken(world: World) -> str:
    def fail(tensor: object) -> None:
        raise RuntimeError("Connection reset by peer")

    whole = world.split

    def split(*arguments: object, **options: object) -> World:
        party = whole(*arguments, **options)  # type: ignore[arg-type]
        for one in party.lane_groups:
            one.all_reduce = fail  # type: ignore[method-assign]
        return party

    world.split = split  # type: ignore[method-assign]
    with pytest.raises(SyncError) as caught:
        measure_cluster(world, fresh=True, seconds=0.001)
    return f"{caught.value.what}; {caught.value.why}"


def test_a_link_that_cannot_be_measured_is_one_error():
    for told in run_ranks(broken, 2):
        assert "stopped while measuring the links between workers" in told
        assert "Connection reset by peer" in told
