"""Collectives on two levels of links, against what the formulas of their algorithms say."""

from __future__ import annotations

import pytest

from hybridpar.compress import Collective
from hybridpar.machine.cluster_file import ClusterSpec, parse_cluster
from hybridpar.planner.network import Network
from hybridpar.schedule.layout import Layout


def spec(hosts: int, devices: int) -> ClusterSpec:
    return parse_cluster(
        {
            "hosts": [{"count": hosts, "devices": devices, "kind": "cuda"}],
            "inside": {"bandwidth": 1e10, "latency_ms": 0.01},
            "between": {
                "bandwidth": 1e9,
                "latency_ms": 0.1,
                "efficiency": {"all_reduce": 0.8, "send": 0.7},
            },
        }
    )


def test_an_all_reduce_between_hosts_is_a_ring_s_bytes_in_logarithmic_rounds():
    cost = Network(spec(4, 1), Layout.dealt(1, 1, replicas=4)).exchange()
    assert cost.ms_per_byte == pytest.approx(2 * 3 / 4 / (1e6 * 0.8))
    assert cost.latency_ms == pytest.approx(2 * 2 * 0.1)


def test_on_two_levels_each_level_adds_its_own():
    cost = Network(spec(4, 8), Layout.dealt(1, 1, replicas=32)).exchange()
    assert cost.ms_per_byte == pytest.approx(2 * 7 / 8 / 1e7 + 2 * 3 / 4 / (1e6 * 0.8))
    assert cost.latency_ms == pytest.approx(2 * 3 * 0.01 + 2 * 2 * 0.1)


def test_groups_that_share_the_link_of_a_host_divide_it():
    # Positions 0 and 1 of four replicas each, on hosts of two: each host has workers of one position only.
    apart = Network(spec(4, 2), Layout.dealt(2, 2, replicas=4)).grouping
    assert (apart.hosts, apart.each, apart.sharing) == (2, 2, 1)
    # On hosts of three the second host has the last worker of position 0, and the first ones of position 1.
    mixed = Network(spec(3, 3), Layout.dealt(2, 2, replicas=4)).grouping
    assert mixed.sharing == 2
    alone, beside = (Network(spec(*shape), Layout.dealt(2, 2, replicas=4)).exchange() for shape in ((4, 2), (3, 3)))
    assert beside.ms_per_byte > alone.ms_per_byte


def test_stages_on_one_host_have_wires_of_their_own():
    _, own = Network(spec(2, 4), Layout.dealt(3, 3, replicas=1)).transfers(Layout.dealt(3, 3), 0)
    assert own.keys() == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert own[0, 1].bytes_per_second == 1e10


@pytest.mark.parametrize(
    ("collective", "latency", "per_byte"),
    [
        (Collective.SHARD, (3 + 2) * 0.1, 2 * 3 / 4 / (1e6 * 0.8)),
        (Collective.GATHER, 2 * 0.1, 3 / (1e6 * 0.8)),
        (Collective.MAX, 4 * 0.1, 2 * 3 / 4 / (1e6 * 0.8)),
    ],
)
def test_other_collectives_move_their_bytes_at_the_speed_of_sums(collective, latency, per_byte):
    cost = Network(spec(4, 1), Layout.dealt(1, 1, replicas=4)).exchange(collective)
    assert cost.latency_ms == pytest.approx(latency)
    assert cost.ms_per_byte == pytest.approx(per_byte)
