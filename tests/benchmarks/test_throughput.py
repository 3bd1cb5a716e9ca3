"""Tests the benchmark of codecs on one core: each part of a codec has its rate, and each kind of code its process."""

from __future__ import annotations

from benchmarks.sync import throughput


def test_each_part_of_a_codec_has_its_rate() -> None:
    owned = throughput.rates_of("onebit:least=1,meet=shard", "tests.small_nets:plain", 1)
    assert set(owned) == {"encode", "merge", "decode", "decode_add", "memcpy"}
    assert set(throughput.rates_of("fp16", "tests.small_nets:plain", 1)) == {"encode", "decode", "memcpy"}
    assert min(owned.values()) > 0
