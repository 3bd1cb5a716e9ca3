from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from hybridpar.lanes import Lanes
from hybridpar.lanes import cuda as lane_cuda


class StandInStream:
    """Counts what is queued; what has run is decided by the test."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.priority = priority
        self.queued = 0
        self.passed = 0
        self.waits: list[StandInEvent] = []

    def wait_event(self, event: StandInEvent) -> None:
        self.waits.append(event)

    def synchronize(self) -> None:
        self.passed = self.queued


class StandInEvent:
    stream: StandInStream | None = None

    def record(self, stream: StandInStream) -> None:
        stream.queued += 1
        self.stream, self.position = stream, stream.queued

    def query(self) -> bool:
        return self.stream is None or self.stream.passed >= self.position

    def synchronize(self) -> None:
        assert self.stream is not None
        self.stream.synchronize()


class StandInCuda:
    """The part of `torch.cuda` that lanes use."""

    Stream = StandInStream
    Event = StandInEvent

    def __init__(self) -> None:
        self.current = StandInStream()
        self.capturing = False

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: torch.device) -> StandInStream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def stream(self, stream: StandInStream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    stand_in = StandInCuda()
    monkeypatch.setattr(lane_cuda, "cuda", stand_in)
    return stand_in


def nothing() -> None:
    pass


class TestStreams:
    def test_work_runs_at_once_on_the_stream_of_its_lane(self, cuda: StandInCuda) -> None:
        streams: list[StandInStream] = []
        outer = cuda.current
        with Lanes("cuda") as lanes:
            assert lanes.device == torch.device("cuda", 0)
            for lane in (lanes.open("a"), lanes.open("b", priority=-1), lanes.caller):
                lane.submit(lambda: streams.append(cuda.current))
        assert len(set(map(id, streams))) == 3
        assert [stream.priority for stream in streams] == [0, -1, 0]
        assert streams[2] is outer is cuda.current

    def test_the_caller_is_whatever_stream_is_current(self, cuda: StandInCuda) -> None:
        with Lanes("cuda") as lanes:
            with cuda.stream(StandInStream()):
                mine = cuda.current
                event = lanes.caller.record()
            assert event.cuda_event.stream is mine  # type: ignore[attr-defined]
            lane = lanes.open("a")
            lanes.caller.wait(lane.record())
            assert len(cuda.current.waits) == 1

    def test_a_wait_is_a_wait_of_the_stream(self, cuda: StandInCuda) -> None:
        with Lanes("cuda") as lanes:
            a, b = lanes.open("a"), lanes.open("b")
            event = a.record()
            b.wait(event)
            streams: list[StandInStream] = []
            b.submit(lambda: streams.append(cuda.current))
            assert streams[0].waits == [event.cuda_event]  # type: ignore[attr-defined]
            assert not event.cuda_event.query()
            event.synchronize()
            assert event.cuda_event.query()


class TestKeeping:
    def test_uses_live_until_their_event_is_done(self, cuda: StandInCuda) -> None:
        with Lanes("cuda") as lanes:
            lane = lanes.open("a")
            streams: list[StandInStream] = []
            lane.submit(lambda: streams.append(cuda.current))
            stream = streams[0]
            tensors = [torch.ones(3) for _ in range(3)]
            alive = [weakref.ref(tensor) for tensor in tensors]
            while tensors:
                lane.submit(nothing, uses=[tensors.pop(0)])
            assert [ref() is not None for ref in alive] == [True, True, True]
            stream.passed = 2
            lane.submit(nothing)
            assert [ref() is not None for ref in alive] == [False, False, True]
            stream.passed = 3
            lane.submit(nothing)
            assert alive[2]() is None
            assert stream.queued == 3  # no events for work without uses

    def test_work_can_add_to_them(self, cuda: StandInCuda) -> None:
        with Lanes("cuda") as lanes:
            for lane in (lanes.open("a"), lanes.caller):
                box = [torch.ones(3)]
                alive = weakref.ref(box[0])

                def work(lane=lane, box=box) -> None:
                    lane.keep(box.pop())

                lane.submit(work)
                assert alive() is not None
                lane.synchronize()
                lane.submit(nothing)
                assert alive() is None

    def test_through_a_graph_capture_nothing_is_asked_or_dropped(
        self, cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Lanes("cuda") as lanes:
            lane = lanes.open("a")
            tensor = torch.ones(3)
            alive = weakref.ref(tensor)
            cuda.capturing = True
            with monkeypatch.context() as patched:
                patched.setattr(StandInEvent, "query", lambda event: pytest.fail("asked during capture"))
                lane.submit(nothing, uses=[tensor])
                del tensor
                lane.submit(nothing)
                assert alive() is not None
            cuda.capturing = False
            lane.submit(nothing)
            assert alive() is None


class TestFailure:
    def test_everyone_meets_the_original(self, cuda: StandInCuda) -> None:
        def fail() -> None:
            raise ValueError("the original")

        ran: list[int] = []
        with Lanes("cuda") as lanes:
            a, b = lanes.open("a"), lanes.open("b")
            with pytest.raises(ValueError, match="the original") as info:
                a.submit(fail)
            event = a.record()
            b.wait(event)
            for use in (
                lambda: a.submit(lambda: ran.append(1)),
                lambda: b.submit(lambda: ran.append(1)),
                lambda: lanes.caller.wait(event),
                event.synchronize,
                b.synchronize,
            ):
                with pytest.raises(ValueError, match="the original") as again:
                    use()
                assert again.value is info.value
            lanes.caller.submit(lambda: ran.append(2))
        assert ran == [2]
        assert info.value.__notes__ == ["on lane 'a'"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestDevice:
    def test_a_chain_over_two_streams(self) -> None:
        with Lanes("cuda") as lanes:
            a, b = lanes.open("a"), lanes.open("b", priority=-1)
            tensor = torch.zeros(1 << 22, device="cuda")
            a.wait(lanes.caller.record())
            for _ in range(20):
                a.submit(lambda: tensor.add_(1), uses=[tensor])
                b.wait(a.record())
                b.submit(lambda: tensor.mul_(2), uses=[tensor])
                a.wait(b.record())
            lanes.caller.wait(b.record())
            assert tensor.unique().tolist() == [2**21 - 2]

    def test_memory_in_use_is_not_handed_out(self) -> None:
        with Lanes("cuda") as lanes:
            reader = lanes.open("reader")
            result = torch.zeros((), device="cuda", dtype=torch.float64)
            tensor = torch.ones(1 << 22, device="cuda")
            address = tensor.data_ptr()
            reader.wait(lanes.caller.record())

            def read(tensor: torch.Tensor) -> None:
                torch.cuda._sleep(200_000_000)
                result.copy_(tensor.sum(dtype=torch.float64))

            reader.submit(partial(read, tensor), uses=[tensor, result])
            del tensor
            other = torch.zeros(1 << 22, device="cuda")
            assert other.data_ptr() != address
            lanes.caller.wait(reader.record())
            assert result.item() == 1 << 22

    def test_capture_of_two_streams(self) -> None:
        with Lanes("cuda") as lanes:
            a, b = lanes.open("a"), lanes.open("b")
            tensor = torch.zeros(1024, device="cuda")
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                a.wait(lanes.caller.record())
                a.submit(lambda: tensor.add_(1), uses=[tensor])
                b.wait(a.record())
                b.submit(lambda: tensor.mul_(2), uses=[tensor])
                lanes.caller.wait(b.record())
            for _ in range(3):
                graph.replay()
            assert tensor.unique().tolist() == [14]
