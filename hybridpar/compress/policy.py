"""Policies: rules that choose the codec of a parameter by its name.

A policy is a list of rules, each a pattern and a codec; of those whose pattern matches a parameter's name the first
counts, and a parameter that none matches is not compressed. Patterns are those of a shell as Python's `fnmatchcase` has
them: `*` stands for anything (dots too), `?` for one character, `[12]` for one of those; case counts.

As text a policy is a codec (which is a rule for everything), or the rules:

    onebit:warmup=20
    layer4.* -> powersgd:rank=2; *.weight -> onebit

Codecs are read and written as text:

    name                    onebit
    name:option=value,...   onebit:decay=0.9,warmup=20    powersgd:rank=2,cast=bf16    onebit:feedback=off

Options are the fields of the codec. Reading a text and writing it again gives one text for one meaning: options in a
fixed order, without those that are as by default. A rule has its codec as text: codecs are imported when one is needed.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import glob
import itertools
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hybridpar.errors import UsageError, check, shortened
from hybridpar.spec import defaults_of, fields_of, read_values, split_fields

if TYPE_CHECKING:
    from hybridpar.comm.world import World
    from hybridpar.compress.codec import Codec

_log = logging.getLogger(__name__)

#: Characters of a codec with all its options.
_LONGEST = 500


@functools.cache
def parse_codec(text: str) -> Codec:
    """The codec that a text names.

    Args:
        text: `name:option=value,...`.

    Raises:
        UsageError: An unknown name or option, or a value that the option does not take.
    """
    from hybridpar.compress.codec import CODECS

    if len(text) > _LONGEST:
        raise UsageError(f"the codec {shortened(repr(text))}", f"Its text has at most {_LONGEST} characters.")
    name, _, tail = text.strip().partition(":")
    kind, label = CODECS.get(name), f"codec {name!r}"
    values = read_values(label, split_fields(repr(text), tail), _options(kind), defaults_of(kind))
    codec = kind(**values)
    check(
        codec.castable or "cast" not in values,
        f"{label} with cast={codec.cast}",
        "Its messages are of one type by its name, or are bits: there is nothing to cast.",
        "Leave out the cast.",
    )
    if not codec.feedback:
        check(
            not {"decay", "warmup"} & values.keys(),
            f"decay or warmup in {text!r}",
            f"Codec {name!r} is used without error feedback, which these are options of.",
            "Add feedback=on, or leave them out.",
        )
        return codec
    what, fix = f"{label} with error feedback", "Leave out feedback=on."
    check(codec.takes_feedback, what, "What it leaves out is remembered by a rule of its own, or not at all.", fix)
    check(codec.biased, what, "It is unbiased: on average it leaves out nothing that would have to be sent later.", fix)
    return codec


def format_codec(codec: Codec) -> str:
    """The shortest text that `parse_codec` turns into an equal codec.

    Args:
        codec: The codec.
    """
    defaults = defaults_of(type(codec))
    values = {option: getattr(codec, option) for option in _options(type(codec))}
    changed = [f"{option}={_write(value)}" for option, value in values.items() if value != defaults[option]]
    return f"{codec.name}:{','.join(changed)}" if changed else codec.name


def check_optimizer(codec: Codec, optimizer: torch.optim.Optimizer) -> None:
    """Check that no momentum is kept twice.

    Args:
        codec: The codec of the gradients.
        optimizer: What they are given to.

    Raises:
        UsageError: The codec keeps the momentum itself, and the optimizer has one, too.
    """
    if not codec.keeps_momentum:
        return
    kind, name = type(optimizer).__name__, format_codec(codec)
    for group in optimizer.param_groups:
        of_optimizer = next((f"{option}={group[option]}" for option in ("betas", "momentum") if group.get(option)), "")
        check(
            not of_optimizer,
            f"codec {name!r} with {of_optimizer} in {kind}",
            "The codec keeps the momentum itself; twice would be too much.",
            "Use torch.optim.SGD with momentum=0 (--optimizer sgd:momentum=0); the codec has the option momentum.",
        )


def _options(kind: type[Codec]) -> dict[str, Any]:
    """Options of a codec with their types: its own, then those of its bases."""
    types_of = fields_of(kind)
    declared = [vars(base).get("__annotations__", {}) for base in kind.__mro__]
    depth = {name: max(number for number, names in enumerate(declared) if name in names) for name in types_of}
    return {name: types_of[name] for name in sorted(types_of, key=depth.__getitem__)}


def _write(value: Any) -> str:
    if value is None:
        return "auto"
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return ("on" if value else "off") if isinstance(value, bool) else f"{value}"


_ARROW = "->"


@dataclass(frozen=True)
class Rule:
    """The codec of the parameters of some names.

    Attributes:
        pattern: What a name must match; see the module's header.
        codec: The codec, as text.
    """

    pattern: str
    codec: str

    def __str__(self) -> str:
        return f"{self.pattern} {_ARROW} {self.codec}"

    def matches(self, name: str) -> bool:
        """Whether the rule is about a parameter."""
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass(frozen=True)
class Policy:
    """The codec of each parameter.

    Attributes:
        rules: The first that matches counts.
    """

    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, codec: Codec) -> Policy:
        """One codec for everything.

        Args:
            codec: The codec.
        """
        return cls((Rule("*", format_codec(codec)),))

    def __str__(self) -> str:
        """The policy as text, which `read_policy` turns into an equal one."""
        if len(self.rules) == 1 and self.rules[0].pattern == "*":
            return self.rules[0].codec
        return "; ".join(map(str, self.rules))

    @property
    def changes_nothing(self) -> bool:
        """Whether nothing is compressed."""
        return all(rule.codec == "none" for rule in self.rules)

    @property
    def codecs(self) -> list[Codec]:
        """The codecs of the rules."""
        return [parse_codec(rule.codec) for rule in self.rules]

    @property
    def at_once(self) -> bool:
        """Whether every codec takes gradients as soon as they are there, see `Codec.at_once`."""
        return all(codec.at_once for codec in self.codecs)

    def codec_of(self, name: str) -> Codec:
        """The codec of a parameter.

        Args:
            name: Of the parameter.
        """
        return parse_codec(self.text_of(name))

    def text_of(self, name: str) -> str:
        """The codec of a parameter, as text.

        Args:
            name: Of the parameter.
        """
        return next((rule.codec for rule in self.rules if rule.matches(name)), "none")

    def prepare(self, device: torch.device) -> str:
        """Build or load what the codecs need, so that no step waits for it.

        Args:
            device: Where gradients will be.

        Returns:
            What must be equal on all workers beside the policy, in words: whether there are kernels, where it matters.
        """
        codecs = [codec for codec in self.codecs if codec.decodes_by_kernels]
        if not codecs:
            return ""
        needs = {codec.prepare(device) for codec in codecs}
        return "with kernels" if all(needs) else "without kernels"

    def check(self, names: Collection[str]) -> None:
        """Refuse rules that are about nothing.

        Args:
            names: All parameters of the model.

        Raises:
            UsageError: A pattern matches none of them.
        """
        for rule in self.rules if names else ():
            if not any(rule.matches(name) for name in names):
                plain = re.sub(r"[*?\[\]]", "", rule.pattern).strip(".")
                raise UsageError(
                    f"the pattern {shortened(repr(rule.pattern))} of a compression policy matches no parameter",
                    "Each rule is about a parameter of the model; * stands for anything.",
                    f"Nearest: {', '.join(difflib.get_close_matches(plain, names, cutoff=0))}.",
                )


#: What asks for a choice of the planner instead of a policy.
AUTO = "auto"


def is_auto(codec: str | Policy) -> bool:
    """Whether the planner is to choose the policy."""
    return isinstance(codec, str) and codec.strip() == AUTO


def read_policy(text: str) -> Policy:
    """The policy that a text names; see the module's header.

    Args:
        text: A codec or rules.

    Raises:
        UsageError: A codec is unknown, or a rule is not whole.
    """
    if _ARROW not in text:
        return Policy((Rule("*", _canonical(text)),))
    rules = []
    for part in text.split(";"):
        pattern, _, codec = (piece.strip() for piece in part.partition(_ARROW))
        what = f"{shortened(repr(part.strip()))} in the policy {shortened(repr(text))}"
        check(bool(pattern and codec), what, "Rules are pattern -> codec, joined by ;.")
        rules.append(Rule(pattern, _canonical(codec)))
    return Policy(tuple(rules))


def _canonical(text: str) -> str:
    """The one text of a codec."""
    return "none" if text.strip() == "none" else format_codec(parse_codec(text))


def agree_on_policy(codec: str | Policy, names: Collection[str], world: World, fidelity: str = "") -> str | Policy:
    """Read a policy on all workers and compare them; a collective.

    Workers that compress by different rules would read each other's messages wrongly. `auto` stays as it is, and an
    error of a single worker is raised on all of them.
    """
    mine = world.on_all(lambda: read_for(codec, names))
    answers: list[Any] = world.gather(f"{AUTO} with fidelity {fidelity}" if mine == AUTO else str(mine))
    for rank, text in enumerate(answers):
        for rule, other in itertools.zip_longest(text.split("; "), answers[0].split("; "), fillvalue="no rule"):
            check(
                rule == other,
                f"worker {rank} was given another compression policy than worker 0: {rule} and not {other}",
                "What a worker writes another reads, by the same rules.",
                "Start all workers with the same --compress.",
            )
    return mine


def check_compression(
    codec: str | Policy,
    parameters: Mapping[str, torch.Tensor],
    replicas: int,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    tell: bool = True,
) -> None:
    """Check what `--compress` says also where nothing is exchanged, and say so."""
    policy = read_for(codec, parameters)
    if not isinstance(policy, Policy):
        return
    for name, tensor in parameters.items():
        if tensor.dtype == torch.float32 or not tensor.requires_grad or policy.text_of(name) == "none":
            continue
        check(
            not policy.codec_of(name).fits(tensor.shape),
            f"the parameter {name!r} of type {tensor.dtype} with --compress {codec}",
            "Codecs take float32 gradients.",
            f"Keep parameters in float32 (--amp leaves them there), or start the rules with {name} -> none.",
        )
    if policy.changes_nothing:
        return
    for each, optimizer in itertools.product(policy.codecs, optimizers):
        check_optimizer(each, optimizer)
    if tell and replicas == 1:
        _log.warning("--compress %s can gain nothing: there is a single replica, and its gradients go nowhere", codec)


def read_for(codec: str | Policy, names: Collection[str]) -> str | Policy:
    """The policy that a text names, checked against all parameters of a model; `auto` as it is."""
    if is_auto(codec):
        return AUTO
    policy = read_policy(codec) if isinstance(codec, str) else codec
    policy.check(names)
    return policy


def exact_rules(codecs: Iterable[tuple[str, str]]) -> Policy:
    """A policy of a rule for each parameter."""
    return Policy(tuple(Rule(glob.escape(name), _canonical(codec)) for name, codec in codecs))
