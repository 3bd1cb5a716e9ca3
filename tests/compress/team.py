"""`Team`: several workers that exchange gradients as threads of one process, for tests of codecs."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from benchmarks.rig.in_process import InProcessGroup, Meeting
from hybridpar.comm.group import Reduction
from hybridpar.compress import Coder, Exchange, TensorSpec, parse_codec

Shapes = Mapping[str, tuple[int, ...]]


def unsent(coder: Coder) -> Tensor:
    """All that a worker has not sent, in the layout of the gradient.

    Summed over the workers, and added to what was received so far, it is all that their gradients ever were.
    """
    out = torch.zeros(coder.spec.count)
    for key, residual in coder.unsent.items():
        part = coder.residuals[key]
        out[part.start : part.stop].add_(residual.left)
    return out


class CountedGroup(InProcessGroup):
    """A group of threads that notes its collectives, and counts the bytes that they were handed."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(meeting, rank)
        self.payload, self.calls = 0, list[str]()

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        self._note(f"all_reduce {reduction.name}", tensor)
        super().all_reduce(tensor, reduction)

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        self._note("all_to_all", inp)
        super().all_to_all(out, inp, out_sizes, in_sizes)

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        self._note("all_gather", inp)
        super().all_gather(out, inp)

    def _note(self, call: str, tensor: Tensor) -> None:
        self.calls.append(call)
        self.payload += tensor.nbytes


def run_together(
    exchanges: Sequence[Exchange], gradients: Sequence[Sequence[Tensor]], outs: Sequence[Sequence[Tensor]]
) -> list[CountedGroup]:
    """One step of all workers, by rank, on a thread each; the groups over which it went."""
    meeting = Meeting(len(exchanges))
    groups = [CountedGroup(meeting, rank) for rank in range(len(exchanges))]

    def run(rank: int) -> None:
        try:
            exchanges[rank].run(groups[rank], gradients[rank], outs[rank])
        except BaseException:
            groups[rank].close()  # so that nobody waits for this worker
            raise

    with ThreadPoolExecutor(len(exchanges)) as pool:
        steps = [pool.submit(run, rank) for rank in range(len(exchanges))]
    errors = [error for error in (step.exception() for step in steps) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return groups


class Team:
    """All workers of a job, in one process."""

    def __init__(self, text: str, shapes: Shapes, workers: int, **spec: Any) -> None:
        codec = parse_codec(text)
        self.shapes = dict(shapes)
        self.workers = workers
        self.exchanges = [
            Exchange([codec.bind(TensorSpec(name, shape, rank, workers, **spec)) for name, shape in shapes.items()])
            for rank in range(workers)
        ]

    def coders(self, name: str) -> list[Coder]:
        """The coders of a parameter, by rank."""
        index = list(self.shapes).index(name)
        return [exchange.coders[index] for exchange in self.exchanges]

    def meet(self, gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """One step, which is not committed; results by worker and parameter."""
        outs = [[torch.full((gradient.numel(),), torch.nan) for gradient in mine] for mine in gradients]
        run_together(self.exchanges, gradients, outs)
        return outs

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """One step that counts; all workers must have one result."""
        outs = self.meet(gradients)
        for own in outs[1:]:
            for left, right in zip(outs[0], own, strict=True):
                assert same_bits(left, right)
        self.commit()
        return outs[0]

    def commit(self) -> None:
        for exchange in self.exchanges:
            exchange.commit()

    def gradients(self, seed: int, scale: float = 1.0) -> list[list[Tensor]]:
        """Normal gradients by worker and parameter."""
        draw = torch.Generator().manual_seed(seed)
        return [
            [scale * torch.randn(TensorSpec(name, shape).count, generator=draw) for name, shape in self.shapes.items()]
            for _ in range(self.workers)
        ]

    def unsent(self, name: str) -> Tensor:
        """What all workers keep of a parameter, float64."""
        coders = self.coders(name)
        total = torch.zeros(coders[0].spec.count, dtype=torch.float64)
        for coder in coders:
            total += unsent(coder)
        return total

    def state(self) -> bytes:
        """All state of all coders as a file that holds no code."""
        states = [{coder.spec.name: coder.state_dict() for coder in exchange.coders} for exchange in self.exchanges]
        file = io.BytesIO()
        torch.save(states, file)
        return file.getvalue()

    def restore(self, state: bytes) -> None:
        states = torch.load(io.BytesIO(state), weights_only=True)
        for exchange, own in zip(self.exchanges, states, strict=True):
            for coder in exchange.coders:
                coder.load_state_dict(own[coder.spec.name])

    def snapshot(self) -> list[Any]:
        """All state, to be compared by `equal`."""
        return [{coder.spec.name: coder.state_dict() for coder in exchange.coders} for exchange in self.exchanges]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two float32 tensors are equal bit for bit, NaN and the sign of zero included."""
    return torch.equal(left.contiguous().view(torch.int32), right.contiguous().view(torch.int32))


def equal(left: Any, right: Any) -> bool:
    """Whether two states are equal, tensors bit for bit."""
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.numpy().tobytes() == right.numpy().tobytes()
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)
