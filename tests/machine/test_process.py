from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hybridpar.machine import process
from hybridpar.machine.process import (
    affinity,
    available_cores,
    cpu_quota,
    host_identity,
    physical_cores,
    threads_per_worker,
    usable_memory,
    worker_environment,
)

glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables belong to glibc")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

# Allocates, touches and frees blocks again and again, as a training step does with its activations, and counts the
# page faults after the first round. Together they are larger than one heap of a thread's own arena (64 MiB).
CHURN = """
import ctypes, json, resource, threading
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
size = 24 << 20

def churn(rounds):
    for _ in range(rounds):
        blocks = [libc.malloc(size) for _ in range(4)]
        for block in blocks:
            ctypes.memset(block, 1, size)
        for block in blocks:
            libc.free(block)

def faults():
    churn(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    churn(5)
    counted.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

counted = []
faults()
thread = threading.Thread(target=faults)
thread.start()
thread.join()
print(json.dumps(counted))
"""


def python(program: str) -> str:
    """Standard output of a program run by a fresh interpreter that finds the package where this one found it."""
    place = Path(process.__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", program], cwd=place, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def fault_counts(added: dict[str, str]) -> list[int]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))}
    out = subprocess.run(
        [sys.executable, "-c", CHURN], env={**clean, **added}, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(out.stdout)


@glibc_only
def test_the_environment_reaches_malloc_in_the_main_thread_and_in_others():
    stock = fault_counts({})
    tuned = fault_counts(worker_environment(1, [0], {}))
    for place, before, after in zip(("main thread", "second thread"), stock, tuned, strict=True):
        assert before > 100, f"{place}: the churn must fault with stock settings, or this test proves nothing"
        assert after * 20 < before, f"{place}: {before} faults without the variables, {after} with them"


@glibc_only
def test_what_the_user_set_stays():
    assert "MALLOC_ARENA_MAX" not in worker_environment(1, [0], {"MALLOC_ARENA_MAX": "4"})
    tunables = worker_environment(1, [0], {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=9:glibc.rtld.nns=5"})
    assert "MALLOC_MMAP_MAX_" not in tunables
    assert "MALLOC_TRIM_THRESHOLD_" in tunables
    preloaded = worker_environment(1, [0], {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"})
    assert not any(name.startswith("MALLOC_") for name in preloaded)


@pytest.mark.parametrize(("workers", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (4, 2, 1)])
def test_workers_share_the_cores(monkeypatch, workers, cores, threads):
    monkeypatch.setattr(process, "physical_cores", lambda cores: [[core] for core in cores])
    assert threads_per_worker(workers, range(cores)) == threads
    assert worker_environment(workers, range(cores), {})["OMP_NUM_THREADS"] == str(threads)


def sysfs(root: Path, siblings: dict[int, str]) -> Path:
    for core, text in siblings.items():
        topology = root / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    return root


def test_logical_cores_are_grouped_by_physical_core(tmp_path):
    system = sysfs(tmp_path, {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"})
    assert physical_cores([0, 1, 4, 5], system) == [[0, 4], [1, 5]]
    assert physical_cores([1, 4], system) == [[1], [4]]
    assert physical_cores([0, 9], system) == [[0], [9]], "an unknown topology counts every core"


def cgroups(root: Path, membership: str, mounts: list[str], files: dict[str, str]) -> Path:
    """A fake process directory whose mounts lie under `root` too."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    proc = root / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(membership)
    (proc / "mountinfo").write_text("".join(f"{mount}\n" for mount in mounts))
    return proc


V2 = "30 23 0:26 {root} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 {root} {at} rw shared:9 - cgroup cgroup rw,{controllers}"


@pytest.mark.parametrize(
    ("membership", "root", "files", "quota"),
    [
        ("0::/\n", "/", {"v2/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", "/", {"v2/cpu.max": "max 100000\n"}, None),
        # The least limit of all ancestors holds, wherever it is set.
        ("0::/a/b\n", "/", {"v2/a/cpu.max": "200000 100000\n", "v2/a/b/cpu.max": "max 100000\n"}, 2.0),
        # A container that mounts only its own subtree but sees the host's path.
        ("0::/box/1\n", "/box/1", {"v2/cpu.max": "300000 100000\n"}, 3.0),
        ("0::/elsewhere\n", "/box/1", {"v2/cpu.max": "300000 100000\n"}, 3.0),
        ("0::/\n", "/", {"v2/cpu.max": "damaged"}, None),
    ],
)
def test_quota_of_cgroup_v2(tmp_path, membership, root, files, quota):
    proc = cgroups(tmp_path, membership, [V2.format(root=root, at=tmp_path / "v2")], files)
    assert cpu_quota(proc) == quota


@pytest.mark.parametrize(
    ("membership", "mount", "file"),
    [
        ("0::/job\n", V2.format(root="/", at="{top}"), "job/memory.max"),
        ("4:memory:/job\n", V1.format(root="/", at="{top}", controllers="memory"), "job/memory.limit_in_bytes"),
    ],
)
def test_memory_limits_of_both_cgroup_versions(tmp_path, membership, mount, file):
    everything = usable_memory(tmp_path / "nowhere")
    proc = cgroups(tmp_path, membership, [mount.format(top=tmp_path / "top")], {f"top/{file}": "123456789\n"})
    assert usable_memory(proc) == 123456789
    (tmp_path / "top" / file).write_text("max\n")
    assert usable_memory(proc) == everything
    (tmp_path / "top" / file).write_text("9223372036854771712\n")
    assert usable_memory(proc) == everything, "version 1 spells `no limit` as a huge number"


@pytest.mark.parametrize(("quota", "count"), [(None, 8), (3.9, 3), (0.5, 1), (64.0, 8)])
def test_available_cores_respect_the_quota(monkeypatch, quota, count):
    monkeypatch.setattr(process, "_affinity_mask", lambda: list(range(8)))
    monkeypatch.setattr(process, "cpu_quota", lambda: quota)
    assert available_cores() == list(range(count))


@pytest.fixture
def no_quota(monkeypatch):
    monkeypatch.setattr(process, "cpu_quota", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.mark.usefixtures("no_quota")
@pytest.mark.parametrize(("workers", "cores"), [(1, 1), (2, 2), (2, 8), (3, 8), (8, 8)])
def test_slices_are_disjoint_cover_all_cores_and_are_even(monkeypatch, workers, cores):
    monkeypatch.setattr(process, "physical_cores", lambda cores: [[core] for core in cores])
    slices = [affinity(rank, workers, range(cores)) for rank in range(workers)]
    assert sorted(core for part in slices for core in part) == list(range(cores))
    sizes = [len(part) for part in slices]
    assert max(sizes) - min(sizes) <= 1


# ------------------------------------------------------------------------------------------------- tuning this process


def tuned(before: str = "", after: str = "", **variables: str) -> list[str]:
    """What a fresh process prints that tunes itself, without settings of the one that tests."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD", "OMP_", "MKL_", "HYBRIDPAR_TUNED", "TORCHELASTIC_"))
    }
    program = f"import os\nfrom hybridpar.machine import process\n{before}\nprocess.tune_this_process(1)\n{after}"
    out = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(process.__file__).parents[2],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.returncode == 0, out.stderr
    return out.stdout.split()


@glibc_only
def test_a_running_process_tunes_its_own_allocator():
    assert json.loads("".join(tuned(after=CHURN))) == [0, 0]
    assert max(json.loads("".join(tuned(after=CHURN, MALLOC_MMAP_MAX_="9", MALLOC_TRIM_THRESHOLD_="1000")))) > 100
    told = "import platform\nplatform.libc_ver = lambda: ('', '')"
    assert max(json.loads("".join(tuned(told, CHURN)))) > 100


SHOW = "print(os.environ['OMP_NUM_THREADS'], process.share_cores(2), os.environ['OMP_NUM_THREADS'])"
FOUR = "process.available_cores = lambda: [0, 1, 2, 3]\nprocess.physical_cores = lambda cores: [[one] for one in cores]"


def test_a_process_chooses_its_threads_unless_the_user_did():
    assert tuned(FOUR, SHOW) == ["4", "2", "2"]
    assert tuned(FOUR, SHOW, OMP_NUM_THREADS="3") == ["3", "None", "3"]
    assert tuned(FOUR, SHOW, HYBRIDPAR_TUNED="1", OMP_NUM_THREADS="1") == ["1", "None", "1"]


@linux_only
def test_the_one_thread_that_torchrun_sets_is_no_users_choice(tmp_path, monkeypatch):
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "environ").write_bytes(b"PATH=/bin\0")
    assert process._threads_of_torchrun(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not process._threads_of_torchrun(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "environ").write_bytes(b"PATH=/bin\0OMP_NUM_THREADS=1\0")
    assert not process._threads_of_torchrun(tmp_path)
    assert not process._threads_of_torchrun(tmp_path / "gone")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not process._threads_of_torchrun(tmp_path)


@linux_only
def test_processes_that_share_their_cores_know_it(monkeypatch):
    own = process.cores_identity()
    assert python("from hybridpar.machine.process import cores_identity; print(cores_identity())") == own
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1000})
    assert process.cores_identity() != own


def test_other_network_namespaces_are_other_hosts():
    assert "net:[" in host_identity()
