"""Tests how a run is started on several machines: by hand, and by ssh (a program of that name).

With network namespaces as machines, and mounts as their disks, the whole way is walked: `root` tests.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from benchmarks.rig.network import Network, missing
from hybridpar.cli import main
from hybridpar.commands.train import Train
from hybridpar.errors import UsageError
from hybridpar.machine.nodes import Host, launch_by_ssh, read_hosts
from hybridpar.machine.supervise import FILE_MARK
from tests.machine.test_supervise import PROGRAM, settles, starts  # noqa: F401
from tests.ranks import run_ranks
from tests.runs import ROOT, check_run, small_arguments, train_rank
from tests.waiting import eventually

TRAIN = ["train", "resnet18", "--data", "digits"]


def hosts_file(place: Path, text: str) -> Path:
    path = place / "hosts"
    path.write_text(text)
    return path


def program(place: Path, name: str, text: str) -> None:
    place.mkdir(exist_ok=True)
    (place / name).write_text("#!/bin/bash\n" + text)
    (place / name).chmod(0o755)


# --------------------------------------------------------------------------------------------------------- hosts file


def test_hosts_are_in_the_order_in_which_torchrun_numbers_them(tmp_path):
    text = "# ours\n\nme@zebra slots=2 address=10.0.0.9 port=2000  # the old one\nant\n10.0.0.10 slots=8\n"
    assert read_hosts(hosts_file(tmp_path, text)) == [
        Host("10.0.0.10", "10.0.0.10", 8),
        Host("me@zebra", "10.0.0.9", 2, 2000),
        Host("ant", "ant"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        ("a\na slots=2\n", "names a twice"),
        ("a slots=two\n", "line 1: slots=two"),
        ("a port=70000\n", "port=70000"),
        ("a gpus=4\n", "gpus=4"),
        ("-oProxyCommand=x\n", "no name of a host"),
    ],
)
def test_what_is_no_hosts_file_is_refused(tmp_path, text, said):
    with pytest.raises(UsageError) as caught:
        read_hosts(hosts_file(tmp_path, text))
    assert said in str(caught.value)


def test_a_hosts_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_hosts(tmp_path / "hosts")


def test_the_lines_are_printed(tmp_path, capsys):
    path = hosts_file(tmp_path, "b\na slots=4\n")
    assert main([*TRAIN, "--hosts", str(path), "--nproc=2", "--run-dir", "my runs"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    first, second = map(shlex.split, lines)
    assert first[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "4"]
    assert second[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "2"]
    assert first[first.index("--rdzv-conf") + 1 :][:3] == ["is_host=true", "--local-addr", "a"]
    assert second[second.index("--rdzv-conf") + 1 :][:3] == ["is_host=false", "--local-addr", "b"]
    for line in (first, second):
        options = [f"--{field.name.replace('_', '-')}" for field in fields(Train)]
        parsed = get_args_parser().parse_args(
            [*line[1:], *options]
        )  # it ends the process at what it could take for its own
        assert [parsed.training_script, *parsed.training_script_args[-len(options) :]] == ["hybridpar", *options]
        assert line[line.index("--rdzv-endpoint") + 1] == "a:29500"
        assert line[line.index("hybridpar") + 1 :] == [*TRAIN, "--run-dir", "my runs"]
    assert first[first.index("--rdzv-id") + 1] == second[second.index("--rdzv-id") + 1]


# ---------------------------------------------------------------------------------------------------------------- ssh


@pytest.fixture
def fake_ssh(tmp_path, monkeypatch):
    """Have `ssh HOST COMMAND` run a script that is given instead of the command."""

    def install(script: str) -> None:
        program(tmp_path / "bin", "ssh", "while [[ $1 == -* ]]; do shift 2; done\nhost=$1\nread -r order\n" + script)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    return install


TWO = [Host("a", "10.0.0.1"), Host("b", "10.0.0.2")]
#: Waits for a word, as the other end does, and leaves a note of it.
WAITS = 'read -r word; echo "$host: $word" >> {notes}; exit 1'


def test_all_hosts_end_well(fake_ssh, capfd):
    fake_ssh('echo "from $host"; echo "$order" | grep -o "first.: [0-9]*" >&2')
    assert launch_by_ssh(TWO, 1, TRAIN) == 0
    out, error = capfd.readouterr()
    assert sorted(out.splitlines()) == ["from a", "from b"]
    assert sorted(error.splitlines()) == ['[a] first": 0', '[b] first": 1']


@pytest.mark.usefixtures("settles")
def test_when_a_host_fails_the_connections_to_the_others_are_closed(fake_ssh, tmp_path, capfd):
    notes = tmp_path / "notes"
    fake_ssh(f'if [ $host = b ]; then echo "last words" >&2; exit 3; fi; {WAITS.format(notes=notes)}')
    assert launch_by_ssh(TWO, 1, TRAIN) == 1
    error = capfd.readouterr().err
    assert "[b] last words" in error
    assert "error: b ended with 3; the other hosts were stopped" in error
    assert notes.read_text() == "a: \n"


@pytest.mark.usefixtures("settles")
def test_a_host_that_cannot_be_reached(fake_ssh, tmp_path, capfd):
    fake_ssh(f"if [ $host = b ]; then exit 255; fi; {WAITS.format(notes=tmp_path / 'notes')}")
    assert launch_by_ssh(TWO, 1, TRAIN) == 1
    assert "error: b cannot be reached by ssh" in capfd.readouterr().err


def test_an_error_that_all_hosts_have_is_shown_once(fake_ssh, capfd):
    verdict = json.dumps({"text": "error: there is no such data set", "code": 2})
    fake_ssh(f"echo '{FILE_MARK}verdict.json {verdict}' >&2; exit 2")
    assert launch_by_ssh(TWO, 1, TRAIN) == 2
    assert "error: there is no such data set" in (error := capfd.readouterr().err)
    assert error.count("error:") == 1


def test_a_signal_goes_to_all_hosts_as_a_word(fake_ssh, tmp_path, capfd):
    notes, before = tmp_path / "notes", signal.getsignal(signal.SIGINT)
    fake_ssh(f"[ $host = a ] && kill -INT $PPID; {WAITS.format(notes=notes)}")
    assert launch_by_ssh(TWO, 1, TRAIN) == 130
    assert sorted(notes.read_text().splitlines()) == ["a: INT", "b: INT"]
    assert "interrupted" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def two_machines(tmp_path, monkeypatch):
    """Two hosts that are this machine, with two workers and one: `ssh` runs what it is given here."""
    program(tmp_path / "bin", "ssh", 'while [[ $1 == -* ]]; do shift 2; done\nexec bash -c "$2"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [Host("a", "127.0.0.1", 2, port), Host("b", "127.0.0.2", 1)]


def launch(hosts: list[Host], place: Path, acts: str) -> int:
    return launch_by_ssh(hosts, 1, [str(place), acts], program=("-S", "-c", PROGRAM))


@pytest.mark.usefixtures("settles")
def test_a_worker_that_dies_has_all_hosts_start_again(two_machines, tmp_path, capfd):
    assert launch(two_machines, tmp_path, '{"2:0": "dies", "0:0": "waits", "1:0": "waits"}') == 0
    assert starts(tmp_path) == ["0:0:0", "0:1:0", "1:0:0", "1:1:0", "2:0:0", "2:1:0"]
    error = capfd.readouterr().err
    assert "[b] worker 2 was killed by signal 9" in error
    assert "b has lost a worker; all processes start again from the last checkpoint" in error


@pytest.mark.parametrize(("act", "said"), [("waits", "interrupted\n"), ("tells", "")])
def test_a_signal_ends_workers_on_all_hosts(two_machines, tmp_path, capfd, act, said):
    def stop() -> None:
        eventually(lambda: len((tmp_path / "starts").read_text().split()) == 3 if (tmp_path / "starts").exists() else 0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    acts = json.dumps({"0:0": act, "1:0": "waits", "2:0": "waits"})
    assert launch(two_machines, tmp_path, acts) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == said


# ------------------------------------------------------------------------------------------------------ the whole way


@pytest.mark.root
@pytest.mark.skipif(bool(missing()), reason=missing() or "can make namespaces")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_two_machines_with_a_shared_directory_and_with_disks_of_their_own(tmp_path, shared):
    """Two namespaces go on with a run of which each has a copy; before, they may have trained it on a shared disk.

    Else two workers here trained it, to whom a directory looks just as a shared one does.
    """
    runs = tmp_path / "runs"
    for name in ("runs", "disk0", "disk1"):
        (tmp_path / name).mkdir()
    hosts = hosts_file(tmp_path, "node1 slots=1 address=10.77.0.2\nnode0 slots=1 address=10.77.0.1\n")
    with Network(2, "1gbit") as network:
        cases = [f"node{n}) run=({shlex.join(network.command(n, []))});;" for n in range(2)]
        program(
            tmp_path / "bin",
            "ssh",
            "while [[ $1 == -* ]]; do shift 2; done\n"
            f"case $1 in {' '.join(cases)} esac\n"
            f'mount=true; [ -n "$OWN_DISKS" ] && mount="mount --bind {tmp_path}/disk${{1#node}} {runs}"\n'
            'exec "${run[@]}" unshare -m sh -c "$mount && $2"\n',
        )
        variables = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        variables |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

        def launch(*options: str, **more: str) -> str:
            arguments = [*small_arguments(runs / "one", "--plan=none", *options), "--hosts", f"ssh:{hosts}"]
            done = subprocess.run(
                [sys.executable, "-m", "hybridpar", *arguments],
                cwd=ROOT,
                env={**variables, **more},
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        if shared:
            assert "checkpoint saved at step 6" in launch("--epochs=1")
        else:
            run_ranks(train_rank, 2, runs / "one", "plain", None, {"plan": "none", "epochs": 1})
        assert check_run(runs / "one", steps=6)["workers"] == 2
        for disk in ("disk0", "disk1"):
            shutil.copytree(runs / "one", tmp_path / disk / "one")
        launch("--epochs=2", "--resume", OWN_DISKS="1")
        assert check_run(tmp_path / "disk0" / "one", steps=12)["resumed_from"] == 6
        assert sorted(one.name for one in (tmp_path / "disk1" / "one" / "checkpoints").iterdir()) == ["step-6"]
        parts = tmp_path / "disk0" / "one" / "checkpoints" / "step-12"
        assert {"rank-0.pt", "rank-1.pt"} <= {one.name for one in parts.iterdir()}
        machines = [network.command(n, [])[3] for n in range(2)]
        # No process is left on a machine.
        eventually(lambda: not any(subprocess.check_output(["ip", "netns", "pids", one]) for one in machines))
