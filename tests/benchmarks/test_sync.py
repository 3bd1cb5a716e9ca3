"""Tests the benchmark of gradient synchronisation: short runs of its tables, bytes on the wire, and verdicts.

A full table takes an hour, so errors would be found late.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.rig.network import missing
from benchmarks.rig.paired import Paired
from benchmarks.sync import peers as peers_module
from benchmarks.sync import wire
from benchmarks.sync.main import AUTO_LINKS, CODECS, Options, main, methods_at, place_of
from benchmarks.sync.methods import codec_of, split_lanes
from benchmarks.sync.peers import PEERS, checkouts, missing_peers
from benchmarks.sync.promises import PROMISES, REFERENCE, eligible, promised_rows, read_losses
from hybridpar.compress.policy import parse_codec
from hybridpar.errors import UsageError

needs_root = pytest.mark.skipif(bool(missing()), reason=missing() or "links can be shaped")


def test_the_links_table_runs(capfd: pytest.CaptureFixture[str]) -> None:
    methods = ("none", "ddp", "own:onebit@1", "hook:powersgd:rank=1", "grace-topk")
    assert main(Options(table="links", links=("loopback",), methods=methods, quick=True)) == 0
    shown = capfd.readouterr().out
    assert "no rows for grace-topk: no checkout of grace" in shown
    assert shown.count("replicas equal: True") == 3  # and none differs, as it must


@needs_root
@pytest.mark.root
@pytest.mark.sweep
def test_the_links_table_runs_on_a_shaped_link(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(Options(table="links", links=("1gbit", "1gbit:4"), quick=True)) == 0
    shown = capfd.readouterr().out
    assert "promises, 1gbit, 2 ranks" in shown
    assert "interface 0." in shown


@pytest.mark.sweep
def test_the_losses_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(Options(table="loss", methods=("ddp", "own:onebit"), quick=True)) == 0
    assert "loss, own:onebit" in capfd.readouterr().out


def test_bytes_on_the_wire(tmp_path: Path) -> None:
    claims = (wire.Claim("onebit", {"resnet18": 28}), wire.Claim("onbit", {"resnet18": 28}), *wire.CLAIMS[-1:])
    wire.measure(True, str(tmp_path / "wire.csv"), claims)
    first, second = (tmp_path / "wire.csv").read_text().splitlines()[1:]
    assert ",28," in first
    assert ",met," in first
    assert "8 workers" in second


def _run(**milliseconds: float) -> Paired:
    return Paired({name.replace("_", "-"): (ms,) * 20 for name, ms in milliseconds.items()}, 0, 0.0, False)


def test_a_promise_is_judged_against_the_faster_of_its_peers() -> None:
    common = {"claim": "sync", "setting": "s", "link": "1gbit", "ranks": 2}
    result = _run(none=100, ddp=500, ddp_fp16=300, ddp_psgd1=180, epfml_psgd4=150, fast=110, slow=130)
    rows = promised_rows(result, ["fast", "slow"], common, known=True)
    assert [(row.method, row.baseline, row.verdict) for row in rows] == [
        ("fast", "ddp", "met"),  # 4.5 times
        ("fast", "ddp-fp16", "met"),  # 2.7 times
        ("fast", "epfml-psgd4", "met"),  # 1.36 times
        ("fast", "none", "met"),
    ]
    rows = promised_rows(result, ["slow"], common, known=True)
    assert [row.verdict for row in rows] == ["missed", "missed", "missed", "met"]


def test_a_promise_that_was_not_measured_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    common = {"claim": "sync", "setting": "s", "link": "1gbit", "ranks": 2}
    rows = promised_rows(_run(none=100, ddp=500, ddp_psgd1=180, fast=110), ["fast"], common, known=False)
    assert [row.baseline for row in rows] == ["ddp", "none"]
    assert rows[0].extra["loss"] == "not known"
    assert "epfml-psgd4 can be judged" in capsys.readouterr().out


def test_a_codec_with_a_worse_loss_is_not_the_best(tmp_path: Path) -> None:
    table = tmp_path / "loss.csv"
    ours = ["own:onebit@4", "hook:onebit", "own:powersgd:rank=1", "own:hylo"]
    assert eligible(ours, str(table)) == (ours, False)
    common = {"setting": "s", "link": "loopback", "low": 0.0, "high": 1.0}
    losses = {REFERENCE: 0.2, "own:onebit": 0.9, "own:powersgd:rank=1": 0.5, "grace-topk": 0.1}
    rows = [Check(what=f"loss, {name}", value=loss, **common) for name, loss in losses.items()]
    write_checks(rows, str(table), title="sync")
    assert read_losses(table) == losses
    assert eligible(ours, str(table)) == ([], True)
    write_checks([dataclasses.replace(rows[1], value=0.2)], str(table), title="sync")  # taken again: the latest counts
    assert eligible(ours, str(table)) == (["own:onebit@4", "hook:onebit"], True)


def test_every_promise_has_its_methods_in_the_table() -> None:
    for (link, ranks), promises in PROMISES.items():
        named = [*methods_at(Options(), link, ranks), *AUTO_LINKS.get(link, ())]
        for promise in promises:
            assert {*promise.over, *([promise.only] if promise.only else [])} <= set(named)
            assert any(codec_of(name) for name in named)


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


def test_peers_are_found_by_their_folders(tmp_path: Path) -> None:
    assert checkouts(None) == checkouts(tmp_path) == {}
    (tmp_path / "grace").mkdir()
    assert checkouts(tmp_path) == {}, "an empty folder is no checkout"
    (tmp_path / "grace" / "setup.py").touch()
    found = checkouts(tmp_path)
    assert found == {"grace": "unknown"}
    assert set(missing_peers(list(PEERS), found, 2)) == {name for name in PEERS if not name.startswith("grace")}
    assert "wrap" in missing_peers(["seed-qsgdmax6"], {"seed": "1"}, 3)["seed-qsgdmax6"]


def test_importing_a_peer_leaves_the_path_as_it_was(tmp_path: Path) -> None:
    before = list(sys.path)
    with peers_module._importing(tmp_path):
        assert sys.path[0] == str(tmp_path)
    assert sys.path == before
