"""The interface of gradient codecs: `Codec`, `Coder`, and the rounds of messages.

A codec turns the gradient of one parameter into messages and back, in **rounds**. In each round every worker writes a
message, the messages are reduced (summed, say), and every worker reads the result. How long a message is and how
it is reduced follows from the parameter's shape and the number of workers alone; so round i of all parameters of
a bucket is one collective per way of collective, and bytes are known before anything is sent.

`Codec` is the configuration, a frozen dataclass with one registry line. `Coder` is what it becomes for one parameter
on one worker, with scratch and state; any coder can have error feedback.
"""

from __future__ import annotations

import enum
import hashlib
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from hybridpar.comm.group import Reduction
from hybridpar.compress.memory import Memory, Residual, Scratch, State
from hybridpar.compress.received import Decoded, Received, Sum
from hybridpar.errors import CheckpointError
from hybridpar.registry import Registry
from hybridpar.spec import AT_LEAST_0, AT_LEAST_1, AT_MOST_1

#: Elements that a coder works on at a time: 256 KB of float32.
CHUNK = 1 << 16


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
        sizes: Elements of each part that is written: one part, or one stripe per worker for SHARD, merged or not.
    """

    collective: Collective
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all parts that a worker writes."""
        return sum(self.sizes) * self.dtype.itemsize

    def sent(self, workers: int) -> int:
        """Bytes that a worker sends to others for it, their mean; as `Exchange` counts them, but for its alignment.

        Args:
            workers: Number of workers.
        """
        if self.collective is Collective.GATHER:
            return self.bytes * (workers - 1)
        # Where stripes are sharded, to their owners and from there to everybody.
        return 2 * self.bytes * (workers - 1) // workers


