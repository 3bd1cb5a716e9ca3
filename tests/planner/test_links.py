"""What is measured between workers: every way of using a link, equal everywhere, remembered while it holds."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from hybridpar.comm.world import World
from hybridpar.compress import Collective
from hybridpar.errors import SyncError
from hybridpar.machine.cluster_file import ClusterSpec, LinkLevel, parse_cluster
from hybridpar.planner import links
from hybridpar.planner.link_ways import PLAIN_WAYS, WAYS
from hybridpar.planner.links import measure_cluster
from hybridpar.planner.network import PLAIN, Network
from hybridpar.schedule.layout import Layout
from tests.ranks import run_ranks


def measured(world: World, cache: str, fresh: bool) -> tuple[str, int]:
    import os

    os.environ["HYBRIDPAR_CACHE"] = cache
    links.CONFIRMED = 1e9  # whatever the machine does meanwhile
    try:
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
    assert level.cores is not None
    assert max(level.efficiency.model_dump(exclude_none=True).values()) == 1.0
    assert all(0 <= use < 16 for use in level.cores.model_dump(exclude_none=True).values())
    assert level.efficiency.half_sum is not None
    assert level.efficiency.integer_sum is not None
    assert level.cores.all_reduce > 0


def measured_on_hosts(world: World, hosts: str, shared: bool) -> ClusterSpec:
    world.share_memory = shared
    found = mock.Mock(return_value=hosts[world.rank])
    with mock.patch.object(links, "host_identity", found), mock.patch("hybridpar.comm.world.host_identity", found):
        with mock.patch.object(links, "CONFIRMED", 1e9):
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
    assert links._still_true(spec, world, 1.01)
    assert not links._still_true(parse_cluster({"hosts": [{"count": 8}], "between": {"bandwidth": 1e8}}), world, 1.5)


def test_hosts_that_are_alike_are_equal_and_ranks_stay_in_their_order():
    def devices_of(*told: tuple[str, str, int]) -> list[tuple[int, int]]:
        places = [links._Place(host, memory << 20, name, 2) for host, name, memory in told]
        spec = ClusterSpec(
            hosts=links._hosts(places, World(), 0.0), inside=LinkLevel(bandwidth=1), between=LinkLevel(bandwidth=1)
        )
        return [(number, host.memory >> 20) for number, host in spec.by_worker]

    assert devices_of(("a", "x", 1000), ("b", "x", 999), ("c", "y", 500)) == [(0, 999), (1, 999), (2, 500)]
    assert devices_of(("a", "x", 1000), ("a", "x", 1000), ("b", "x", 1000)) == [(0, 500), (0, 500), (1, 500)]
    assert devices_of(("a", "x", 500), ("b", "y", 1000)) == [(0, 500), (1, 500)]


def test_what_was_measured_is_remembered_until_the_link_has_changed(tmp_path):
    first = run_ranks(measured, 2, str(tmp_path), True)[0]
    assert first[1] == 1
    (path,) = tmp_path.glob("planner/links-*.json")

    # A link a thousand times as slow as this one: somebody has moved the workers since.
    kept = json.loads(path.read_text())
    kept["data"]["cluster"]["inside"]["bandwidth"] /= 1000
    path.write_text(json.dumps(kept))
    again = json.loads(run_ranks(measured, 2, str(tmp_path), False)[0][0])
    assert again["inside"]["bandwidth"] > kept["data"]["cluster"]["inside"]["bandwidth"] * 10

    path.write_text("damaged")
    assert json.loads(run_ranks(measured, 2, str(tmp_path), False)[0][0])["inside"]["bandwidth"] > 0


def ways_measured(world: World, cache: str) -> list[object]:
    import os

    os.environ["HYBRIDPAR_CACHE"] = cache
    before = links.DRIFT
    links.CONFIRMED = 1e9  # whatever the machine does meanwhile
    found: list[object] = []
    try:
        for drift, ways in ((1e9, PLAIN_WAYS), (1e9, WAYS), (1e9, PLAIN_WAYS), (1.0, PLAIN_WAYS), (1e9, PLAIN_WAYS)):
            links.DRIFT = drift
            level = measure_cluster(world, seconds=0.002, ways=ways).inside
            assert level is not None
            assert level.cores is not None
            found.append((level.efficiency.half_sum is not None, level.bandwidth))
            if ways == PLAIN_WAYS and level.efficiency.half_sum is None:
                assert level.efficiency.all_to_all == level.efficiency.all_gather == level.efficiency.all_reduce
    finally:
        links.DRIFT = before
        del os.environ["HYBRIDPAR_CACHE"]
    return found


def test_ways_that_no_plan_would_take_are_not_measured_and_all_of_them_hold_for_some(tmp_path):
    plain, whole, some, changed, again = run_ranks(ways_measured, 2, str(tmp_path))[0]
    assert not plain[0]
    assert whole[0]
    assert some == whole, "what is remembered of all ways holds for some of them"
    assert not changed[0], "the link has changed, so these are measured, and no others"
    assert again == changed, "and what was remembered of all is forgotten"


def test_one_worker_has_no_links_and_a_calmer_machine_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(links, "machine_load", lambda: load[0])
    load = [3.0]
    spec = measure_cluster(World(), name="busy")
    assert spec.workers == 1
    assert spec.inside is None
    assert spec.between is None
    assert measure_cluster(World(), name="again").name == "busy", "it is remembered"
    load[0] = 1.0
    assert measure_cluster(World(), name="calm").name == "calm", "what a busy machine could do is not what it can"
    assert measure_cluster(World(), name="again").name == "calm"


def test_cores_that_a_link_keeps_busy_are_those_of_what_uses_it():
    spec = parse_cluster(
        {
            "hosts": [{"count": 2}],
            "between": {
                "bandwidth": 1e8,
                "efficiency": {"all_to_all": 0.5, "all_gather": 0.25},
                "cores": {"all_reduce": 0.4, "all_to_all": 0.1, "all_gather": 0.4, "send": 0.2, "receive": 0.3},
            },
        }
    )
    network = Network(spec, Layout.dealt(1, 1, replicas=2))
    assert network.core_use(PLAIN) == 0.4
    assert network.core_use((Collective.GATHER, torch.uint8)) == 0.4
    # There at half of the bandwidth, back at a quarter: a third of the time, and two thirds.
    assert network.core_use((Collective.SHARD, torch.uint8)) == pytest.approx(0.1 / 3 + 0.4 * 2 / 3)
    assert Network(spec.model_copy(update={"between": spec.between.faster(1)}), network.layout).core_use(PLAIN) == 0.4
    faster = spec.faster_links(10).between
    assert faster.cores.all_reduce / faster.bandwidth == pytest.approx(0.4 / 1e8), "a byte takes a core as long"


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


def unconfirmed(world: World, cache: str, confirmed: tuple[bool, ...]) -> tuple[int, float, int]:
    import os

    os.environ["HYBRIDPAR_CACHE"] = cache
    answers, taken = iter(confirmed), []
    inner = links._levels, links._still_true

    def levels(*given):
        taken.append(len(taken) + 1)
        return {"inside": LinkLevel(bandwidth=1e6 * len(taken))}

    links._levels = levels
    links._still_true = lambda *_: next(answers)
    try:
        spec = measure_cluster(world, fresh=True, seconds=0.002)
    finally:
        links._levels, links._still_true = inner
        del os.environ["HYBRIDPAR_CACHE"]
    assert spec.inside is not None
    return len(taken), spec.inside.bandwidth, len(list(Path(cache).glob("planner/links-*.json")))


def test_links_are_measured_again_until_messages_confirm_them_and_kept_only_then(tmp_path):
    assert run_ranks(unconfirmed, 2, str(tmp_path), (False,) * 3) == [(3, 3e6, 0)] * 2
    assert [found[:2] for found in run_ranks(unconfirmed, 2, str(tmp_path), (False, True))] == [(2, 2e6)] * 2
    assert len(list(tmp_path.glob("planner/links-*.json"))) == 1
