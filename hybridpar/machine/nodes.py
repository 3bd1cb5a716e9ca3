"""Starts a run on several machines: reads the hosts file, writes the torchrun lines, uses ssh.

A line of the hosts file is a host as ssh names it, and perhaps `slots=N`, `address=A` and `port=P`:

    gpu-a slots=4
    me@gpu-b slots=4 address=10.0.0.2

torchrun gives the first ranks to the host whose address comes first in alphabetical order, so hosts are used in that
order, and workers meet on the first one. With ssh each host runs an agent (`hybridpar.machine.supervise`), which starts
its workers; this process watches the agents as a launcher watches workers.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from hybridpar.errors import UsageError, shortened
from hybridpar.machine.supervise import (
    FILE_MARK,
    LEAVE_SECONDS,
    LOST_WORKER,
    RESTARTS,
    TOKEN_VARIABLE,
    Job,
    new_job,
    new_token,
    supervise,
)

PORT = 29500
#: Variables of this shell that the workers of other hosts get, too.
_PASSED_ON = ("HYBRIDPAR_", "NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS", "PYTHONPATH")
#: So that a host that is down, or dies, is noticed, and nothing asks for a password.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
#: ssh's own exit code where it could not connect.
_NO_CONNECTION = 255

#: A file that an agent hands on; no other name comes from there.
_LEFT = re.compile(rf"{FILE_MARK}(?P<name>verdict\.json|told) (?P<text>.*)")

#: Digits alone, which Python and pydantic read more than.
_Whole = Annotated[int, BeforeValidator(lambda text: int(text) if re.fullmatch("[0-9]{1,9}", str(text)) else None)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@:-]*$")]


@dataclass(frozen=True)
class Host:
    """One machine of a run.

    Attributes:
        name: As ssh is to be told it.
        address: By which the other hosts reach it.
        slots: Workers on it; None where nobody said.
        port: At which workers meet, where it is the first host.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: _Name
    address: _Name
    slots: Annotated[_Whole, Field(gt=0)] | None = None
    port: Annotated[_Whole, Field(gt=0, lt=1 << 16)] = PORT


