"""Tests the benchmark of gradient synchronisation: short runs of its tables, and the names of its methods.

A full table takes an hour, so errors would be found late.
"""

from __future__ import annotations

import pytest

from benchmarks.sync.main import CODECS, Options, main, place_of
from benchmarks.sync.methods import codec_of, split_lanes
from hybridpar.compress.policy import parse_codec
from hybridpar.errors import UsageError


def test_the_links_table_runs(capfd: pytest.CaptureFixture[str]) -> None:
    methods = ("ddp", "own:onebit@1", "hook:powersgd:rank=1", "grace-topk")
    assert main(Options(table="links", links=("loopback",), methods=methods, quick=True)) == 0
    shown = capfd.readouterr().out
    assert "no rows for grace-topk: no checkout of grace" in shown
    assert shown.count("replicas equal: True") == 3  # and none differs, as it must


def test_names_of_methods() -> None:
    assert codec_of("own:powersgd:rank=4@3") == codec_of("hook:powersgd:rank=4") == "powersgd:rank=4"
    assert codec_of("ddp") is None
    assert split_lanes("onebit@4") == ("onebit", 4)
    with pytest.raises(UsageError, match="'many' lanes"):
        split_lanes("onebit@many")
    for codec in CODECS:
        parse_codec(codec)


def test_places() -> None:
    assert (place_of("1gbit"), place_of("1gbit+1ms:4")) == (("1gbit", 2, 1), ("1gbit+1ms", 4, 1))
    assert place_of("1gbit+1ms:2x4") == ("1gbit+1ms", 8, 4)
    for wrong in ("1gbit:1", "1gbit:x", "1gbit:", "1gbit:1x4", "1gbit:4x4", "1gbit:2x", "fast"):
        with pytest.raises(UsageError):
            place_of(wrong)
    with pytest.raises(UsageError, match="unknown codec 'onbit'"):
        main(Options(methods=("own:onbit",)))
