"""Policies: rules that choose the codec of a parameter by its name.

A policy is a list of rules, each a pattern and a codec; of those whose pattern matches a parameter's name the first
counts, and a parameter that none matches is not compressed. Patterns are those of a shell as Python's `fnmatchcase` has
them: `*` stands for anything (dots too), `?` for one character, `[12]` for one of those; case counts.

As text a policy is a codec (which is a rule for everything), or the rules:

    onebit:warmup=20
    layer4.* -> powersgd:rank=2; *.weight -> onebit

Codecs are read and written as text, such as `onebit:decay=0.9,warmup=20`: parsing, formatting, binding to a parameter.

    name                    onebit
    name:option=value,...   onebit:decay=0.9,warmup=20    powersgd:rank=2,cast=bf16    onebit:feedback=off

Options are those of the codec, of error feedback (`feedback`, `decay`, `warmup`) and `cast`. Reading a text
and writing it again gives one text for one meaning: options in a fixed order, without those that are as by default.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import glob
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hybridpar.compress.codec import CODECS, Codec, Coder, Full, TensorSpec
from hybridpar.compress.codecs.none import Cast
from hybridpar.compress.feedback import ErrorFeedback
from hybridpar.errors import HybridparError, UsageError, check, shortened
from hybridpar.spec import defaults_of, fields_of, read_values, split_fields

_log = logging.getLogger(__name__)

#: Characters of a codec with all its options.
_LONGEST = 500


def parse_codec(text: str) -> Codec:
    """The codec that a text names, in its wrappers.

    Args:
        text: `name:option=value,...`.

    Raises:
        UsageError: An unknown name or option, or a value that the option does not take.
    """
    if len(text) > _LONGEST:
        raise UsageError(f"the codec {shortened(repr(text))}", f"Its text has at most {_LONGEST} characters.")
    name, _, tail = text.strip().partition(":")
    kind = CODECS.get(name)
    of_codec, around = _options(kind), _options(ErrorFeedback)
    types_of = {"feedback": bool, "cast": Literal["fp16", "bf16"], **around, **of_codec}
    defaults = {**defaults_of(ErrorFeedback), **defaults_of(kind)}
    values = read_values(f"codec {name!r}", split_fields(repr(text), tail), types_of, defaults)
    codec: Codec = kind(**_chosen(values, of_codec))
    if "cast" in values:
        codec = Cast(codec, values["cast"])
    tuned = _chosen(values, around)
    if not values.get("feedback", kind.feedback):
        check(
            not tuned,
            f"{', '.join(tuned)} in {text!r}",
            f"Codec {name!r} is used without error feedback, which this is an option of.",
            "Add feedback=on, or leave it out.",
        )
        return codec
    what, fix, core = f"codec {name!r} with error feedback", "Leave out feedback=on.", codec.core
    check(core.takes_feedback, what, "What it leaves out is remembered by a rule of its own, or not at all.", fix)
    check(core.biased, what, "It is unbiased: on average it leaves out nothing that would have to be sent later.", fix)
    return ErrorFeedback(codec, **tuned)


def bind(codec: Codec, spec: TensorSpec) -> Coder:
    """A coder for one parameter: of the codec where it fits, else of `none`.

    Args:
        codec: The codec.
        spec: The parameter, and who exchanges it.
    """
    if not codec.fits(spec.shape):
        return Full(spec)
    if codec.core.kernels:
        from hybridpar.compress.kernels import prepare

        prepare(codec, spec.device)
    return codec.bind(spec)


def format_codec(codec: Codec) -> str:
    """The shortest text that `parse_codec` turns into an equal codec.

    Args:
        codec: The codec.
    """
    core, options = codec.core, _changed(codec.core)
    inner = codec
    if isinstance(codec, ErrorFeedback):
        options |= _changed(codec)
        inner = codec.inner
    if isinstance(inner, Cast):
        options["cast"] = inner.cast
    with_feedback = inner is not codec
    if with_feedback != core.feedback:
        options["feedback"] = with_feedback
    tail = ",".join(f"{option}={_write(value)}" for option, value in options.items())
    return f"{core.name}:{tail}" if tail else core.name


def check_optimizer(codec: Codec, optimizer: torch.optim.Optimizer) -> None:
    """Check that no momentum is kept twice.

    Args:
        codec: The codec of the gradients.
        optimizer: What they are given to.

    Raises:
        UsageError: The codec keeps the momentum itself, and the optimizer has one, too.
    """
    if not codec.core.keeps_momentum:
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


def _options(kind: type[Codec]) -> Mapping[str, Any]:
    """Options of a codec with their types, in order; the codec inside a wrapper is not one."""
    return {name: type_ for name, type_ in fields_of(kind).items() if name != "inner"}


def _chosen(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in options}


def _changed(codec: Any) -> dict[str, Any]:
    """Options whose values are not the default."""
    defaults = {field.name: field.default for field in dataclasses.fields(codec)}
    values = {name: getattr(codec, name) for name in _options(type(codec))}
    return {name: value for name, value in values.items() if value != defaults[name]}


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
        codec: The codec.
    """

    pattern: str
    codec: Codec

    def __str__(self) -> str:
        return f"{self.pattern} {_ARROW} {format_codec(self.codec)}"

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
        return cls((Rule("*", codec),))

    def __str__(self) -> str:
        """The policy as text, which `read_policy` turns into an equal one."""
        if len(self.rules) == 1 and self.rules[0].pattern == "*":
            return format_codec(self.rules[0].codec)
        return "; ".join(map(str, self.rules))

    @property
    def changes_nothing(self) -> bool:
        """Whether nothing is compressed."""
        return all(format_codec(rule.codec) == "none" for rule in self.rules)

    @property
    def at_once(self) -> bool:
        """Whether every codec takes gradients as soon as they are there, see `Codec.at_once`."""
        return all(rule.codec.core.at_once for rule in self.rules)

    def codec_of(self, name: str) -> Codec:
        """The codec of a parameter.

        Args:
            name: Of the parameter.
        """
        return next((rule.codec for rule in self.rules if rule.matches(name)), _NONE)

    def text_of(self, name: str) -> str:
        """The codec of a parameter, as text.

        Args:
            name: Of the parameter.
        """
        return format_codec(self.codec_of(name))

    def bind(self, spec: TensorSpec) -> Coder:
        """A coder for one parameter; of `none` where no rule matches, or its codec does not fit.

        Args:
            spec: The parameter.
        """
        return bind(self.codec_of(spec.name), spec)

    def prepare(self, device: torch.device) -> str:
        """Build or load what the codecs need, so that no step waits for it.

        Args:
            device: Where gradients will be.

        Returns:
            What must be equal on all workers beside the policy, in words: whether there are kernels, where it matters.
        """
        codecs = [rule.codec for rule in self.rules if rule.codec.core.decodes_by_kernels]
        if not codecs:
            return ""
        from hybridpar.compress.kernels import prepare

        needs = {prepare(codec, device) for codec in codecs}
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


