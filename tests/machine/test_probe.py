from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hybridpar.errors import LaunchError
from hybridpar.machine import probe
from hybridpar.machine.cluster import Device, Link
from hybridpar.machine.probe import Programs, probe_cluster, probe_devices, probe_link

CPU = Device(kind="cpu", name="a CPU", memory_bytes=1 << 30, cores=2, threads=2, bytes_per_second=1e10)
GPU = Device(kind="cuda", name="a GPU", memory_bytes=1 << 30, bytes_per_second=1e12)
ANSWER = "import sys; open(sys.argv[1], 'w').write({!r})"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("HYBRIDPAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(programs: list[str], timeout: float = 60.0) -> str:
    with Programs(programs, "measuring it", workers=1, timeout=timeout) as started:
        return started.answer()


def test_the_first_program_answers_whatever_is_printed():
    first = "print('NCCL version 2.27'); " + ANSWER.format("yes")
    assert run([first, ANSWER.format("no")]) == "yes"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise ImportError('no libcuda')", "measuring it failed: ImportError: no libcuda"),
        ("import os; os.abort()", "measuring it failed: the process was killed by signal 6"),
        ("import sys; sys.exit(3)", "measuring it failed: the process exited with 3"),
    ],
)
def test_a_failing_program_is_told_in_one_line(program, message):
    with pytest.raises(LaunchError) as caught:
        run([program])
    assert caught.value.what == message
    assert "hybridpar doctor" in caught.value.fix


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_failure_stops_all():
    with Programs(["import time; time.sleep(600)", "1/0"], "measuring it", workers=1) as started:
        with pytest.raises(LaunchError, match="ZeroDivisionError"):
            started.answer()
        sleeper = started._processes[0].pid
        assert alive(sleeper)
    assert not alive(sleeper)


def test_a_program_that_hangs_is_stopped_and_quoted():
    program = "import time; print('joining', flush=True); time.sleep(600)"
    with Programs([program], "measuring it", workers=1, timeout=60.0) as started:
        while started._logs[0].read_text() != "joining\n":
            time.sleep(0.01)
        started._deadline = 0.0
        with pytest.raises(LaunchError, match="took more than 60 s; it last said: joining"):
            started.answer()
    assert not alive(started._processes[0].pid)


def test_programs_do_not_see_the_current_directory(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert run(["import json; " + ANSWER.format("fine")]) == "fine"


def test_programs_get_the_environment_of_workers(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(probe, "worker_environment", lambda workers, cores: {"GIVEN": str(workers)})
    monkeypatch.setattr(probe, "_loopback", lambda: "lo9")
    program = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert {"GIVEN": "1", "GLOO_SOCKET_IFNAME": "lo9"}.items() <= json.loads(run([program])).items()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert json.loads(run([program]))["GLOO_SOCKET_IFNAME"] == "eth7", "what the user set stays"


def test_real_devices():
    devices, problems = probe_devices(seconds=0.01)
    cpus = [device for device in devices if device.kind == "cpu"]
    assert len(cpus) == 1
    assert cpus[0].cores == len(probe.available_cores())
    assert not problems


def test_a_real_link_between_fresh_workers():
    link = probe_link(2, "gloo", seconds=0.02)
    assert (link.backend, link.world_size) == ("gloo", 2)
    assert "torch" not in probe.__dict__, "the measuring process stays light"


@pytest.fixture
def fake(monkeypatch):
    """A machine whose probes are counted and can be told to fail."""

    class Fake:
        devices = (CPU,)
        problems: tuple[str, ...] = ()
        asked: list[object]
        broken: tuple[str, ...] = ()
        load = 0.0

        def __init__(self) -> None:
            self.asked = []

        def probe_devices(self) -> tuple[list[Device], list[str]]:
            self.asked.append("devices")
            return list(self.devices), list(self.problems)

        def probe_link(self, world_size: int, backend: str) -> Link:
            self.asked.append((backend, world_size))
            if backend in self.broken:
                raise LaunchError(f"measuring the link over {backend} failed: no route", fix="unplug it")
            return Link(backend=backend, world_size=world_size, latency_ms=0.1, bytes_per_second=1e9)

    machine = Fake()
    monkeypatch.setattr(probe, "probe_devices", machine.probe_devices)
    monkeypatch.setattr(probe, "probe_link", machine.probe_link)
    monkeypatch.setattr(probe, "available_cores", lambda: [0, 1])
    monkeypatch.setattr(probe, "machine_load", lambda: machine.load)
    return machine


def test_a_machine_is_measured_once(fake):
    first = probe_cluster()
    assert fake.asked == ["devices", ("gloo", 2)]
    assert probe_cluster() == first
    assert fake.asked == ["devices", ("gloo", 2)], "the second answer comes from the cache"
    assert probe_cluster(fresh=True) != first
    assert fake.asked == ["devices", ("gloo", 2)] * 2


def test_several_gpus_are_linked_with_nccl(fake):
    fake.devices = (CPU, GPU, GPU.model_copy(update={"index": 1}))
    found = probe_cluster()
    assert fake.asked == ["devices", ("gloo", 2), ("nccl", 2)]
    assert found.link("nccl").world_size == 2


def test_what_repeats_do_not_agree_on_is_used_and_not_kept(fake, caplog):
    fake.devices = (CPU.model_copy(update={"noise": 0.96}),)
    assert probe_cluster().devices == fake.devices
    assert "measurements of this machine lie 96 % apart" in caplog.text
    fake.devices = (CPU,)
    assert probe_cluster().devices == fake.devices, "measured again"
    assert fake.asked == ["devices", ("gloo", 2)] * 2
    probe_cluster()
    assert fake.asked == ["devices", ("gloo", 2)] * 2


def test_a_broken_link_is_a_problem_that_is_not_kept(fake):
    fake.broken = ("gloo",)
    found = probe_cluster()
    assert found.problems == ("measuring the link over gloo failed: no route",)
    assert found.devices == (CPU,), "what could be measured is there"
    fake.broken = ()
    assert probe_cluster().link("gloo") is not None


def test_a_busy_measurement_is_repeated_once_the_machine_is_calmer(fake):
    fake.load = 3.0
    busy = probe_cluster()
    assert busy.busy
    assert probe_cluster() == busy, "just as busy: the cached answer must do"
    fake.load = 0.1
    calm = probe_cluster()
    assert not calm.busy
    fake.load = 0.0
    assert probe_cluster() == calm
