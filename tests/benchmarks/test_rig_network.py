"""Tests the network of the benchmark rig: namespaces, rates of shaped links, ranks, and the removal of all of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.rig import network as network_module
from benchmarks.rig.launch import launch
from benchmarks.rig.network import Network, sweep
from hybridpar.errors import LaunchError, UsageError
from tests.waiting import eventually, running

ROOT = Path(__file__).parents[2]


def dead_pid() -> int:
    gone = subprocess.Popen(["true"])
    gone.wait()
    return gone.pid


# ---------------------------------------------------------------------------------------------------- without root


@pytest.mark.parametrize("rate", ["", "fast", "1", "0mbit", "-1gbit", "1gbit; reboot"])
def test_what_is_no_rate_is_refused(rate: str) -> None:
    with pytest.raises(UsageError, match="Try 1gbit"):
        Network(2, rate)


def test_a_machine_that_cannot_shape_links_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "missing", lambda: "this process is not root")
    monkeypatch.setattr(network_module, "_run", lambda *command: pytest.fail(f"ran {command}"))
    with pytest.raises(LaunchError, match="not root") as caught, Network(2, "1gbit"):
        pytest.fail("entered")
    assert "Run as root" in caught.value.fix
    assert "--rate loopback" in caught.value.fix


def test_only_the_namespaces_of_dead_owners_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.getpid()
    started = network_module._started(mine)
    dead = f"hprig-{dead_pid()}-12345-0-r0"
    recycled = f"hprig-{mine}-{int(started) + 1}-0-bridge"  # the pid lives, but it is another process's by now
    others = [f"hprig-{mine}-{started}-0-r1", "other", "hprig-1", f"my{dead}", f"{dead}x"]
    removed: list[str] = []
    monkeypatch.setattr(network_module, "_namespaces", lambda: [*others, dead, recycled])
    monkeypatch.setattr(network_module, "_remove", removed.append)
    assert sweep() == removed == [dead, recycled]


# Every rank says who it is, and waits for the other; then one fails, and the other waits for longer than any test.
FAILING = """
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["TO"])
(folder / os.environ["RANK"]).write_text(str(os.getpid()))
while len(list(folder.glob("?"))) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    print("boom", file=sys.stderr)
    sys.exit(3)
time.sleep(300)
"""


def test_a_rank_that_fails_is_shown_and_takes_the_rest_along(tmp_path: Path) -> None:
    with Network(2) as network, pytest.raises(LaunchError, match=r"rank 1 \(.*exit status 3\)") as caught:
        launch(["-c", FAILING], network, environment={"TO": str(tmp_path)})
    assert "boom" in str(caught.value)
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    eventually(lambda: not any(map(running, pids)))


# ---------------------------------------------------------------------------------------------------- with root
