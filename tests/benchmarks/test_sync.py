"""Tests the benchmark of gradient synchronisation: short runs of its tables, and the names of its methods.

A full table takes an hour, so errors would be found late.
"""

from __future__ import annotations

import pytest

from benchmarks.sync.main import CODECS, Options, main, parse_layout
from benchmarks.sync.methods import codec_of, split_lanes
from hybridpar.compress.policy import parse_codec
from hybridpar.errors import UsageError


def test_the_links_table_runs(capfd: pytest.CaptureFixture[str]) -> None:
    methods = ("ddp", "own:onebit@1", "hook:powersgd:rank=1", "grace-topk")
    main(Options(table="links", links=("loopback",), methods=methods, rounds=20, quick=True))
    shown = capfd.readouterr().out
    assert "no rows for grace-topk: no checkout of grace" in shown
    assert shown.count("replicas_equal True") == 3  # and none differs, as it must


def test_names_of_methods() -> None:
    assert codec_of("own:powersgd:rank=4@3") == codec_of("hook:powersgd:rank=4") == "powersgd:rank=4"
    assert codec_of("ddp") is None
    assert split_lanes("onebit@4") == ("onebit", 4)
    with pytest.raises(UsageError, match="'many' lanes"):
        split_lanes("onebit@many")
    for method in CODECS:
        parse_codec(codec_of(method) or "")


def test_links_and_their_ranks() -> None:
    assert (parse_layout("1gbit"), parse_layout("1gbit+1ms:4")) == (("1gbit", 2, 1), ("1gbit+1ms", 4, 1))
    assert parse_layout("1gbit+1ms:2x4") == ("1gbit+1ms", 8, 4)
    for wrong in ("1gbit:1", "1gbit:x", "1gbit:", "1gbit:1x4", "1gbit:4x4", "1gbit:2x", "fast"):
        with pytest.raises(UsageError):
            parse_layout(wrong)
    with pytest.raises(UsageError, match="unknown codec 'onbit'"):
        main(Options(methods=("own:onbit",)))
