"""Compresses pushes: encodes the gradient of a stripe at the worker, and decodes it at the server.

Codecs guarantee that all workers decode the same numbers from the messages of a round. A server that decodes pushes
acts as one more worker that sends nothing: the learner runs its coders as a job of one and sends the result of each
round; a copy of each coder at the server reads these messages and decodes the same numbers as the learner's own coder.
The difference to the gradient is the learner's residual.

Messages where stripes are sharded are taken before their owner adds them up, where that makes them larger (as for
`twobit:pull=full`, whose owners answer in full precision): the server's copy does the owner's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress import (
    Coder,
    Collective,
    ErrorFeedback,
    Policy,
    Round,
    TensorSpec,
    bind,
    format_codec,
    parse_codec,
)
from hybridpar.compress.feedback import FeedbackCoder
from hybridpar.compress.memory import Residual, Scratch
from hybridpar.compress.packing import aligned
from hybridpar.errors import SyncError, UsageError
from hybridpar.server.stripes import Piece, Stripe

_NONE = parse_codec("none")
_CPU = torch.device("cpu")


def _spec(piece: Piece) -> TensorSpec:
    return TensorSpec(piece.label, piece.shape)


def _plain(policy: Policy, piece: Piece) -> Coder:
    """A piece's coder as the server has it: the residual is kept by the learner."""
    codec = policy.codec_of(piece.name)
    return bind(codec.inner if isinstance(codec, ErrorFeedback) else codec, _spec(piece))


def _sent_size(entry: Round) -> int:
    """Bytes of a round's message on its way, each beginning at a multiple of what packing wants."""
    return aligned(min(sum(entry.sizes), sum(entry.merged)) * entry.dtype.itemsize)


def message_size(rounds: Sequence[Round]) -> int:
    """Bytes of a piece's messages."""
    return sum(map(_sent_size, rounds))


def check_for_servers(policy: Policy) -> None:
    """Check that codecs hand over gradients and nothing else."""
    for rule in policy.rules:
        core = rule.codec.core
        if not core.gives_sums:
            raise UsageError(
                f"codec {format_codec(rule.codec)!r} with parameter servers",
                "It has owners of stripes make an update of the gradients, and with servers these do that.",
                "Use onebit, and momentum as usual: servers keep it.",
            )


