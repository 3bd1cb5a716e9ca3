"""Starts a run on several machines: reads the hosts file, writes the torchrun lines and the Slurm script, uses ssh.

A line of the hosts file is a host as ssh names it, and perhaps `slots=N`, `address=A` and `port=P`:

    gpu-a slots=4
    me@gpu-b slots=4 address=10.0.0.2

torchrun gives the first ranks to the host whose address comes first in alphabetical order, so hosts are used in that
order, and the first one also serves the rendezvous. With ssh each host runs `hybridpar.machine.node`, which starts
torchrun there and ends it when it is told to, or when the connection breaks.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from hybridpar.errors import UsageError, shortened
from hybridpar.machine.node import VERDICT_MARK
from hybridpar.machine.supervise import LEAVE_SECONDS, STOP_SECONDS, TOKEN_VARIABLE, new_token

PORT = 29500
#: How often torchrun starts the workers again.
RESTARTS = 3
#: Variables of this shell that the workers of other hosts get, too.
_PASSED_ON = ("HYBRIDPAR_", "NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS", "PYTHONPATH")
#: So that a host that is down, or dies, is noticed, and nothing asks for a password.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
#: ssh's own exit code where it could not connect.
_NO_CONNECTION = 255

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:-]*")


@dataclass(frozen=True)
class Host:
    """One machine of a run.

    Attributes:
        name: As ssh is to be told it.
        address: By which the other hosts reach it.
        slots: Workers on it; None where nobody said.
        port: Of the rendezvous, where it is the first host.
    """

    name: str
    address: str
    slots: int | None = None
    port: int = PORT


def read_hosts(path: Path) -> list[Host]:
    """Read a hosts file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"--hosts {path}: {told}", fix="Name a file with a host per line.") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            hosts.append(_host(words, f"{path}, line {number}"))
    if not hosts:
        raise UsageError(f"--hosts {path} names no host", fix="Write one per line, such as `gpu-a slots=4`.")
    addresses = [host.address for host in hosts]
    twice = next((one for one in addresses if addresses.count(one) > 1), None)
    if twice is not None:
        raise UsageError(
            f"--hosts {path} names {twice} twice", "A host has one line.", "Say with slots=N how many workers it runs."
        )
    return sorted(hosts, key=lambda host: host.address)


def _host(words: Sequence[str], place: str) -> Host:
    name, *options = words
    rule, fix = "A line is a host, then perhaps slots=N, address=A and port=P.", "Write such as `gpu-a slots=4`."
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"{place}: {shortened(name)} is no name of a host", rule, fix)
    host = Host(name, name.rpartition("@")[2])
    for option in options:
        key, _, value = option.partition("=")
        whole = int(value) if value.isascii() and value.isdigit() else 0
        if key == "slots" and whole > 0:
            host = replace(host, slots=whole)
        elif key == "port" and 0 < whole < 1 << 16:
            host = replace(host, port=whole)
        elif key == "address" and _NAME.fullmatch(value):
            host = replace(host, address=value)
        else:
            raise UsageError(f"{place}: {shortened(option)}", rule, fix)
    return host


def torchrun_arguments(hosts: Sequence[Host], place: int, slots: int, job: str, arguments: Sequence[str]) -> list[str]:
    """What torchrun is given on one host; behind `--` it takes no option of ours for a short form of its own."""
    first, own = hosts[0], hosts[place]
    return [
        *("--nnodes", str(len(hosts)), "--nproc-per-node", str(own.slots or slots)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:{first.port}", "--rdzv-id", job),
        *("--rdzv-conf", f"is_host={str(place == 0).lower()}", "--local-addr", own.address),
        *("--max-restarts", str(RESTARTS), "-m", "--", "hybridpar", *arguments),
    ]


def torchrun_lines(hosts: Sequence[Host], slots: int, arguments: Sequence[str]) -> str:
    """The command lines to start on each host, with comments."""
    job = new_job()
    lines = [f"# Start each line on its host, in {Path.cwd()}; `--launch ssh` does it for you."]
    for place, host in enumerate(hosts):
        lines += [
            f"# on {host.name}:",
            f"torchrun {shlex.join(torchrun_arguments(hosts, place, slots, job, arguments))}",
        ]
    return "\n".join(lines)


def new_job() -> str:
    """A name that no other job has."""
    return f"hybridpar-{secrets.token_hex(4)}"


def slurm_script(name: str, workers: int | None, arguments: Sequence[str], *, servers: bool = False) -> str:
    """A batch script for Slurm, with a torchrun per node."""
    python, secret = (
        shlex.quote(sys.executable),
        f"export {TOKEN_VARIABLE}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')",
    )
    count = '"${SLURM_GPUS_ON_NODE:-1}"' if workers is None else str(workers)
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by hybridpar. Submit it with `sbatch FILE`; `sbatch --nodes 4 FILE` takes another number.",
            f"#SBATCH --job-name={name}",
            "#SBATCH --nodes=2",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={workers or 1}",
            "#SBATCH --output=%x-%j.out",
            "# Two minutes before its time is over the workers save and stop; go on with --resume.",
            "#SBATCH --signal=TERM@120",
            "# Without GPUs, replace --gpus-per-node above by --cpus-per-task.",
            "set -euo pipefail",
            f"cd {shlex.quote(str(Path.cwd()))}",
            *([secret] if servers else []),
            'export FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export PORT=$((20000 + SLURM_JOB_ID % 10000))",
            "# In single quotes, so that each node puts in its own name and number.",
            "srun --kill-on-bad-exit=1 bash -c '",
            f'exec "$0" -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node {count} \\',
            '    --rdzv-backend c10d --rdzv-endpoint "$FIRST:$PORT" --rdzv-id "$SLURM_JOB_ID" \\',
            '    --rdzv-conf "is_host=$((SLURM_NODEID == 0))" --local-addr "$SLURMD_NODENAME" \\',
            f'    --max-restarts {RESTARTS} -m -- hybridpar "$@"',
            f"' {python} {shlex.join(arguments)}",
            "",
        ]
    )


