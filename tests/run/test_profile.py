"""Tests that a profile names lanes, exchanges and codecs, and that it cannot end a run."""

from __future__ import annotations

import gzip
import json

from hybridpar.comm.flight import FLIGHT
from tests.ranks import run_ranks
from tests.runs import check_run, train, train_rank


def test_every_worker_writes_a_trace_with_lanes_exchanges_and_codecs_by_name(tmp_path):
    options = {"steps": 7, "profile": True, "compress": "onebit"}
    assert run_ranks(train_rank, 2, tmp_path / "run", "plain", None, options) == [0, 0]
    check_run(tmp_path / "run", steps=7)
    for rank in range(2):
        with gzip.open(tmp_path / "run" / "profile" / f"rank-{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        threads = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
        ranges = {(event["name"], threads[event["tid"]]) for event in events if event.get("cat") == "user_annotation"}
        assert {name for name, _ in ranges if name.startswith("step ")} == {"step 4", "step 5", "step 6"}
        assert ("0F0", "main thread") in ranges
        assert ("adding gradients of stage 0 over its replicas", "lane sync-0") in ranges
        assert ("exchanging statistics of stage 0", "lane control") in ranges
        assert ("encode RowSigns", "main thread") in ranges
        assert any(event.get("cat") == "cpu_op" for event in events)


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("in the way")
    assert train(tmp_path / "run", steps=5, profile=True) == 0
    assert "warning: there is no profile" in capsys.readouterr().out
    assert not FLIGHT.names_ranges