@dataclass(frozen=True)
class TensorSpec:
    """The parameter that a codec is bound to, and who exchanges it.

    Attributes:
        name: The parameter's name in the model; state is saved under it.
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

    @cached_property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def divisor(self) -> int:
        """What the sum over the workers is divided by."""
        return self.workers if self.average else 1

    @property
    def share(self) -> float:
        """What values are multiplied with before they are sent in 16 bits, so that their sum stays in range."""
        return 1.0 if self.wire == torch.float32 else 1 / self.workers

    def draw_seed(self, *salt: object) -> int:
        """A number below 2**63 that depends on seed, name and salt alone, on any machine.

        Args:
            salt: What else it depends on, by its text.
        """
        text = ":".join(str(part) for part in (self.seed, self.name, *salt))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


#: What a coder has for a gradient when it needs none.
NOTHING = torch.empty(0)


class Coder(ABC):
    """A codec at work on one parameter of one worker.

    The calls of a step: for every round `write`, where stripes are sharded `merge`, and `read`; then `finish`; then
    `commit`, if the step counts. Tensors handed to `write` and `read` are views that stay as they are until `finish`.
    What lasts from step to step is in `memory`, `register_state` and `steps`, all of which `commit` alone changes: a
    step that does not count leaves no trace.

    A non-finite gradient on any worker makes the result non-finite on all of them; it is for the caller not to commit.

    Args:
        spec: The parameter.
        rounds: The rounds of every step; a subclass whose rounds change sets them in `commit`.
    """

    #: Whether anything lasts from step to step.
    lasts = True

    def __init__(self, spec: TensorSpec, rounds: Sequence[Round] = ()) -> None:
        self.spec = spec
        self.rounds = tuple(rounds)
        #: The gradient of the step under way, 1-D float32, contiguous; not to be changed.
        self.gradient = NOTHING
        #: What came of the last round.
        self.messages: Sequence[Tensor] = ()
        #: The coder that works in the next step: this, or in a warm-up another. Equal on all workers.
        self.working: Coder = self
        #: That other coder; None for `Full`.
        self.in_warmup: Coder | None = None
        self._warmup = 0
        #: Which elements of the gradient each residual is about that error feedback may remember, by key.
        self.residuals: dict[str, range] = {}
        #: Gives v, and takes what is not sent, by key. Error feedback puts its residuals here.
        self.memory: dict[str, Memory] = defaultdict(Memory)
        #: With error feedback what was not sent, by key.
        self.unsent: dict[str, Residual] = {}
        #: How many steps counted.
        self.steps = 0
        self._samples = 1.0
        #: Memory to borrow. Coders that never work at the same time are given the same.
        self.scratch = Scratch(spec.device)
        self._states: dict[str, State] = {}

    # ----------------------------------------------------------------------- a codec's author writes these

    @abstractmethod
    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        """Write the message of a round. In the first, take v = gradient + residual from `memory`.

        What is not sent, v - C(v), is left in `memory`, by the end of the last round.

        Args:
            index: Number of the round.
            parts: 1-D tensors to fill, as `rounds[index]` says.
        """

    def merge(self, index: int, received: Sequence[Tensor], out: Tensor) -> None:
        """Make one stripe out of what all workers sent for this worker's stripe; only where stripes are sharded.

        Args:
            index: Number of the round.
            received: The stripe as each worker wrote it, by rank.
            out: What to fill, `rounds[index].sizes[rank]` elements.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sharded round {index}")

    def read(self, index: int, parts: Sequence[Tensor]) -> None:
        """Take what came of a round. Here it is left in `messages` for `finish`.

        Args:
            index: Number of the round.
            parts: The reduced message; or by rank all merged stripes, or all workers' messages. The same memory in
                every step.
        """
        self.messages = parts

    @abstractmethod
    def finish(self, out: Tensor) -> None:
        """Write the mean over the workers, or their sum, as the spec says.

        Args:
            out: 1-D float32, contiguous. It may be the gradient itself.
        """

    def register_state(self, name: str, now: Tensor) -> State:
        """A tensor that lasts: a step writes all of its `next`, which becomes `now` if the step counts. It is saved.

        Args:
            name: What it is saved under.
            now: What it is before the first step.
        """
        self._states[name] = state = State(now)
        return state

    # ------------------------------------------------------------------------------ what is around it calls these

    def remember(self, decay: float = 1.0, warmup: int = 0) -> None:
        """Begin error feedback, see `hybridpar.compress.memory`.

        Args:
            decay: As in `Codec`, and so is the next.
            warmup: Number of steps in which another coder works.
        """
        device = self.spec.device
        self.unsent = {key: Residual.zeros(len(part), device, decay) for key, part in self.residuals.items()}
        self.memory.update(self.unsent)
        self._warmup, self.in_warmup = warmup, self.in_warmup or Full(replace(self.spec, wire=torch.float32))
        self._choose()

    def _choose(self) -> None:
        self.working = self.in_warmup if self.in_warmup is not None and self.steps < self._warmup else self

    def residual_squares(self) -> Tensor:
        """Sum of squares of what this worker has not sent yet, 0-d, in a pass over it."""
        lefts = [residual.left for residual in self.unsent.values()]
        return sum((torch.dot(left, left) for left in lefts), start=torch.zeros((), device=self.spec.device))

    def set_samples(self, samples: float) -> None:
        """Say how many samples the coming steps have.

        Args:
            samples: As a multiple of what options are given for.
        """
        self._samples = samples
        if self.in_warmup is not None and self.in_warmup is not self:
            self.in_warmup.set_samples(samples)

    @classmethod
    def write_together(cls, coders: Sequence[Self], index: int, parts: Sequence[Sequence[Tensor]]) -> None:
        """Write the messages of a round of several parameters; a class for which that is cheaper overrides it.

        Args:
            coders: Of this class.
            index: Number of the round.
            parts: For each coder what `write` fills.
        """
        for coder, mine in zip(coders, parts, strict=True):
            coder.write(index, mine)

    def received(self) -> Received:
        """What comes of every step: the mean over the workers, or their sum, not yet written; there when all is read.

        It is asked for once, after the first step.
        """
        return Decoded(self)

    def commit(self) -> None:
        """The step counts."""
        self.steps += 1
        if self.working is not self:
            self.working.commit()
            self._choose()
            return
        for state in self._states.values():
            state.commit()
        for memory in self.memory.values():
            memory.commit()

    def message_state(self) -> dict[str, Any]:
        """What it must know to read messages, beside them."""
        return {"steps": self.steps, **{name: state.now.clone() for name, state in self._states.items()}}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain tensors and numbers; loadable with `weights_only`."""
        state = self.message_state()
        if self.unsent:
            residuals = {key: residual.left.clone() for key, residual in self.unsent.items()}
            state |= {"shape": list(self.spec.shape), "residuals": residuals}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: What `state_dict` returned.

        Raises:
            CheckpointError: The state belongs to another shape, worker or number of workers.
        """
        saved: Mapping[str, Tensor] = state.get("residuals", {})
        sizes = {key: residual.numel() for key, residual in saved.items()}
        needed = {key: residual.left.numel() for key, residual in self.unsent.items()}
        shape = list(self.spec.shape)
        if sizes != needed or (needed and state["shape"] != shape):
            raise CheckpointError(
                f"the residuals of {self.spec.name!r} have sizes {sizes} for the shape {state.get('shape')}, and "
                f"{needed} for {shape} are needed",
                "They depend on the codec, its options, the number of workers and the worker's rank.",
                "Resume with the same of these, or without residuals.",
            )
        for name, mine in self._states.items():
            mine.load(state[name], self.spec.name)
        for key, residual in saved.items():
            self.unsent[key].left.copy_(residual)
        self.steps = int(state["steps"])
        self._choose()


