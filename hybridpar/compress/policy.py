"""Policies: rules that choose the codec of a parameter by its name.

A policy is a list of rules, each a pattern and a codec; of those whose pattern matches a parameter's name the first
counts, and a parameter that none matches is not compressed. Patterns are those of a shell as Python's `fnmatchcase` has
them: `*` stands for anything (dots too), `?` for one character, `[12]` for one of those; case counts.

As text a policy is a codec (which is a rule for everything), the name of a TOML file, or the rules themselves:

    onebit:warmup=20
    rules.toml
    layer4.* -> powersgd:rank=2; *.weight -> onebit

In a file a rule is a table, and the order of the tables counts:

    [[rule]]
    pattern = "layer4.*"
    codec = "powersgd:rank=2"
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridpar.compress.codec import Codec, Coder, TensorSpec
from hybridpar.compress.kernels import prepare
from hybridpar.compress.text import bind, format_codec, parse_codec
from hybridpar.errors import UsageError, nearest, shortened
from hybridpar.formats.file_reader import Unreadable, parse_toml, read_text

#: How a policy that is a file is told from a codec.
SUFFIX = ".toml"

#: Bytes of a file: a rule for each of a model's parameters has far fewer.
_MOST_BYTES = 1 << 20

_ARROW = "->"
_KEYS = ("pattern", "codec")


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
        """Whether the rule is about a parameter.

        Args:
            name: Of the parameter.
        """
        return fnmatch.fnmatchcase(name, self.pattern)


def _decodes_by_kernels(codec: Codec) -> bool:
    inner: Any = codec
    while inner is not None:
        if inner.decodes_by_kernels:
            return True
        inner = getattr(inner, "inner", None)
    return False


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
    def fingerprint(self) -> str:
        """Equal for policies that say the same in the same order."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    @property
    def changes_nothing(self) -> bool:
        """Whether nothing is compressed."""
        return all(format_codec(rule.codec) == "none" for rule in self.rules)

    @property
    def in_one_message(self) -> bool:
        """Whether a step of every codec is one message, see `Codec.one_message`."""
        return all(rule.codec.one_message for rule in self.rules)

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
        needs = {prepare(rule.codec, device) for rule in self.rules if _decodes_by_kernels(rule.codec)}
        return "" if not needs else "with kernels" if all(needs) else "without kernels"

    def check(self, names: Collection[str]) -> None:
        """Refuse rules that are about nothing.

        Args:
            names: All parameters of the model.

        Raises:
            UsageError: A pattern matches none of them.
        """
        for rule in self.rules if names else ():
            if not any(rule.matches(name) for name in names):
                raise UsageError(
                    f"the pattern {shortened(repr(rule.pattern))} of a compression policy matches no parameter",
                    "Each rule is about a parameter of the model; * stands for anything.",
                    f"Nearest: {', '.join(nearest_names(rule.pattern, names))}.",
                )

    def difference(self, other: Policy) -> str:
        """Where another policy says something else: `rule 2 is a -> onebit and not a -> twobit`.

        Args:
            other: The other policy.
        """
        for number, (mine, theirs) in enumerate(zip(self.rules, other.rules, strict=False), 1):
            if str(mine) != str(theirs):
                return f"rule {number} is {theirs} and not {mine}"
        return f"it has {len(other.rules)} rule(s) and not {len(self.rules)}"

    def to_toml(self) -> str:
        """The policy as a file."""
        # A string of JSON is a basic string of TOML.
        return "\n".join(
            f"[[rule]]\npattern = {json.dumps(rule.pattern)}\ncodec = {json.dumps(format_codec(rule.codec))}\n"
            for rule in self.rules
        )


_NONE = parse_codec("none")


def read_policy(text: str) -> Policy:
    """The policy that a text names; see the module's header.

    Args:
        text: A codec, rules, or the name of a TOML file.

    Raises:
        UsageError: A codec is unknown, or a file cannot be read; it says in which line.
    """
    if text.strip().endswith(SUFFIX):
        return _read_file(Path(text.strip()))
    if _ARROW not in text:
        return Policy.of(parse_codec(text))
    rules = []
    for part in text.split(";"):
        pattern, arrow, codec = (piece.strip() for piece in part.partition(_ARROW))
        if not (pattern and arrow and codec):
            what = f"{shortened(repr(part.strip()))} in the policy {shortened(repr(text))}"
            raise UsageError(what, "Rules are pattern -> codec, joined by ;.")
        rules.append(Rule(pattern, parse_codec(codec)))
    return Policy(tuple(rules))


