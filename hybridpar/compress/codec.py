"""The interface of gradient codecs: `Codec`, `Coder`, the rounds of messages, and the state that coders keep.

A codec turns the gradient of one parameter into messages and back, in **rounds**. In each round every worker writes a
message, the messages are reduced (summed, say), and every worker reads the result. How long a message is and how
it is reduced follows from the parameter's shape and the number of workers alone; so round i of all parameters of
a bucket is one collective per way of collective, and bytes are known before anything is sent.

`Codec` is the configuration, a frozen dataclass with one registry line. `Coder` is what it becomes for one parameter
on one worker, with scratch and state. Error feedback is apart from them, in `hybridpar.compress.feedback`.
"""

from __future__ import annotations

import enum
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from hybridpar.comm.group import Reduction
from hybridpar.compress.received import Decoded, Received, Sum
from hybridpar.errors import CheckpointError, check
from hybridpar.registry import Registry

#: Elements that a coder works on at a time: 256 KB of float32.
CHUNK = 1 << 16


class Scratch:
    """Tensors that are used again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, use: str, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A 1-D tensor with anything in it, valid until the same use is taken again."""
        found = self._buffers.get((use, dtype))
        if found is None or found.numel() < count:
            found = torch.empty(count, dtype=dtype, device=self._device)
            self._buffers[use, dtype] = found
        return found[:count]


class Kept:
    """A tensor of which a step makes a new one, which counts from `commit` on."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.now, self.next = (torch.zeros(count, dtype=torch.float32, device=device) for _ in range(2))

    def commit(self) -> None:
        """What the step under way made is what is kept."""
        self.now, self.next = self.next, self.now

    def load(self, saved: Tensor, name: str) -> None:
        """Take over what was saved."""
        if saved.shape != self.now.shape:
            raise CheckpointError(
                f"what was kept of {name!r} has {saved.numel()} elements, and {self.now.numel()} are needed",
                "They depend on the codec's options, the parameter's shape, the number of workers and the rank.",
                "Resume with the options of the run that wrote the checkpoint.",
            )
        self.now.copy_(saved)


#: Key of the residual of what this worker does not send.
WORKER = "worker"


class Product(Protocol):
    """A matrix that is left^T right, of two factors with a few rows each."""

    @property
    def left(self) -> Tensor:
        """Its rows are as long as the matrix has rows."""

    @property
    def right(self) -> Tensor:
        """Its rows are as long as those of the matrix."""

    def subtract_from(self, values: Tensor) -> None:
        """Subtract the matrix."""


class Residual:
    """No memory at all: v is the gradient, and what is not sent is lost.

    `keeps` says whether a coder should leave v - C(v) in what `take` returns; here it must not touch it.
    """

    keeps = False

    def part(self, start: int, stop: int) -> Residual:
        """The residual of a range of elements."""
        return self

    def take(self, values: Tensor, start: int) -> Tensor:
        """Give v for a range of elements; to be called once in a step for each."""
        return values

    def again(self, values: Tensor, start: int) -> Tensor:
        """What `take` returned, or what has become of it since."""
        return values

    def owe(self, product: Product) -> None:
        """Say that what is left of the step is v without a matrix. It is subtracted by who next reads what is left."""


class _Nothing(dict[str, Residual]):
    """For every key the residual that keeps nothing."""

    def __missing__(self, key: str) -> Residual:
        return Residual()


#: No error feedback.
NO_RESIDUAL: Mapping[str, Residual] = _Nothing()


class Collective(enum.Enum):
    """How messages meet: in an all-reduce, whose reduction is the value, or in one of two other ways."""

    SUM = Reduction.SUM
    MAX = Reduction.MAX
    AND = Reduction.AND
    #: Each worker sends stripe k to worker k, which merges what it receives; all workers receive all merged stripes.
    SHARD = "shard"
    #: All workers receive the messages of all workers, by rank.
    GATHER = "gather"


@dataclass(frozen=True)
class Round:
    """One message that a coder writes and what it receives for it.

    Attributes:
        collective: How the messages are reduced across ranks.
        dtype: Of the elements; `torch.uint8` for SHARD.
        sizes: Elements of each part that is written: one part, or one stripe per worker for SHARD.
        merged: Elements of each merged stripe, where that is not what is written. SHARD only.
    """

    collective: Collective
    dtype: torch.dtype
    sizes: tuple[int, ...]
    merged: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.merged:
            object.__setattr__(self, "merged", self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes of all parts that a worker writes."""
        return sum(self.sizes) * self.dtype.itemsize

    def sent(self, workers: int) -> int:
        """Bytes that a worker sends to others for it, their mean; as `Exchange` counts them, but for its alignment.

        Args:
            workers: Number of workers.
        """
        if self.collective is Collective.SHARD:  # a stripe to each owner, and the merged one from there to everybody
            return (self.bytes + sum(self.merged)) * (workers - 1) // workers
        if self.collective is Collective.GATHER:
            return self.bytes * (workers - 1)
        return 2 * self.bytes * (workers - 1) // workers