# ----------------------------------------------------------------------------------------------------------------- ssh


class _Remote:
    """A host on which a part of the run goes on, behind an ssh of our own."""

    def __init__(self, host: Host, command: str, order: Mapping[str, object], alone: bool) -> None:
        self.host = host
        #: What a worker there has said about an error that would only come again.
        self.verdict = ""
        #: Whether what it says is of no interest: it is stopped because another host has failed.
        self.is_quiet = False
        self._alone = alone
        try:
            self.process = subprocess.Popen(
                [*_SSH, host.name, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C comes from us, as a word
            )
        except OSError as error:
            raise UsageError(
                f"--launch ssh: cannot run ssh: {error.strerror}",
                fix="Install it, or leave --launch away and start the lines yourself.",
            ) from error
        self.say(json.dumps(order))
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._readers = [threading.Thread(target=self._pass_on, args=pair, daemon=True) for pair in streams]
        for reader in self._readers:
            reader.start()

    def say(self, word: str) -> None:
        """Tell the host something."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()

    def end(self, patience: float) -> None:
        """Wait for its end, at most so long; then break the connection, which ends all that runs there."""
        assert self.process.stdin is not None
        for seconds, give_up in ((patience, self.process.stdin.close), (LEAVE_SECONDS, self.process.kill)):
            try:
                self.process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                with suppress(OSError):
                    give_up()
        self.process.wait()
        for reader in self._readers:
            reader.join(1.0)

    def _pass_on(self, source: IO[str], sink: IO[str]) -> None:
        """What the first rank reports is shown as it is; messages begin with the name of their host."""
        mark = f"[{self.host.name}] " if sink is sys.stderr and not self._alone else ""
        for line in source:
            if line.startswith(VERDICT_MARK):
                self.verdict = json.loads(line.removeprefix(VERDICT_MARK))
            elif not self.is_quiet:
                print(f"{mark}{line}", end="", file=sink, flush=True)


def launch_by_ssh(hosts: Sequence[Host], slots: int, arguments: Sequence[str]) -> int:
    """Start torchrun on all hosts, show what it says, and stop all when one fails or at Ctrl-C.

    The same directory and the same Python are used on every host.
    """
    job, environment = new_job(), {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    environment.setdefault(TOKEN_VARIABLE, new_token())
    # What the interpreter itself needs; the rest follows by the input.
    path = shlex.quote(f"PYTHONPATH={environment.get('PYTHONPATH', '')}")
    python = f"{shlex.quote(sys.executable)} -m hybridpar.machine.node"
    command = f"cd {shlex.quote(str(Path.cwd()))} && exec env {path} {python}"
    stops: list[int] = []
    before = {
        kind: signal.signal(kind, lambda number, _: stops.append(number)) for kind in (signal.SIGINT, signal.SIGTERM)
    }
    remotes: list[_Remote] = []
    try:
        for place, host in enumerate(hosts):
            order = {"arguments": torchrun_arguments(hosts, place, slots, job, arguments), "environment": environment}
            remotes.append(_Remote(host, command, order, alone=len(hosts) == 1))
        failed = _follow(remotes, stops)
    finally:
        for remote in remotes:
            remote.is_quiet = True
            remote.say("TERM")
        for remote in remotes:
            remote.end(LEAVE_SECONDS)
        for number, handler in before.items():
            signal.signal(number, handler)
    if stops:
        print(f"stopped on {len(hosts)} host{'' if len(hosts) == 1 else 's'}", file=sys.stderr)
        return 128 + stops[0]
    return 0 if failed is None else _tell_failure(remotes, failed)


def _follow(remotes: Sequence[_Remote], stops: list[int]) -> _Remote | None:
    """Wait until all hosts are done, one has failed, or a signal has ended the run; the one that failed."""
    told, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        time.sleep(0.05)
        codes = [remote.process.poll() for remote in remotes]
        if len(stops) > told:
            told = len(stops)
            deadline = time.monotonic() + (STOP_SECONDS if told == 1 else LEAVE_SECONDS)
            for remote in remotes:
                remote.say("INT" if told == 1 else "TERM")
        failed = next((place for place, code in enumerate(codes) if code), None)
        if failed is not None and not stops:
            remotes[failed].end(1.0)  # its last words come first
            return remotes[failed]
        if None not in codes:
            break
    return None


def _tell_failure(remotes: Sequence[_Remote], failed: _Remote) -> int:
    """Say why the run has ended, once for all hosts; the exit code."""
    code, name = failed.process.returncode, failed.host.name
    if failed.verdict:
        same = len({remote.verdict for remote in remotes}) == 1
        print(
            failed.verdict if same else f"{failed.verdict}\n({name} says so; all hosts were stopped)", file=sys.stderr
        )
        return code
    if code == _NO_CONNECTION:
        what = "cannot be reached by ssh, or the connection broke"
        fix = f"Try `ssh {name} true`: it must work without a password."
    else:
        what = f"ended with {code}" if code > 0 else f"was lost: ssh was killed by signal {-code}"
        fix = f"Its messages are above; {Path.cwd()} and {sys.executable} must be there too."
    others = "; the other hosts were stopped" if len(remotes) > 1 else ""
    print(f"error: {name} {what}{others}\n{fix}", file=sys.stderr)
    return code if 0 < code < _NO_CONNECTION else 1