_NONE = parse_codec("none")

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
        return Policy.of(parse_codec(text))
    rules = []
    for part in text.split(";"):
        pattern, _, codec = (piece.strip() for piece in part.partition(_ARROW))
        what = f"{shortened(repr(part.strip()))} in the policy {shortened(repr(text))}"
        check(bool(pattern and codec), what, "Rules are pattern -> codec, joined by ;.")
        rules.append(Rule(pattern, parse_codec(codec)))
    return Policy(tuple(rules))


def agree_on_policy(
    codec: str | Policy, names: Collection[str], gather: Callable[[Any], Sequence[Any]], fidelity: str = ""
) -> str | Policy:
    """Read a policy on all workers and compare them; a collective.

    Workers that compress by different rules would read each other's messages wrongly. `auto` stays as it is, and an
    error of a single worker is raised on all of them.
    """
    mine: str | Policy = ""
    problem = None
    try:
        mine = read_for(codec, names)
    except HybridparError as error:
        problem = error
    answers = gather(
        (f"{AUTO} with fidelity {fidelity}" if mine == AUTO else str(mine), problem.what if problem else "")
    )
    if problem:
        raise problem
    first = answers[0][0]
    for rank, (text, refused) in enumerate(answers):
        check(
            not refused,
            f"worker {rank} cannot use the compression policy that it was given: {refused}",
            "All workers compress alike.",
            "Give every worker the same policy.",
        )
        for rule, other in itertools.zip_longest(text.split("; "), first.split("; "), fillvalue="no rule"):
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
        coded = policy.text_of(name) != "none" and policy.codec_of(name).fits(tensor.shape)
        check(
            not (coded and tensor.requires_grad) or tensor.dtype == torch.float32,
            f"the parameter {name!r} of type {tensor.dtype} with --compress {codec}",
            "Codecs take float32 gradients.",
            f"Keep parameters in float32 (--amp leaves them there), or start the rules with {name} -> none.",
        )
    for rule, optimizer in itertools.product(policy.rules, optimizers):
        check_optimizer(rule.codec, optimizer)
    if tell and replicas == 1 and not policy.changes_nothing:
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
    return Policy(tuple(Rule(glob.escape(name), parse_codec(codec)) for name, codec in codecs))
