"""Agrees between workers on which codec each parameter uses, before anything is sent.

Workers that compress by different rules would read each other's messages wrongly. Every worker reads the rules it was
given; then all compare them. An error of one worker is raised on all of them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.compress import Policy, check_optimizer, read_policy
from hybridpar.errors import HybridparError, UsageError

_log = logging.getLogger(__name__)

#: What asks for a measured choice instead of a policy.
AUTO = "auto"


def is_auto(codec: str | Policy) -> bool:
    """Whether the policy is to be measured."""
    return isinstance(codec, str) and codec.strip() == AUTO


def agree_on_policy(codec: str | Policy, names: Collection[str], world: World, fidelity: str = "") -> str | Policy:
    """Read a policy on all workers and compare them; a collective."""
    mine: str | Policy | HybridparError
    try:
        mine = AUTO if is_auto(codec) else _read(codec, names)
    except HybridparError as error:
        mine = error
    told = f"{AUTO} with fidelity {fidelity}" if mine == AUTO else str(mine)
    answers = world.gather(("", mine.what) if isinstance(mine, HybridparError) else (told, ""))
    if isinstance(mine, HybridparError):
        raise mine
    for rank, answer in enumerate(answers):
        assert isinstance(answer, tuple)
        text, problem = answer
        if problem:
            raise UsageError(
                f"worker {rank} cannot use the compression policy that it was given: {problem}",
                "All workers compress alike.",
                "Give every worker the same policy.",
            )
        if text != told:
            raise UsageError(
                f"worker {rank} was given another compression policy than worker {world.rank}: "
                f"{_difference(told, text)}",
                "What one worker writes another one reads, by the same rules.",
                "Start all workers with the same --compress.",
            )
    return mine


def check_compression(
    codec: str | Policy,
    parameters: Mapping[str, Tensor],
    replicas: int,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    tell: bool = True,
) -> None:
    """Check what `--compress` says also where nothing is exchanged, and say so."""
    if is_auto(codec):
        return
    policy = _read(codec, parameters)
    for name, one in parameters.items():
        used = policy.codec_of(name)
        if one.requires_grad and one.dtype != torch.float32 and policy.text_of(name) != "none" and used.fits(one.shape):
            raise UsageError(
                f"the parameter {name!r} of type {one.dtype} with --compress {codec}",
                "Codecs take float32 gradients.",
                f"Keep parameters in float32 (--amp leaves them there), or start the rules with {name} -> none.",
            )
    for rule, optimizer in itertools.product(policy.rules, optimizers):
        check_optimizer(rule.codec, optimizer)
    if tell and replicas == 1 and not policy.changes_nothing:
        _log.warning("--compress %s can gain nothing: there is one replica, and its gradients go nowhere", codec)


def _read(codec: str | Policy, names: Collection[str]) -> Policy:
    policy = read_policy(codec) if isinstance(codec, str) else codec
    policy.check(names)
    return policy


def _difference(mine: str, theirs: str) -> str:
    """Where they differ."""
    if AUTO in (mine.split()[0], theirs.split()[0]):
        return f"{theirs} and not {mine}"
    return read_policy(mine).difference(read_policy(theirs))
