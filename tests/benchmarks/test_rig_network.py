"""Tests the network of the benchmark rig: namespaces, rates of shaped links, ranks, and the removal of all of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rig import network as network_module
from benchmarks.rig.launch import launch
from benchmarks.rig.network import INTERFACE, Network, missing, sweep
from hybridpar.errors import LaunchError, UsageError
from tests.waiting import eventually, running

ROOT = Path(__file__).parents[2]


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"hprig-{pid}-")]


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
    own = os.getpid()
    started = network_module._started(own)
    dead = f"hprig-{dead_pid()}-12345-0-r0"
    recycled = f"hprig-{own}-{int(started) + 1}-0-bridge"  # the pid lives, but it is another process's by now
    kept = [f"hprig-{own}-{started}-0-r1", "other", "hprig-1", f"my{dead}", f"{dead}x"]
    removed: list[str] = []
    monkeypatch.setattr(network_module, "_namespaces", lambda: [*kept, dead, recycled])
    monkeypatch.setattr(network_module, "_remove", removed.append)
    assert sweep() == removed == [dead, recycled]


def test_ranks_know_their_place_and_share_their_settings(tmp_path: Path) -> None:
    code = "import json, os; json.dump(dict(os.environ), open(os.environ['TO'] + os.environ['RANK'], 'w'))"
    with Network(3) as network:
        launch(["-c", code], network, threads=2, environment={"TO": f"{tmp_path}/"})
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [rank["RANK"] for rank in told] == ["0", "1", "2"]
    for rank in told:
        expected = {
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": told[0]["MASTER_PORT"],
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "2",
            "MKL_NUM_THREADS": "2",
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(1 << 46),
            "MALLOC_ARENA_MAX": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        assert expected.items() <= rank.items()
        assert str(ROOT) in rank["PYTHONPATH"].split(os.pathsep)


# Every rank and a child of it say who they are, then wait for longer than any test.
SLEEPER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
path = pathlib.Path(os.environ["TO"], os.environ["RANK"])
path.with_suffix(".tmp").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".tmp").rename(path)
"""


def pids_in(folder: Path, ranks: int = 2) -> list[int]:
    eventually(lambda: all((folder / str(rank)).exists() for rank in range(ranks)))
    return [int(pid) for rank in range(ranks) for pid in (folder / str(rank)).read_text().split()]


def test_a_rank_that_fails_is_shown_and_takes_the_rest_along(tmp_path: Path) -> None:
    wait = "\nwhile len(list(pathlib.Path(os.environ['TO']).glob('?'))) < 2: time.sleep(0.01)"
    end = "print('boom', file=sys.stderr); sys.exit(3)"
    code = f"{SLEEPER}{wait}\nif os.environ['RANK'] == '1': {end}\ntime.sleep(300)"
    with Network(2) as network, pytest.raises(LaunchError, match=r"rank 1 \(.*exit status 3\)") as caught:
        launch(["-c", code], network, environment={"TO": str(tmp_path)})
    assert "boom" in str(caught.value)
    eventually(lambda: not any(map(running, pids_in(tmp_path))))


# An owner of a network whose ranks wait; it is what the tests below end in all ways.
OWNER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignore"
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # so does a child of nohup
from benchmarks.rig.network import Network
from benchmarks.rig.__main__ import Options, main
from benchmarks.rig.launch import launch
with Network(2, sys.argv[1]) as network:
    launch(["-c", sys.argv[2] + "\\ntime.sleep(300)"], network, environment={"TO": sys.argv[3]})
"""


def start_owner(rate: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", OWNER, rate, SLEEPER, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_ranks_do_not_outlive_a_launcher_that_was_killed(tmp_path: Path) -> None:
    owner = start_owner("loopback", tmp_path)
    ranks = pids_in(tmp_path)[::2]
    owner.kill()
    owner.wait()
    eventually(lambda: not any(map(running, ranks)))


# ---------------------------------------------------------------------------------------------------- with root

shaped = pytest.mark.skipif(bool(missing()), reason=missing() or "can shape links")


@pytest.mark.root
@shaped
def test_both_ends_of_every_cable_have_its_rate() -> None:
    with Network(3, "100mbit") as network:
        ranks = [network.command(rank, [])[3] for rank in range(3)]
        ends = [(ranks[0].removesuffix("-r0") + "-bridge", f"port{rank}") for rank in range(3)]
        for namespace, device in [*ends, *((rank, INTERFACE) for rank in ranks)]:
            shown = subprocess.check_output(["tc", "-n", namespace, "qdisc", "show", "dev", device], text=True)
            assert "tbf" in shown
            assert "rate 100Mbit burst 128Kb" in shown


@pytest.mark.root
@shaped
def test_a_rank_counts_what_its_namespace_counts(tmp_path: Path) -> None:
    output = tmp_path / "output"
    code = "from benchmarks.rig.rank import link, sent_bytes; print(sent_bytes(), link())"
    with Network(2, "1gbit") as network:
        before = network.tx_bytes(0)
        with output.open("w") as file:
            launch(["-c", code], network, timeout=120, stdout=file)
        after = network.tx_bytes(0)
    counted, link = output.read_text().split()
    assert before <= int(counted) <= after
    assert link == "1gbit"


def fail_inside_two_networks() -> None:
    with Network(2, "1gbit"), Network(4, "100mbit"):
        assert len(namespaces_of(os.getpid())) == 2 + 5
        raise KeyError


@pytest.mark.root
@shaped
def test_nothing_is_left_after_an_exception_and_nothing_else_is_touched() -> None:
    foreign = f"hpother-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    try:
        with pytest.raises(KeyError):
            fail_inside_two_networks()
        assert namespaces_of(os.getpid()) == []
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert foreign in listed
        links = subprocess.run(["ip", "-o", "link", "show"], capture_output=True, text=True, check=True).stdout
        assert INTERFACE not in links
    finally:
        subprocess.run(["ip", "netns", "del", foreign], check=True)


@pytest.mark.root
@shaped
def test_nothing_is_left_after_a_signal(tmp_path: Path) -> None:
    owner = start_owner("1gbit", tmp_path)
    pids = pids_in(tmp_path)
    assert len(namespaces_of(owner.pid)) == 2
    owner.send_signal(signal.SIGTERM)
    assert owner.wait(timeout=60) == 143
    assert namespaces_of(owner.pid) == []
    eventually(lambda: not any(map(running, pids)))