class PushEncoder:
    """A learner's side: turns gradients of a stripe into messages, and keeps what they leave out.

    Args:
        policy: Codec of each parameter.
        stripe: The stripe.

    Raises:
        UsageError: A codec of the policy has owners of stripes make an update, which servers do themselves.
    """

    def __init__(self, policy: Policy, stripe: Stripe) -> None:
        check_for_servers(policy)
        self.stripe = stripe
        self._coders = [bind(policy.codec_of(piece.name), _spec(piece)) for piece in stripe.pieces]
        self._scratch = Scratch(_CPU)  # pieces are coded one after the other

    @property
    def warm(self) -> list[int]:
        """Numbers of the pieces that are sent in full precision this time, because their codec is warming up."""
        return [n for n, coder in enumerate(self._coders) if isinstance(coder, FeedbackCoder) and coder.warm]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each piece's next message."""
        return [message_size(coder.open().rounds) for coder in self._coders]

    def encode(self, number: int, gradient: Tensor, decoded: Tensor | None = None) -> Tensor:
        """The message of a piece; to be followed by `commit` or `rollback` of all.

        Args:
            number: Of the piece.
            gradient: 1-D float32; it stays as it is.
            decoded: Filled with what the server will decode; None to skip that.

        Returns:
            1-D uint8, new.
        """
        coder = self._coders[number].open()
        coder.use(self._scratch)
        rounds = coder.rounds
        message = torch.empty(message_size(rounds), dtype=torch.uint8)
        coder.begin(gradient)
        begin = 0
        for index, entry in enumerate(rounds):
            written = torch.zeros(sum(entry.sizes), dtype=entry.dtype)
            coder.write(index, [written])
            came = written
            if entry.collective is Collective.SHARD:
                came = torch.zeros(sum(entry.merged), dtype=entry.dtype)
                coder.merge(index, [written], came)
            coder.read(index, [came])
            sent = (came if came.numel() <= written.numel() else written).view(torch.uint8)
            message[begin : begin + sent.numel()] = sent
            message[begin + sent.numel() : begin + _sent_size(entry)] = 0
            begin += _sent_size(entry)
        coder.finish(torch.empty(coder.spec.count) if decoded is None else decoded)
        return message

    def commit(self) -> None:
        """The push was taken in."""
        for coder in self._coders:
            coder.commit()

    def rollback(self) -> None:
        """The push was lost, or does not count: coders have changed nothing that lasts."""

    def rescale(self, rate: float) -> None:
        """Say which learning rate the coming pushes have.

        Args:
            rate: Learning rate as a fraction of its peak.
        """
        for coder in self._coders:
            coder.learning_rate = rate

    def shared_state(self) -> list[dict[str, Any]]:
        """What a twin must know to decode what comes next, by piece: the coders' own state, without residuals."""
        return [
            coder.state_dict()["inner"] if isinstance(coder, FeedbackCoder) else coder.state_dict()
            for coder in self._coders
        ]

    def state_dict(self) -> dict[str, Any]:
        """All of the coders' state by piece; residuals included."""
        return {coder.spec.name: coder.state_dict() for coder in self._coders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned of the same stripe; other pieces' state is left alone.

        Args:
            state: What `state_dict` returned.
        """
        for coder in self._coders:
            if coder.spec.name in state:
                coder.load_state_dict(state[coder.spec.name])


class PushDecoder:
    """A server's side, for one learner: turns its messages into the gradient that they stand for.

    Args:
        policy: Codec of each parameter.
        stripe: The stripe.
        state: What the learner's `PushEncoder.shared_state` was when it joined.
    """

    def __init__(self, policy: Policy, stripe: Stripe, state: Sequence[dict[str, Any]] = ()) -> None:
        self._twins = [_plain(policy, piece) for piece in stripe.pieces]
        for twin, own in zip(self._twins, state, strict=False):
            twin.load_state_dict(own)
        self._remembers = [isinstance(policy.codec_of(piece.name), ErrorFeedback) for piece in stripe.pieces]
        self._full = [bind(_NONE, _spec(piece)) for piece in stripe.pieces]
        self._flight: list[Coder] = []
        scratch = Scratch(_CPU)  # pieces are coded one after the other
        for coder in [*self._twins, *self._full]:
            coder.use(scratch)
        self._ranges = stripe.ranges
        most = max((piece.count for piece in stripe.pieces), default=0)
        self._zeros, self._spare = torch.zeros(most), torch.empty(most)

    def size(self, warm: Sequence[int] = ()) -> int:
        """Bytes of the next message of all pieces.

        Args:
            warm: Numbers of the pieces that come in full precision.
        """
        return sum(message_size(coder.rounds) for coder in self._coders(warm))

    def _coders(self, warm: Sequence[int]) -> list[Coder]:
        full = frozenset(warm)
        return [self._full[n] if n in full else twin for n, twin in enumerate(self._twins)]

    def decode(self, message: Tensor, out: Tensor, warm: Sequence[int] = ()) -> None:
        """Decode the messages of all pieces, one behind the other; to be followed by `commit` or `rollback`.

        Args:
            message: 1-D uint8.
            out: 1-D float32 of the stripe's size.
            warm: Numbers of the pieces that came in full precision.

        Raises:
            SyncError: The message is of another size.
        """
        if message.numel() != (size := self.size(warm)):
            raise SyncError(f"a push of {message.numel()} bytes, where the codec makes {size}")
        begin, self._flight = 0, self._coders(warm)
        for number, (coder, (first, last)) in enumerate(zip(self._flight, self._ranges, strict=True)):
            begin = self._decode(number, coder, message, begin, out[first:last])

    def commit(self) -> None:
        """What was decoded last counts."""
        for coder in self._flight:
            coder.commit()
        self._flight = []

    def rollback(self) -> None:
        """What was decoded last does not count: the learner will act as if it had not sent it."""
        self._flight = []

    def _decode(self, number: int, coder: Coder, message: Tensor, begin: int, out: Tensor) -> int:
        rounds = coder.rounds
        # Codecs may decode otherwise where what is left out is remembered, so there is a residual that is always zero.
        if self._remembers[number]:
            sizes = {key: len(part) for key, part in coder.residuals.items()}
            coder.memory.update({key: Residual(self._zeros[:size], self._spare[:size]) for key, size in sizes.items()})
        coder.begin(self._zeros[: coder.spec.count])
        for index, entry in enumerate(rounds):
            size = min(sum(entry.sizes), sum(entry.merged)) * entry.dtype.itemsize
            came = message[begin : begin + size].view(entry.dtype)
            begin += _sent_size(entry)
            coder.write(index, [torch.zeros(sum(entry.sizes), dtype=entry.dtype)])
            if entry.collective is Collective.SHARD and sum(entry.merged) > sum(entry.sizes):
                merged = torch.zeros(sum(entry.merged), dtype=entry.dtype)
                coder.merge(index, [came], merged)
                came = merged
            coder.read(index, [came])
        coder.finish(out)
        return begin