def read_hosts(path: Path) -> list[Host]:
    """Read a hosts file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"--hosts {path}: {reason}", fix="Name a file with a host per line.") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            hosts.append(_host(words, f"{path}, line {number}"))
    if not hosts:
        raise UsageError(f"--hosts {path} names no host", fix="Write one per line, such as `gpu-a slots=4`.")
    addresses = [host.address for host in hosts]
    twice = next((address for address in addresses if addresses.count(address) > 1), None)
    if twice is not None:
        raise UsageError(
            f"--hosts {path} names {twice} twice", "A host has one line.", "Say with slots=N how many workers it runs."
        )
    return sorted(hosts, key=lambda host: host.address)


def _host(words: Sequence[str], where: str) -> Host:
    name, *options = words
    given = dict(option.partition("=")[::2] for option in options)
    what = shortened(f"name={given['name']}") if "name" in given else ""
    if not what:
        try:
            return TypeAdapter(Host).validate_python({"address": name.rpartition("@")[2], **given, "name": name})
        except ValidationError as error:
            key = str(error.errors()[0]["loc"][0])
            what = shortened(f"{key}={given[key]}") if key in given else f"{shortened(name)} is no name of a host"
    rule = "A line is a host, then perhaps slots=N, address=A and port=P."
    raise UsageError(f"{where}: {what}", rule, "Write such as `gpu-a slots=4`.")


def torchrun_lines(hosts: Sequence[Host], slots: int, arguments: Sequence[str]) -> str:
    """The command lines to start on each host, with comments."""
    first, job = hosts[0], new_job()
    lines = [f"# Start each line on its host, in {Path.cwd()}; `--hosts ssh:FILE` does it for you."]
    for host in hosts:
        words = [
            *("torchrun", "--nnodes", str(len(hosts)), "--nproc-per-node", str(host.slots or slots)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:{first.port}", "--rdzv-id", job),
            *("--rdzv-conf", f"is_host={str(host is first).lower()}", "--local-addr", host.address),
            # Behind `--` torchrun takes no option of ours for a short form of its own.
            *("--max-restarts", str(RESTARTS), "-m", "--", "hybridpar", *arguments),
        ]
        lines += [f"# on {host.name}:", shlex.join(words)]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------- ssh


class _Agent(subprocess.Popen[str]):
    """An agent on another host, behind an ssh of our own."""

    def __init__(self, host: Host, command: str, order: dict[str, object], verdict: Path, alone: bool) -> None:
        self._mark, self._verdict, self._quiet = "" if alone else f"[{host.name}] ", verdict, False
        try:
            super().__init__(
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
                f"cannot run ssh: {error.strerror}",
                fix="Install it, or start the lines that --hosts FILE prints.",
            ) from error
        self._say(json.dumps(order))
        streams = ((self.stdout, sys.stdout), (self.stderr, sys.stderr))
        self._readers = [threading.Thread(target=self._pass_on, args=pair, daemon=True) for pair in streams]
        for reader in self._readers:
            reader.start()

    def poll(self) -> int | None:
        """Whether it has ended; its last words come first."""
        code = super().poll()
        # Once, as the streams do not end while another process holds them: an ssh that stays for further connections.
        while code is not None and self._readers:
            self._readers.pop().join(1.0)
        return code

    def send_signal(self, number: int) -> None:
        """Hand a signal on; SIGKILL breaks the connection, which ends all that runs there."""
        assert self.stdin is not None
        if number != signal.SIGKILL:
            self._say(signal.Signals(number).name.removeprefix("SIG"))
            return
        self._quiet = True
        with suppress(OSError):
            self.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.wait(LEAVE_SECONDS)
        super().send_signal(number)  # an ssh that goes on all the same

    def _say(self, line: str) -> None:
        assert self.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            self.stdin.write(line + "\n")
            self.stdin.flush()

    def _pass_on(self, source: IO[str], sink: IO[str]) -> None:
        """What the first rank reports is shown as it is; messages begin with the name of their host."""
        for line in source:
            # The last line of a worker has no end where a progress bar was cut off.
            if left := _LEFT.search(line):
                file = self._verdict.with_name(left["name"])
                with suppress(FileExistsError), file.open("x", encoding="utf-8") as copy:  # the first stands
                    copy.write(left["text"])
                line = line[: left.start()] and f"{line[: left.start()]}\n"
            if line and not self._quiet:
                print(f"{self._mark if sink is sys.stderr else ''}{line}", end="", file=sink, flush=True)


@dataclass(kw_only=True)
class _JobOnHosts(Job):
    """A job whose processes are agents, one on each host."""

    hosts: Sequence[Host]
    slots: int

    def begin(self, index: int, joins: int = 0) -> _Agent:
        """Start the agent of a host, in the same directory and with the same Python as here."""
        counts = [host.slots or self.slots for host in self.hosts]
        order = {
            "program": self.program,
            "environment": self.environment,
            "workers": counts[index],
            "first": sum(counts[:index]),
            "size": sum(counts),
            "attempt": self.attempt,
        }
        # What the interpreter itself needs; the rest follows by the input.
        path = shlex.quote(f"PYTHONPATH={self.environment.get('PYTHONPATH', '')}")
        python = f"{shlex.quote(sys.executable)} -m hybridpar.machine.supervise"
        command = f"cd {shlex.quote(str(Path.cwd()))} && exec env {path} {python}"
        return _Agent(self.hosts[index], command, order, self.verdict, len(self.hosts) == 1)

    def failure(self, index: int) -> tuple[str, str]:
        """Which host failed and how; only the loss of a worker is worth a restart."""
        code, name = self.processes[index].returncode or 0, self.hosts[index].name
        others = "; the other hosts were stopped" if len(self.hosts) > 1 else ""
        if code == LOST_WORKER:
            return f"{name} has lost a worker", ""
        if code == _NO_CONNECTION:
            fix = f"Try `ssh {name} true`: it must work without a password.\n"
            return f"{name} cannot be reached by ssh, or the connection broke{others}", fix
        if code < 0:
            fix = "Start it again with --resume: it goes on from the last whole checkpoint.\n"
            return f"{name} was lost: ssh was killed by signal {-code}{others}", fix
        fix = f"{Path.cwd()} and {sys.executable} must be there too.\n"
        return f"{name} ended with {code}{others}", fix


def launch_by_ssh(
    hosts: Sequence[Host], slots: int, arguments: Sequence[str], program: Sequence[str] = ("-m", "hybridpar")
) -> int:
    """Start a job on all hosts, show what it says, and stop all when a host fails or at Ctrl-C."""
    environment = {
        TOKEN_VARIABLE: new_token(),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else each worker that has lost the store shows a stack of C++
        **{name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)},
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(hosts[0].port),
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "TORCHELASTIC_RUN_ID": new_job(),
    }
    command = (*program, *arguments)
    return supervise(
        _JobOnHosts(workers=len(hosts), hosts=hosts, slots=slots, program=command, environment=environment)
    )
