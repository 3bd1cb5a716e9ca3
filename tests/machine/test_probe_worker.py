from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from hybridpar.machine import probe_worker
from hybridpar.machine.cluster import Device, Link
from hybridpar.machine.probe_worker import devices, measure_link, torch_facts

CPU = torch.device("cpu")
CPU_RATES = Device(kind="cpu", name="a CPU", memory_bytes=1, cores=1, threads=1, bytes_per_second=1)


class Clock:
    """A clock that moves only when work is done, so that rates can be checked to the last digit."""

    def __init__(self, durations: list[float]) -> None:
        self.now = 100.0
        self.durations = iter(durations)
        self.runs = 0

    def work(self) -> None:
        self.now += next(self.durations)
        self.runs += 1

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    def install(durations: list[float]) -> Clock:
        made = Clock(durations)
        monkeypatch.setattr(probe_worker.time, "perf_counter", made)
        return made

    return install


def test_the_fastest_run_counts_and_the_warm_up_does_not(clock):
    made = clock([0.1, 5.0, 4.0, 3.6, 9.0])
    assert probe_worker._fastest(made.work, CPU, 0.0) == pytest.approx((3.6, 4.0 / 3.6 - 1))
    assert made.runs == 4, "one to warm up, and three at least"


def test_runs_go_on_until_the_two_fastest_agree_but_not_for_ever(clock):
    made = clock([0.1, 2.0, 9.0, 5.0, 5.0, 2.1, 1.0])
    assert probe_worker._fastest(made.work, CPU, 15.0) == pytest.approx((2.0, 0.05))
    assert made.runs == 6
    never = clock([0.1, 1.0, *(2.0 for _ in range(9)), 1.0])
    assert probe_worker._fastest(never.work, CPU, 5.0) == pytest.approx((1.0, 1.0))
    assert never.now == pytest.approx(100.1 + 15.0), "three times as long as asked for"


def test_a_gpu_that_fails_is_a_problem_and_the_others_are_measured(monkeypatch):
    def measure(index: int, seconds: float) -> Device:
        if index == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return Device(kind="cuda", index=index, name="a GPU", memory_bytes=1, bytes_per_second=1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(probe_worker, "measure_cpu", lambda seconds: CPU_RATES)
    monkeypatch.setattr(probe_worker, "measure_gpu", measure)
    answer = json.loads(devices(0.0))
    assert [(device["kind"], device["index"]) for device in answer["devices"]] == [("cpu", 0), ("cuda", 1)]
    assert answer["problems"] == ["GPU 0 (a GPU) cannot be used: CUDA out of memory."]


@pytest.mark.parametrize(("world_size", "factor"), [(2, 1.0), (4, 1.5)])
@pytest.mark.parametrize(("bytes_per_second", "largest"), [(1e9, 16 << 20), (1e7, 4 << 20), (1e5, 1 << 20)])
def test_an_ideal_link_is_measured_exactly(monkeypatch, clock, world_size, factor, bytes_per_second, largest):
    latency, sent = 2e-4, []
    made = clock([])

    def all_reduce(tensor, op=None):
        made.now += latency + factor * tensor.nbytes / bytes_per_second
        if op is None:
            sent.append(tensor.nbytes)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    link = measure_link(3.0)
    small = latency + factor * 4096 / bytes_per_second
    assert link.latency_ms == pytest.approx(small * 1e3)
    # The small message's own bytes are taken for latency, hence 4 KB in 1 MB of tolerance.
    assert link.bytes_per_second == pytest.approx(bytes_per_second, rel=0.005)
    assert max(sent) == largest, "a slow link must not be kept busy for minutes"


def test_noise_cannot_make_a_link_infinitely_fast(monkeypatch):
    monkeypatch.setattr(probe_worker, "_all_reduce_time", lambda size, device, repeats: (1e-3, 0.0))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert measure_link(0.1).bytes_per_second == pytest.approx((16 << 20) / 1e-3)


def test_a_link_is_measured_again_until_its_all_reduces_agree(monkeypatch):
    def found_after(*noises: float) -> tuple[Link, int]:
        left, asked = iter([*((1e-3 * (1 + one), one) for one in noises)]), []

        def timed(size, device, repeats):
            if size < 16 << 20 or repeats == 1:
                return 1e-4, 0.0
            asked.append(repeats)
            return next(left)

        monkeypatch.setattr(probe_worker, "_all_reduce_time", timed)
        return measure_link(0.1), len(asked)

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    link, asked = found_after(0.9, 0.1)
    assert (link.noise, asked) == (0.1, 2)
    assert link.bytes_per_second == pytest.approx((16 << 20) / 1e-3), "the steady one counts, less the latency"
    link, asked = found_after(0.9, 0.5, 0.7)
    assert (link.noise, asked) == (0.5, 3)


def test_facts_about_the_torch_at_hand():
    facts = json.loads(torch_facts())
    assert facts["torch"] == torch.__version__
    assert facts["backends"]["gloo"] == dist.is_gloo_available()
    assert facts["cuda_build"] == torch.version.cuda
    assert (facts["cuda_error"] is None) == (torch.version.cuda is None or torch.cuda.is_available())
