"""A worker finds its peers once, and leaves them cleanly."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from hybridpar.comm.flight import noted, outside
from hybridpar.comm.rendezvous import RollCall
from hybridpar.comm.world import World
from hybridpar.errors import LaunchError, SyncError, UsageError
from tests.ranks import run_ranks

JOB = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    for name in JOB:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("job", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_without_others_a_worker_is_alone(job, monkeypatch):
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    world = World.join()
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    assert world.transport == "none"
    assert world.gather("me") == ["me"]
    world.barrier()
    world.close()
    assert not dist.is_initialized()


def look_around(world, shared_memory):
    inner = World.join(lanes=3, timeout=20, shared_memory=shared_memory)
    try:
        mine = torch.full((3,), float(world.rank + 1))
        for group in [*inner.lane_groups, inner.control_group]:
            tensor = mine.clone()
            group.all_reduce(tensor)
            assert tensor.tolist() == [6.0] * 3
        return inner.rank, inner.size, inner.is_main, len(inner.lane_groups), inner.transport, inner.gather(inner.rank)
    finally:
        inner.close()
        inner.close()
        # The groups that were there before go on working.
        assert world.gather(world.rank) == [0, 1, 2]


@pytest.mark.parametrize(("shared_memory", "transport"), [(True, "shared memory"), (False, "sockets")])
def test_workers_see_the_same_world(shared_memory, transport):
    answers = run_ranks(look_around, 3, shared_memory)
    assert answers == [(rank, 3, rank == 0, 3, transport, [0, 1, 2]) for rank in range(3)]


def ask_main(world):
    def refuse():
        raise UsageError(f"refused by {world.rank}", "rule", "fix")

    answer = world.from_main(lambda: world.rank + 7)
    with pytest.raises(UsageError, match="refused by 0"):
        world.from_main(refuse)
    return answer


@pytest.mark.parametrize("size", [1, 3])
def test_what_rank_0_decides_holds_for_all(size):
    assert run_ranks(ask_main, size) == [7] * size


def do_together(world):
    def fail(*ranks):
        if world.rank in ranks:
            raise UsageError(f"refused by {world.rank}", "rule", "fix")
        return world.rank

    done = world.on_all(fail)
    with pytest.raises(UsageError) as caught:
        world.on_all(lambda: fail(1, 2))
    return done, caught.value.what, caught.value.is_repeated


def test_a_problem_of_one_worker_is_everybodys_and_told_once():
    assert run_ranks(do_together, 3) == [
        (0, "refused by 1", True),
        (1, "refused by 1", False),
        (2, "refused by 1", True),
    ]


def name_errors(world):
    try:
        with world.named_errors("testing"):
            raise RuntimeError("\n\nConnection closed by peer\nmore")
    except SyncError as error:
        lost = str(error)
    with pytest.raises(KeyError), world.named_errors("testing"):
        raise KeyError("a bug")
    return lost


def test_the_backends_errors_say_who_waited_for_what():
    [lost] = run_ranks(name_errors, 1)
    assert "worker 0 of 1 stopped while testing: a peer has died" in lost
    assert "Connection closed by peer" in lost


def leave_early(world):
    if world.rank == 1:
        return "left"
    try:
        world.gather("still here")
    except SyncError as error:
        return str(error)
    return "no error"


def test_a_peer_that_has_left_is_an_error():
    first, second = run_ranks(leave_early, 2, timeout=15)
    assert second == "left"
    assert "worker 1 died or left, so worker 0 of 2 stopped while exchanging" in first


def be_busy(world):
    world.timeout = 0.2
    store = world._roll_call._store
    # Worker 1 gives signs quickly, and worker 0 waits long for one, however slow the machine is.
    roll_call = world._roll_call = RollCall(store, world.rank, 2, beat=0.05 if world.rank else 2.0)
    is_busy, end = roll_call.is_busy, roll_call.show_life()

    def told():
        busy = is_busy()
        store.set("told", str(busy))
        return busy

    roll_call.is_busy = told
    [group] = world.open_groups([world.members])
    world.barrier()
    if world.rank == 1:
        with noted("a pass"), outside("measuring"):
            while not store.check(["told"]):  # until worker 0 has waited for as long as its time-out
                time.sleep(0.01)
    everybodys = torch.zeros(2)
    group.all_gather(everybodys, torch.ones(1))
    end()
    return everybodys.tolist()


def test_a_worker_that_is_busy_for_longer_than_the_time_out_is_waited_for():
    assert run_ranks(be_busy, 2) == [[1.0, 1.0]] * 2


def test_a_job_nobody_answers_for_is_a_launch_error(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        World.join(timeout=1)
    assert "worker 1 of 2 cannot join the job at 127.0.0.1:1" in caught.value.what
    assert not dist.is_initialized()


def divide(world):
    party = world.split([[2, 0], [1]], lanes=1)
    try:
        tensor = torch.tensor([float(world.rank + 1)])
        for group in party.lane_groups:
            group.all_reduce(tensor)
        return {
            "place": (party.rank, party.size, party.members, party.job_rank, party.job_size, party.is_main),
            "sum": tensor.item(),
            "gathered": party.gather(world.rank),
            "transport": party.transport,
            "error": party.peer_error("testing", RuntimeError("Timed out")).what,
        }
    finally:
        party.close()
        party.close()
        # The world that was divided goes on working.
        assert world.gather(world.rank) == [0, 1, 2]


@pytest.mark.parametrize(("shared_memory", "transport"), [(True, "shared memory"), (False, "sockets")])
def test_a_world_divides_into_parties(shared_memory, transport):
    first, second, third = run_ranks(divide, 3, shared_memory=shared_memory)
    assert first["place"] == (0, 2, (0, 2), 0, 3, True)
    assert second["place"] == (0, 1, (1,), 1, 3, False)
    assert third["place"] == (1, 2, (0, 2), 2, 3, False)
    assert [answer["sum"] for answer in (first, second, third)] == [4.0, 2.0, 4.0]
    assert [answer["gathered"] for answer in (first, second, third)] == [[0, 2], [1], [0, 2]]
    assert [answer["transport"] for answer in (first, second, third)] == [transport, "none", transport]
    assert "worker 2 of 3 stopped while testing with worker 0: a peer did not answer" in third["error"]
    assert "worker 1 of 3 stopped while testing: " in second["error"]


def failing_at_work(world: World) -> str:
    def fail() -> None:
        raise UsageError("nothing to measure")

    with pytest.raises(UsageError) as caught:
        world.from_main(fail, long=True)
    return caught.value.what


def test_a_problem_at_work_is_everybody_s():
    assert run_ranks(failing_at_work, 2) == ["nothing to measure"] * 2
    assert World().from_main(lambda: 7, long=True) == 7
