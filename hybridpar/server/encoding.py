"""Compresses pushes: encodes the gradient of a stripe at the worker, and decodes it at the server.

A codec guarantees that all workers read the same numbers from the messages of its rounds. A worker runs its coders as a
job by itself, and sends what came of each round; the server reads that as another worker would, which sends nothing. It
remembers nothing of a worker: where a message cannot be read without what the coder knows (`Codec.reads_state`), the
push brings that along. What a message leaves out of the gradient stays with the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress import Coder, Collective, Policy, Round, TensorSpec, format_codec
from hybridpar.compress.codec import Full
from hybridpar.compress.memory import Scratch
from hybridpar.errors import check
from hybridpar.server.stripes import Piece, Stripe

#: The gradient of a piece in full precision, or the messages of its codec's rounds.
PieceMessage = Tensor | list[Tensor]


def check_for_servers(policy: Policy) -> None:
    """Check that codecs hand over gradients and nothing else, parameter by parameter."""
    for codec in policy.codecs:
        given = f"codec {format_codec(codec)!r} with parameter servers"
        what = "It has owners of stripes make an update of the gradients, and with servers these do that."
        check(codec.gives_sums, given, what, "Use onebit, and momentum as usual: servers keep it.")
        what = "Workers push parameter by parameter, so there are no buckets."
        check(getattr(codec, "scope", "") != "bucket", given, what, "Leave out scope=bucket.")


class PushEncoder:
    """A worker's side: turns gradients of a stripe into messages, and keeps what they leave out.

    Args:
        policy: Codec of each parameter.
        stripe: The stripe.

    Raises:
        UsageError: A codec of the policy is of no use with servers.
    """

    def __init__(self, policy: Policy, stripe: Stripe) -> None:
        check_for_servers(policy)
        self.stripe = stripe
        codecs = [policy.codec_of(piece.name) for piece in stripe.pieces]
        self._reads_state = [codec.reads_state for codec in codecs]
        self._coders = [codec.bind(_spec(piece)) for codec, piece in zip(codecs, stripe.pieces, strict=True)]
        self._scratch = Scratch(torch.device("cpu"))  # pieces are coded by turns

    def encode(self, gradients: Sequence[Tensor]) -> tuple[list[PieceMessage], dict[int, dict[str, Any]]]:
        """The messages of all pieces; to be followed by `commit` if the push counts.

        Args:
            gradients: For each piece 1-D float32, which must stay as it is until the messages are sent.

        Returns:
            For each piece its message; and by number of the piece what its coder must know to read it.
        """
        messages: list[PieceMessage] = []
        states: dict[int, dict[str, Any]] = {}
        for number, (coder, gradient) in enumerate(zip(self._coders, gradients, strict=True)):
            current = coder.working
            current.scratch = self._scratch
            full = isinstance(current, Full) and current.spec.wire == torch.float32
            if self._reads_state[number] and not full:
                states[number] = current.message_state()
            current.gradient = gradient
            messages.append(gradient if full else [_write(current, *entry) for entry in enumerate(current.rounds)])
        return messages, states

    def commit(self) -> None:
        """The push was taken in."""
        for coder in self._coders:
            coder.commit()

    def state_dict(self) -> dict[str, Any]:
        """All of the coders' state by piece; residuals included."""
        return {coder.spec.name: coder.state_dict() for coder in self._coders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned of the same stripe; other pieces' state is left alone.

        Args:
            state: What `state_dict` returned.
        """
        for coder in self._coders:
            if coder.spec.name in state:
                coder.load_state_dict(state[coder.spec.name])


class PushDecoder:
    """A server's side: turns the messages of any worker into the gradient that they stand for.

    Args:
        policy: Codec of each parameter.
        stripe: The stripe.
    """

    def __init__(self, policy: Policy, stripe: Stripe) -> None:
        codecs = [policy.codec_of(piece.name) for piece in stripe.pieces]
        pieces = zip(codecs, stripe.pieces, strict=True)
        self._coders = [codec.bind(_spec(piece), remembers=False) for codec, piece in pieces]
        self._reads_state = [codec.reads_state for codec in codecs]
        self._ranges = stripe.ranges
        self._scratch = Scratch(torch.device("cpu"))

    def decode(self, pieces: Sequence[PieceMessage], states: Mapping[int, Mapping[str, Any]], out: Tensor) -> None:
        """Decode a push.

        Args:
            pieces: The messages of all pieces, as `PushEncoder.encode` returned them.
            states: What it returned beside them.
            out: 1-D float32 of the stripe's size.

        Raises:
            ValueError: The messages are not of these codecs and this stripe.
        """
        for number, (message, (first, last)) in enumerate(zip(pieces, self._ranges, strict=True)):
            if not isinstance(message, Tensor):
                self._decode(number, message, states.get(number, {}), out[first:last])
                continue
            _check_message(message, last - first, torch.float32)
            out[first:last].copy_(message)

    def _decode(self, number: int, messages: Sequence[Tensor], state: Mapping[str, Any], out: Tensor) -> None:
        coder = self._coders[number].working
        coder.scratch = self._scratch
        if self._reads_state[number]:
            coder.load_state_dict(state)
        for index, (entry, came) in enumerate(zip(coder.rounds, messages, strict=True)):
            _check_message(came, sum(entry.sizes), entry.dtype)
            coder.read(index, [came])
        coder.finish(out)


def _write(coder: Coder, index: int, entry: Round) -> Tensor:
    """Run a round by itself; what comes of it."""
    came = torch.zeros(sum(entry.sizes), dtype=entry.dtype)
    coder.write(index, [came])
    if entry.collective is Collective.SHARD:
        written = came.clone()
        coder.merge(index, [written], came)
    coder.read(index, [came])
    return came


def _check_message(message: Tensor, count: int, dtype: torch.dtype) -> None:
    if message.shape != (count,) or message.dtype != dtype:
        raise ValueError(f"a message of {tuple(message.shape)} {message.dtype}, where the codec makes {count} {dtype}")


def _spec(piece: Piece) -> TensorSpec:
    return TensorSpec(piece.label, piece.shape)
