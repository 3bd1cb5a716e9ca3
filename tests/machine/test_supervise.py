"""Tests what the launcher of a run with servers does when a process dies; its processes do not train."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from hybridpar.machine import supervise
from hybridpar.machine.supervise import check_processes, launch_workers

#: Each process notes that it was started, then does what it is told, by its name and how often it was started.
PROGRAM = """
import json, os, pathlib, signal, sys, time
rank, again = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
place = pathlib.Path(sys.argv[1])
act = json.loads(sys.argv[2]).get(f"{rank}:{again}", "ends")
def stop(*_):
    if act == "tells":  # how the run ended
        pathlib.Path(os.environ["HYBRIDPAR_VERDICT"]).with_name("told").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
with open(place / "starts", "a") as file:
    file.write(f"{rank}:{again}:{os.environ['HYBRIDPAR_JOINS']} ")
if act in ("dies", "verdict"):  # not before the others have begun
    late = time.monotonic() + 20
    while len((place / "starts").read_text().split()) < 3 * (again + 1) and time.monotonic() < late:
        time.sleep(0.01)
if act == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if act == "verdict":
    open(os.environ["HYBRIDPAR_VERDICT"], "w").write(json.dumps({"text": "error: it is wrong", "code": 2}))
    sys.exit(0)
if act in ("waits", "tells"):
    time.sleep(30)
if act == "looks":
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    rows = [row.split() for file in ("/proc/net/tcp", "/proc/net/tcp6") for row in open(file)]
    door = [row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"]  # the state of one that listens
    (place / f"found-{rank}").write_text(json.dumps([door, os.environ["HYBRIDPAR_TOKEN"]]))
if act == "lags":
    time.sleep(1.0)
"""


@pytest.fixture
def settles(monkeypatch):
    """Nobody waits long for others to fail: in these tests a single process fails, and the others wait in vain."""
    monkeypatch.setattr(supervise, "_SETTLE_SECONDS", 0.1)


def launch(
    place: Path, acts: str, workers: int = 2, servers: int = 1, *, patient: bool = False, restarts: int = 3
) -> int:
    program = ("-S", "-c", PROGRAM)
    return launch_workers([str(place), acts], workers, servers, patient=patient, restarts=restarts, program=program)


def starts(place: Path) -> list[str]:
    return sorted((place / "starts").read_text().split())


def test_more_workers_than_cores_are_a_line(monkeypatch, capsys):
    monkeypatch.setattr(supervise, "available_cores", lambda: [0, 1])
    monkeypatch.setattr(supervise, "usable_memory", lambda: 1 << 40)
    check_processes(2)
    assert not capsys.readouterr().err
    check_processes(3)
    assert "3 workers on 2 core(s)" in capsys.readouterr().err


def test_a_worker_that_nobody_waits_for_is_replaced_alone(tmp_path, capfd):
    assert launch(tmp_path, '{"1:0": "dies", "0:0": "lags", "2:0": "lags"}') == 0
    assert starts(tmp_path) == ["0:0:0", "1:0:0", "1:1:1", "2:0:0"]
    assert "worker 1 was killed by signal 9; the others go on" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("acts", "patient", "who"),
    [
        ('{"2:0": "dies", "0:0": "waits", "1:0": "waits"}', False, "server 0"),
        ('{"0:0": "dies", "1:0": "waits", "2:0": "waits"}', False, "worker 0"),
        ('{"1:0": "dies", "0:0": "waits", "2:0": "waits"}', True, "worker 1"),
    ],
)
def test_what_all_wait_for_has_all_start_again(tmp_path, capfd, acts, patient, who):
    assert launch(tmp_path, acts, patient=patient) == 0
    assert starts(tmp_path) == ["0:0:0", "0:1:0", "1:0:0", "1:1:0", "2:0:0", "2:1:0"]
    assert f"{who} was killed by signal 9; all processes start again" in capfd.readouterr().err


def test_restarts_are_counted(tmp_path, capfd):
    assert launch(tmp_path, '{"2:0": "dies", "2:1": "dies", "0:0": "waits", "0:1": "waits"}', restarts=1) == 1
    assert "server 0 was killed by signal 9, and 1 restarts are used up" in capfd.readouterr().err


@pytest.mark.usefixtures("settles")
def test_a_verdict_ends_everything(tmp_path, capfd):
    assert launch(tmp_path, '{"1:0": "verdict", "0:0": "waits", "2:0": "waits"}') == 2
    assert capfd.readouterr().err == "error: it is wrong\n"
    assert starts(tmp_path) == ["0:0:0", "1:0:0", "2:0:0"]


def test_a_signal_is_passed_on_to_workers(tmp_path):
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert launch(tmp_path, '{"0:0": "waits", "1:0": "waits"}') == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nobody_outside_reaches_the_store_and_every_start_has_a_token_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDPAR_TOKEN", "that of another job")
    tokens = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert launch(tmp_path / name, '{"0:0": "looks", "2:0": "looks"}') == 0
        found = [json.loads((tmp_path / name / f"found-{rank}").read_text()) for rank in (0, 2)]
        assert [door for door, _ in found] == [[f"0100007F:{found[0][0][0][-4:]}"]] * 2  # 127.0.0.1
        tokens |= {token for _, token in found}
    assert len(tokens) == 2
    assert all(len(token) == 32 for token in tokens)