class Full(Coder):
    """All elements, in the type in which the spec says messages are sent.

    In a type shorter than float32 each worker sends g / K, as the sum of g might leave the range of float16.

    Args:
        spec: Says in which type messages are sent.
    """

    lasts = False

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__(spec, [Round(Collective.SUM, spec.wire, (spec.count,))])

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        if self.spec.wire == torch.float32:
            parts[0].copy_(self.gradient)
        else:
            torch.mul(self.gradient, self.spec.share, out=parts[0])

    def received(self) -> Received:
        as_it_is = self.spec.wire == torch.float32 and self.spec.divisor == 1
        return Sum(self.messages) if as_it_is else super().received()

    def finish(self, out: Tensor) -> None:
        (reduced,) = self.messages
        if self.spec.wire == torch.float32:
            torch.div(reduced, self.spec.divisor, out=out)
        else:
            out.copy_(reduced).mul_(self.spec.workers / self.spec.divisor)


#: Types in which floating-point messages are sent, by name.
WIRE_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """How gradients are compressed: a configuration, a frozen dataclass of plain values.

    As text it is `name:option=value,...`; see `hybridpar.compress.policy`.

    Attributes:
        decay: With error feedback, the residual is multiplied with it at every step, which damps what momentum makes
            unstable.
        warmup: With error feedback, number of first steps that are sent in full precision.
        cast: In which type floating-point messages are sent.
        feedback: Whether what is not sent in a step is added to the gradient of the next.
    """

    decay: Annotated[float, AT_MOST_1] = 1.0
    warmup: Annotated[int, AT_LEAST_0] = 0
    cast: Literal["fp32", "fp16", "bf16"] = "fp32"
    feedback: bool = False

    #: What users type; the registry sets it.
    name: ClassVar[str]
    #: Whether the expected result differs from the true mean. Only then is there error feedback.
    biased: ClassVar[bool] = True
    #: Whether it sends floating-point messages, which could be sent in a shorter type.
    castable: ClassVar[bool] = False
    #: Whether a gradient is taken as soon as it is there: its first message is written from it alone, whatever others
    #: write, and it is not needed afterwards.
    at_once: ClassVar[bool] = False
    #: Whether what is decoded differs in the last bits with and without kernels, so that all workers must have them.
    decodes_by_kernels: ClassVar[bool] = False
    #: Whether error feedback can be put around it: what it leaves out is v - C(v), and nothing else remembers that.
    takes_feedback: ClassVar[bool] = True
    #: Whether it has the momentum itself, so that the optimizer must have none; see `check_optimizer`.
    keeps_momentum: ClassVar[bool] = False
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

    def prepare(self, device: torch.device) -> bool:
        """Build or load compiled kernels, so that no step waits for it; no collective.

        Args:
            device: Where gradients are.

        Returns:
            Whether there are any.
        """
        return False

    @abstractmethod
    def coder(self, spec: TensorSpec) -> Coder:
        """A coder for one parameter on one worker; a codec's author writes this.

        Args:
            spec: The parameter, who exchanges it, and the type in which floating-point messages are sent.
        """

    def bind(self, spec: TensorSpec, *, remembers: bool = True) -> Coder:
        """The same, with error feedback and casts; that of `none` where the codec does not fit.

        Args:
            spec: The parameter, and who exchanges it.
            remembers: Whether it is to write messages; one that only reads them needs no memory.
        """
        if not self.fits(spec.shape):
            return Full(spec)
        self.prepare(spec.device)
        coder = self.coder(spec if self.cast == "fp32" else replace(spec, wire=WIRE_TYPES[self.cast]))
        if self.feedback and remembers:
            coder.remember(self.decay, self.warmup)
        return coder


@dataclass(frozen=True, kw_only=True)
class LargeTensorCodec(Codec):
    """A codec for large matrices and convolutions.

    Attributes:
        least: Parameters with fewer elements are sent in full precision, and so are vectors.
    """

    least: Annotated[int, AT_LEAST_1] = 1000

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it is a matrix or more, and large enough."""
        return len(shape) > 1 and math.prod(shape) >= self.least


#: All codecs by name.
CODECS: Registry[type[Codec]] = Registry("codec", "hybridpar.compress.codecs")
