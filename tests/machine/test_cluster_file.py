"""Described clusters: what is written is read, what is impossible is one error, and equal ones have one key."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridpar.errors import UsageError
from hybridpar.machine.cluster_file import parse_cluster, read_cluster_file

TEXT = """
name = "two boxes"

[[hosts]]
count = 2
devices = 4
kind = "cuda"
memory = "24GB"
throughput = 8.0

[inside]
bandwidth = "12GB/s"
latency_ms = 0.01

[between]
bandwidth = "1Gbit/s"
latency_ms = 0.1
efficiency = { all_reduce = 0.9, send = 0.95 }
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_a_description_is_read(tmp_path):
    spec = read_cluster_file(write(tmp_path, TEXT))
    assert spec.workers == 8
    assert spec.hosts[0].memory == 24 * 10**9
    assert spec.inside is not None
    assert spec.inside.bandwidth == 12e9
    assert spec.between is not None
    assert spec.between.bandwidth == 1e9 / 8
    assert spec.between.efficiency.all_reduce == 0.9
    assert spec.between.efficiency.send == 0.95


def test_the_key_follows_what_matters():
    spec = parse_cluster({"hosts": [{}]})
    assert spec.key == parse_cluster({"hosts": [{"count": 1}], "name": "another"}).key
    assert spec.key != parse_cluster({"hosts": [{"throughput": 2.0}]}).key
    assert spec.key != parse_cluster({"hosts": [{}], "inside": {"bandwidth": 1e9}}).key


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("devices = 4", "devices = 0"), "hosts.0.devices: "),
        (("throughput = 8.0", "throughput = inf"), "hosts.0.throughput: "),
        (('memory = "24GB"', 'memory = "24GB/s"'), "write 24GB"),
        (('bandwidth = "12GB/s"', 'bandwidth = "fast"'), "not a rate; write 12GB/s or 1Gbit/s"),
        (("latency_ms = 0.1\n", "latency_ms = -0.1\n"), "between.latency_ms: "),
        (("all_reduce = 0.9", "all_reduce = 1.2"), "between.efficiency.all_reduce: "),
        (("all_reduce = 0.9", "all_reduced = 0.9"), "between.efficiency.all_reduced: "),
        (("latency_ms = 0.1\n", "cores = 1\n"), "between.cores: "),
        (('kind = "cuda"', 'kind = "tpu"'), "hosts.0.kind: "),
    ],
)
def test_an_impossible_value_is_one_error_that_names_the_place(tmp_path, change, told):
    assert change[0] in TEXT
    with pytest.raises(UsageError) as caught:
        read_cluster_file(write(tmp_path, TEXT.replace(*change, 1)))
    assert told in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"hosts": []}, "hosts"),
        ({"hosts": [{"devices": 2}]}, "no [inside]"),
        ({"hosts": [{"count": 2}]}, "no [between]"),
        ({"hosts": [{"count": 10**9}], "between": {"bandwidth": 1}}, "1,000,000,000 devices; at most 131,072"),
        ({"hosts": [{"kind": "cpu"}, {"kind": "cuda"}], "between": {"bandwidth": 1}}, "several kinds"),
    ],
)
def test_what_contradicts_itself_or_is_too_much_is_refused(data, told):
    with pytest.raises(UsageError) as caught:
        parse_cluster(data)
    assert told in caught.value.what


def test_a_file_that_cannot_be_read_is_one_error(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_cluster_file(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="is not TOML"):
        read_cluster_file(write(tmp_path, "[[hosts"))


def test_the_fastest_hosts_come_first():
    spec = parse_cluster(
        {"hosts": [{"throughput": 1.0}, {"count": 2, "throughput": 3.0}], "between": {"bandwidth": 1e9}}
    )
    assert [(number, host.throughput) for number, host in spec.by_worker] == [(0, 3.0), (1, 3.0), (2, 1.0)]


def test_sizes_are_whole_bytes_whatever_their_fraction():
    for tenths in range(1, 1000):
        spec = parse_cluster({"hosts": [{"memory": f"{tenths // 10}.{tenths % 10}GB"}]})
        assert spec.hosts[0].memory == tenths * 10**8


@pytest.mark.parametrize(("said", "bandwidth"), [("1e-3GB/s", 1e6), ("2.5e+1MB/s", 2.5e7), ("8kbit/s", 1e3)])
def test_rates_are_read_in_any_way_that_numbers_are_written(said, bandwidth):
    spec = parse_cluster({"hosts": [{"count": 2}], "between": {"bandwidth": said}})
    assert spec.between is not None
    assert spec.between.bandwidth == pytest.approx(bandwidth)