@dataclass(frozen=True)
class TensorSpec:
    """The parameter that a codec is bound to, and who exchanges it.

    Attributes:
        name: The parameter's name in the model; state is kept under it.
        shape: Its shape. The flat gradient lies in memory order, first dimension outermost, as in contiguous and
            channels-last tensors.
        rank: This worker.
        workers: How many there are.
        seed: Equal on all workers; what is drawn at random follows from it, the name and the step.
        device: Where the gradient is.
        average: Whether the result is the mean over the workers, or the sum.
        wire: The type in which floating-point messages are sent.
    """

    name: str
    shape: tuple[int, ...]
    rank: int = 0
    workers: int = 1
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    average: bool = True
    wire: torch.dtype = torch.float32

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def divisor(self) -> int:
        """What the sum over the workers is divided by."""
        return self.workers if self.average else 1

    def draw_seed(self, *salt: object) -> int:
        """A number below 2**63 that depends on seed, name and salt alone, on any machine.

        Args:
            salt: What else it depends on, by its text.
        """
        text = ":".join(str(part) for part in (self.seed, self.name, *salt))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


_NOTHING = torch.empty(0)


class Coder(ABC):
    """A codec at work on one parameter of one worker.

    The calls of a step: `begin`; for every round `write`, where stripes are sharded `merge`, and `read`; then `finish`;
    then `commit` or `rollback`. Tensors handed to `write` and `read` are views that stay as they are until `finish`.

    A non-finite gradient on any worker makes the result non-finite on all of them; it is for the caller to roll back.

    Args:
        spec: The parameter.
        rounds: The rounds of every step; a subclass whose rounds change overrides `rounds`.
    """

    #: Elements of each residual that error feedback may keep, by key.
    residuals: Mapping[str, int] = {}

    def __init__(self, spec: TensorSpec, rounds: Sequence[Round] = ()) -> None:
        self.spec = spec
        self._rounds = tuple(rounds)
        self._scratch = Scratch(spec.device)
        self._gradient = _NOTHING
        self._residual = Residual()
        self._received: Sequence[Tensor] = ()

    def use(self, scratch: Scratch) -> None:
        """Borrow scratch memory that coders share which never work at the same time.

        Args:
            scratch: The memory.
        """
        self._scratch = scratch

    @property
    def at_work(self) -> Coder:
        """What writes, reads and finishes the next step: this, or one that it only hands those calls on to."""
        return self

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds of the next step, equal on all workers."""
        return self._rounds

    @property
    def lasting_rounds(self) -> tuple[Round, ...]:
        """The rounds once a warm-up is over."""
        return self.rounds

    def residual_squares(self) -> Tensor | None:
        """Sum of squares of what this worker has not sent yet, 0-d, in a pass over it; None where nothing is kept."""
        return None

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        """Start a step.

        Args:
            gradient: 1-D float32 of any stride; it is not changed, and must stay as it is until `finish`.
            residuals: What error feedback keeps. The coder takes v = gradient + residual from there, and leaves
                v - C(v), what it does not send, until `finish` has returned.
        """
        self._gradient, self._residual = gradient, residuals.get(WORKER, Residual())

    @abstractmethod
    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        """Write the message of a round.

        Args:
            index: Number of the round.
            parts: 1-D tensors to fill, as `rounds[index]` says.
        """

    @classmethod
    def write_together(cls, coders: Sequence[Self], index: int, parts: Sequence[Sequence[Tensor]]) -> None:
        """Write the messages of a round of several parameters; a class for which that is cheaper overrides it.

        Args:
            coders: Of this class.
            index: Number of the round.
            parts: For each coder what `write` fills.
        """
        for coder, own in zip(coders, parts, strict=True):
            coder.write(index, own)

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        """Make one stripe out of what all workers sent for this worker's stripe; only where stripes are sharded.

        Args:
            index: Number of the round.
            received: The stripe as each worker wrote it, by rank.
            out: What to fill, `rounds[index].merged[rank]` elements.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sharded round {index}")

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        """Take what came of a round.

        Args:
            index: Number of the round.
            parts: The reduced message; or by rank all merged stripes, or all workers' messages.
        """
        self._received = parts

    def release(self) -> None:
        """Let go of the gradient: the first message is written; only for codecs that take gradients `Codec.at_once`."""
        self._gradient = _NOTHING

    def received(self) -> Received:
        """What came of the step, once everything was read: the mean over the workers, or their sum, not yet written."""
        return Decoded(self.finish, self.spec.count, self.spec.device)

    @abstractmethod
    def finish(self, out: Tensor) -> None:
        """Write the mean over the workers, or their sum, as the spec says.

        Args:
            out: 1-D float32 of any stride. It may be the gradient itself.
        """

    def spread(self, key: str, residual: Tensor, out: Tensor) -> None:
        """Add a residual to a tensor in the layout of the gradient.

        Args:
            key: Of `residuals`.
            residual: What is kept under it.
            out: 1-D float32, as large as the gradient.
        """
        out.add_(residual)

    def rescale(self, learning_rate: float) -> None:  # noqa: B027 - most keep nothing in these units
        """Say which learning rate the coming steps use, for what is kept in units of the gradient.

        Args:
            learning_rate: In any unit; its changes count.
        """

    def set_batch_scale(self, samples: float) -> None:  # noqa: B027 - most remember nothing step by step
        """Say how many samples coming steps have, as a multiple of what options that are per step were given for.

        Args:
            samples: At least 0; 1 changes nothing.
        """

    def commit(self) -> None:  # noqa: B027 - most have no state
        """The step counts."""

    def rollback(self) -> None:  # noqa: B027 - most have no state
        """The step does not count: all state is as it was before `begin`, bit by bit."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain tensors and numbers; loadable with `weights_only`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most have no state
        """Restore what `state_dict` returned.

        Args:
            state: What `state_dict` returned.

        Raises:
            CheckpointError: The state belongs to another shape, worker or number of workers.
        """


class Full(Coder):
    """All elements, in the type in which the spec says messages are sent.

    In a type shorter than float32 each worker sends g / K, as the sum of g might leave the range of float16.

    Args:
        spec: Says in which type messages are sent.
    """

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(spec, [Round(Collective.SUM, spec.wire, (spec.count,))])
        self._cast = spec.wire != torch.float32

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        (out,) = parts
        if self._cast:
            torch.mul(self._gradient, 1 / self.spec.workers, out=out)
        else:
            out.copy_(self._gradient)

    def received(self) -> Received:
        (reduced,) = self._received
        return super().received() if self._cast or self.spec.divisor != 1 else Sum([reduced])

    def finish(self, out: Tensor) -> None:
        (reduced,) = self._received
        if self._cast:
            out.copy_(reduced).mul_(self.spec.workers / self.spec.divisor)
        else:
            torch.div(reduced, self.spec.divisor, out=out)


class OuterCoder(Coder):
    """A coder that hands on its calls to another; a subclass overrides those in which it does more."""

    def __init__(self, spec: TensorSpec, inner: Coder) -> None:
        super().__init__(spec)
        self._inner = inner

    @property
    def _current(self) -> Coder:
        return self._inner

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Those of the coder that works in the next step."""
        return self._current.rounds

    def use(self, scratch: Scratch) -> None:
        super().use(scratch)
        self._inner.use(scratch)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        self._current.write(index, parts)

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        self._current.merge(index, received, out)

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        self._current.read(index, parts)

    def finish(self, out: Tensor) -> None:
        self._current.finish(out)

    def commit(self) -> None:
        self._current.commit()

    def rollback(self) -> None:
        self._current.rollback()