def exact_rules(codecs: Iterable[tuple[str, str]]) -> Policy:
    """A policy of a rule for each parameter.

    Args:
        codecs: Names of parameters, and the text of their codecs.
    """
    return Policy(tuple(Rule(_escape(name), parse_codec(codec)) for name, codec in codecs))


def nearest_names(pattern: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The parameters whose names begin most like a pattern, the best first.

    Args:
        pattern: Of a rule.
        names: Of all parameters.
        most: How many to give at most.
    """
    depth = pattern.count(".") + 1
    plain = re.sub(r"[*?\[\]]", "", pattern).strip(".")

    def likeness(name: str) -> float:
        parts = name.split(".")
        heads = (".".join(parts[:count]) for count in range(1, max(depth, 1) + 1))
        return max(difflib.SequenceMatcher(None, plain, head).ratio() for head in (*heads, name))

    return sorted(names, key=likeness, reverse=True)[:most]


def _escape(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _read_file(path: Path) -> Policy:
    why, fix = "A policy is a file in TOML.", "Name a file, or a codec such as onebit."
    text = read_text(path, "the policy file", UsageError, fix, why=why, most=_MOST_BYTES)
    try:
        data = parse_toml(text)
    except Unreadable as error:
        place = re.search(r"at line (\d{1,9})", str(error))
        line = int(place.group(1)) if place else len(text.splitlines())
        raise UsageError(_at(path, line, str(error)), why) from None
    for key in data:
        if key != "rule":
            raise UsageError(
                _at(path, _line_of_key(text, key), f"unknown key {shortened(repr(key))}"),
                "A policy is a list of tables [[rule]].",
                nearest(key, ["rule"]),
            )
    entries = data.get("rule", [])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(
            _at(path, _line_of_key(text, "rule"), "there is no [[rule]]"),
            "A policy is a list of tables [[rule]], each with a pattern and a codec.",
            "Write [[rule]], with both brackets twice.",
        )
    heads = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
    heads = heads if len(heads) == len(entries) else [1] * len(entries)
    return Policy(_rules(path, text, entries, heads))


def _rules(path: Path, text: str, entries: Sequence[dict[str, Any]], heads: Sequence[int]) -> tuple[Rule, ...]:
    """The tables of a file, which begin in these lines."""
    rules: list[Rule] = []
    for entry, head in zip(entries, heads, strict=True):
        for key in entry:
            if key not in _KEYS:
                what = _at(path, _line_of_key(text, key, head), f"unknown key {shortened(repr(key))} in a rule")
                raise UsageError(what, "A rule has a pattern and a codec.", nearest(key, _KEYS))
        for key in _KEYS:
            if not isinstance(entry.get(key), str) or not entry[key].strip():
                what = f"{key} = {shortened(repr(entry[key]))}" if key in entry else f"a rule without {key}"
                raise UsageError(_at(path, _line_of_key(text, key, head), what), f"Its {key} is a text.")
        pattern = entry["pattern"].strip()
        if any(rule.pattern == pattern for rule in rules):
            what = _at(
                path, _line_of_key(text, "pattern", head), f"the pattern {shortened(repr(pattern))} is given twice"
            )
            raise UsageError(what, "The first rule that matches counts.", "Leave one of them out.")
        try:
            rules.append(Rule(pattern, parse_codec(entry["codec"])))
        except UsageError as error:
            line = _line_of_key(text, "codec", head)
            raise UsageError(_at(path, line, error.what), error.why, error.fix) from None
    return tuple(rules)


def _at(path: Path, line: int, what: str) -> str:
    return f"{shortened(path)}, line {line}: {what}"


def _line_of_key(text: str, key: str, after: int = 1) -> int:
    """The line, from one on, in which a key stands; that one where it is not found."""
    for number, line in enumerate(text.splitlines(), 1):
        if number >= after and re.match(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[\]=.]""", line):
            return number
    return after
