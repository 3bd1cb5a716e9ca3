"""Tests that `hybridpar doctor --hang` says who waits for whom: of a real process that was stopped, and of records."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from hybridpar.cli import main
from hybridpar.comm.flight import FLIGHT, FOLDER, Channel, Flight, Note, process_fields, process_start, read_flights
from hybridpar.commands.doctor.hang import examine, text_lines
from tests.ranks import start_processes
from tests.waiting import eventually

NOW = 1000.0
ALL = Channel((0, 1, 2))


def note(number: int, doing: str, *, order: int = 0, channel: Channel | None = None, end: float | None = None) -> Note:
    return Note(number, order, NOW - 60, end, channel, doing)


def added(order: int, *, done: bool, doing: str = "adding gradients", channel: Channel = ALL) -> Note:
    return note(order, doing, order=order, channel=channel, end=NOW - 50 if done else None)


def record(rank: int, **lanes: tuple[Note, ...]) -> Flight:
    """Of this very process, so that it is not gone; or of another host."""
    return Flight(rank, 3, "elsewhere", 100 + rank, "1", "job", lanes)


def said(*flights: Flight) -> str:
    found = examine(flights, NOW)
    assert found.hangs
    return "\n".join(text_lines(found, Path("runs/x"), NOW))


def test_who_has_not_come_is_named_with_what_it_does_instead():
    waiting = (added(7, done=False),)
    text = said(
        record(0, sync=waiting),
        record(1, MainThread=(note(3, "waiting for the next batch"),), sync=(added(6, done=True),)),
        record(2, sync=waiting),
    )
    assert 'waits 60.0 s in "adding gradients" (number 7 of workers 0 to 2) for worker 1' in text
    conclusion = text.splitlines()[-1]
    assert conclusion.startswith("Worker 1 (process 101 on elsewhere) has not come; workers 0 and 2 wait for it in")
    assert "Worker 1 is in waiting for the next batch since 60.0 s." in conclusion


def test_of_a_chain_the_end_is_to_blame():
    send = Channel((1, 0), is_transfer=True)
    text = said(
        record(0, receive=(note(1, "waiting for activations", order=1, channel=send),)),
        record(1, sync=(added(2, done=False, channel=Channel((1, 2))),)),
        record(2, MainThread=(note(4, "0F0"),)),
    )
    assert text.splitlines()[-1].startswith("Worker 2 (process 102")
    assert "worker 1 waits for it" in text
    assert "in F0 stage 0 since 60.0 s" in text
    assert "(number 1, worker 1 to 0) for worker 1" in text


def test_workers_that_wait_for_each_other():
    first, second = Channel((0, 1)), Channel((1, 2))
    third = Channel((0, 2))
    text = said(
        record(0, sync=(added(1, done=False, channel=first),)),
        record(1, sync=(added(1, done=False, channel=second),)),
        record(2, sync=(added(1, done=False, channel=third),)),
    )
    assert "wait for each other in a circle" in text
    assert text.count("for worker") >= 3


def test_different_programs_are_found():
    text = said(
        record(0, sync=(added(7, done=False),)),
        record(1, sync=(added(7, done=False, doing="testing"),)),
        record(2, sync=(added(7, done=False),)),
    )
    assert "do not run the same program: the exchange number 7 of lane sync" in text


def test_all_have_come_and_the_network_is_silent():
    text = said(*(record(rank, sync=(added(7, done=False),)) for rank in range(3)))
    assert "All workers have come" in text
    assert "GLOO_SOCKET_IFNAME" in text


def test_workers_without_a_record_here():
    text = said(record(0, sync=(added(7, done=False),)))
    assert "no record of workers 1 and 2 here" in text
    assert "the record of workers 1 and 2 is not here" in text


def test_nobody_waits():
    text = said(record(0, MainThread=(note(1, "waiting for the next batch"),)))
    assert "No worker waits for another one. Worker 0 is in waiting for the next batch since 60.0 s." in text


def test_a_process_that_is_gone():
    gone = Flight(1, 2, socket.gethostname(), os.getpid(), "not this one", None, {"sync": (added(6, done=True),)})
    here = Flight(
        0, 2, socket.gethostname(), os.getpid(), process_start(os.getpid()), None, {"sync": (added(7, done=False),)}
    )
    assert "Worker 1 (process" in said(here, gone).splitlines()[-1]
    assert "is gone; worker 0 waits for it" in said(here, gone)
    assert said(gone).splitlines()[-1].startswith("All processes of this run are gone")


def test_a_run_that_goes_on():
    moving = Flight(0, 1, "elsewhere", 1, "1", None, {"sync": (note(1, "x", end=NOW - 0.5),)})
    assert not examine([moving], NOW).hangs


def test_a_run_without_records(tmp_path, capsys):
    assert main(["doctor", "--hang", str(tmp_path / "no")]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert main(["doctor", "--hang", str(tmp_path)]) == 2
    assert "no worker has left a record" in capsys.readouterr().err


def stops(rank: int, directory: str, run: str, answers: Any) -> None:
    """Two workers, of which the second stops itself before the third exchange."""
    import torch.distributed as dist

    from hybridpar.comm.world import World

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    world = World.join(lanes=1)
    FLIGHT.open(Path(run) / FOLDER, rank, 2)
    for number in range(3):
        if (number, rank) == (2, 1):
            os.kill(os.getpid(), signal.SIGSTOP)
        world.barrier()
    answers.put("done")


def test_a_worker_that_was_stopped_is_found(tmp_path, capsys):
    with start_processes(stops, 2, str(tmp_path)) as answers:

        def flights() -> dict[int, Any]:
            return {one.rank: one for one in read_flights(tmp_path / FOLDER)}

        eventually(lambda: len(flights()) == 2 and flights()[0].open_notes("MainThread"))
        stopped = flights()[1].pid
        eventually(lambda: process_fields(stopped)[0] == "T")

        def waits() -> list[tuple[int, tuple[int, ...]]]:
            found = examine(read_flights(tmp_path / FOLDER), time.time() + 60)
            return [(wait.rank, wait.absent) for wait in found.waits]

        eventually(lambda: waits() == [(0, (1,))])  # what a worker does is written a moment after it began
        found = examine(read_flights(tmp_path / FOLDER), time.time() + 60)
        assert f"`kill -CONT {stopped}` lets it go on" in found.conclusion[0]
        assert main(["doctor", "--hang", str(tmp_path), "--json"]) in (0, 1)
        told = json.loads(capsys.readouterr().out)
        assert told["workers"][1]["state"] == "is stopped by a signal"
        os.kill(stopped, signal.SIGCONT)
        assert {answers.get(timeout=90) for _ in range(2)} == {"done"}