class WarmUpCoder(OuterCoder):
    """A coder whose first steps are those of another coder, mostly in full precision."""

    def __init__(self, spec: TensorSpec, first: Coder, later: Coder) -> None:
        super().__init__(spec, later)
        self._first, self._later = first, later
        self._steps = 0

    @property
    @abstractmethod
    def warm(self) -> bool:
        """Whether the next step is one of the first."""

    @property
    def _current(self) -> Coder:
        return self._first if self.warm else self._later

    @property
    def lasting_rounds(self) -> tuple[Round, ...]:
        """Those of the later coder."""
        return self._later.lasting_rounds

    def use(self, scratch: Scratch) -> None:
        super().use(scratch)
        self._first.use(scratch)

    def set_batch_scale(self, samples: float) -> None:
        self._later.set_batch_scale(samples)

    def release(self) -> None:
        self._current.release()

    def received(self) -> Received:
        return self._current.received()

    def spread(self, key: str, residual: Tensor, out: Tensor) -> None:
        self._later.spread(key, residual, out)


def as_inner(name: str) -> Any:
    """A class attribute of a codec around another, which is that of its `inner`."""
    return property(lambda codec: getattr(codec.inner, name), doc="As the codec inside.")


class Codec(ABC):
    """How gradients are compressed: a configuration, a frozen dataclass of plain values.

    As text it is `name:option=value,...`; see `hybridpar.compress.policy`.
    """

    #: What users type.
    name: ClassVar[str]
    #: Whether the expected result differs from the true mean.
    biased: ClassVar[bool]
    #: Whether a coder has state of its own, beside error feedback's.
    stateful: ClassVar[bool] = False
    #: Whether it is used with error feedback unless asked otherwise.
    feedback: ClassVar[bool] = False
    #: Whether it sends floating-point messages, which could be sent in a shorter type.
    castable: ClassVar[bool] = False
    #: Types of devices that there are compiled kernels for, see `hybridpar.compress.kernels`.
    kernels: ClassVar[tuple[str, ...]] = ()
    #: Whether a gradient is taken as soon as it is there: its first message is written from it alone, whatever others
    #: write, and it is not needed afterwards.
    at_once: ClassVar[bool] = False
    #: Whether what is decoded differs in the last bits with and without kernels, so that all workers must have them.
    decodes_by_kernels: ClassVar[bool] = False
    #: Whether error feedback can be put around it: what it leaves out is v - C(v), and nothing else remembers that.
    takes_feedback: ClassVar[bool] = True
    #: Whether it keeps the momentum itself, so that the optimizer must have none; see `check_optimizer`.
    refuses_momentum: ClassVar[bool] = False
    #: Whether messages cannot be read without the state of the coder that wrote them, see `hybridpar.server.encoding`.
    reads_state: ClassVar[bool] = False
    #: Whether what comes of it stands for the sum of the gradients; else it is what owners of stripes made of that.
    gives_sums: ClassVar[bool] = True

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape should be compressed; others are sent in full.

        Args:
            shape: Of the parameter.
        """
        return math.prod(shape) > 0

    @property
    def core(self) -> Codec:
        """The codec without what is around it: error feedback, casts."""
        inner: Codec | None = getattr(self, "inner", None)
        return self if inner is None else inner.core

    @property
    def keeps_momentum(self) -> bool:
        """Whether it keeps momentum with the options that it has; `refuses_momentum` is about the codec as such."""
        return self.refuses_momentum

    @abstractmethod
    def bind(self, spec: TensorSpec) -> Coder:
        """A coder for one parameter on one worker.

        Args:
            spec: The parameter, and who exchanges it.
        """


class LargeTensorCodec(Codec):
    """A codec for matrices and convolutions of at least `least` elements; smaller parameters are sent in full."""

    #: An option of the codec, whose default is its own.
    least: int

    def __post_init__(self) -> None:
        check(self.least >= 1, f"least={self.least}", "It is a number of elements.", "Use 1 or more.")

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it is a matrix or more, and large enough."""
        return len(shape) > 1 and math.prod(shape) >= self.least


#: All codecs by name.
CODECS: Registry[type[Codec]] = Registry("codec")
