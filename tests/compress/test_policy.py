"""Which codec a parameter travels as: rules in order, and one clear error for each that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridpar.compress import Policy, TensorSpec, format_codec, parse_codec, read_policy
from hybridpar.compress.policy import exact_rules, nearest_names
from hybridpar.errors import UsageError

NAMES = ["conv1.weight", "bn1.weight", "bn1.bias", "layer4.0.conv1.weight", "layer4.1.conv2.weight", "fc.weight"]

FILE = """\
# what matters most travels in full
[[rule]]
pattern = "layer4.*"
codec = "powersgd:rank=1"

[[rule]]
pattern = "*.weight"
codec = "onebit"
"""


def codecs(policy: Policy) -> list[str]:
    return [format_codec(policy.codec_of(name)) for name in NAMES]


def write(folder: Path, text: str) -> str:
    path = folder / "rules.toml"
    path.write_text(text)
    return str(path)


def test_the_first_rule_that_matches_counts_and_the_rest_travels_as_it_is(tmp_path):
    policy = read_policy(write(tmp_path, FILE))
    assert codecs(policy) == ["onebit", "onebit", "none", "powersgd:rank=1", "powersgd:rank=1", "onebit"]
    turned = Policy(policy.rules[::-1])
    assert codecs(turned) == ["onebit", "onebit", "none", "onebit", "onebit", "onebit"]


def test_a_codec_is_a_policy_of_one_rule():
    policy = read_policy("onebit:warmup=0")
    assert policy == Policy.of(parse_codec("onebit"))
    assert str(policy) == "onebit"
    assert set(codecs(policy)) == {"onebit"}
    policy.check([])


@pytest.mark.parametrize(
    "text", ["onebit", "none", "layer4.* -> powersgd:rank=1; *.weight -> onebit", "a[12]? -> fp16"]
)
def test_text_and_policy_are_the_same_thing(text, tmp_path):
    policy = read_policy(text)
    assert str(policy) == text
    assert read_policy(str(policy)) == policy
    assert read_policy(write(tmp_path, policy.to_toml())) == policy


def test_patterns_are_those_of_a_shell():
    policy = read_policy("layer4.[01].conv? -> fp16; LAYER4.* -> bf16; *conv1* -> onebit")
    assert codecs(policy) == ["onebit", "none", "none", "onebit", "none", "none"]


def test_binding_falls_back_to_full_precision_where_a_codec_does_not_fit():
    policy = read_policy("*.weight -> powersgd")
    shape = (64, 64)
    assert policy.bind(TensorSpec("fc.weight", shape, workers=2)).rounds[0].sizes == (128,)
    assert policy.bind(TensorSpec("fc.bias", shape, workers=2)).rounds[0].sizes == (64 * 64,)
    assert policy.bind(TensorSpec("bn1.weight", (64,), workers=2)).rounds[0].sizes == (64,)


def test_the_fingerprint_is_that_of_what_is_said(tmp_path):
    policy = read_policy(write(tmp_path, FILE))
    assert read_policy("layer4.* -> powersgd:rank=1;*.weight->onebit:decay=1.0").fingerprint == policy.fingerprint
    others = [Policy(policy.rules[::-1]), Policy(policy.rules[:1]), read_policy("onebit")]
    assert len({policy.fingerprint, *(one.fingerprint for one in others)}) == 4


def test_the_difference_of_two_policies_is_named():
    mine = read_policy("a -> onebit; b -> fp16")
    assert mine.difference(read_policy("a -> onebit; b -> bf16")) == "rule 2 is b -> bf16 and not b -> fp16"
    assert mine.difference(read_policy("a -> onebit")) == "it has 1 rule(s) and not 2"


def test_rules_for_single_parameters_match_nothing_else():
    policy = exact_rules([("a.weight", "onebit"), ("b[0].weight", "fp16")])
    assert [rule.matches(name) for rule, name in zip(policy.rules, ["a.weight", "b[0].weight"], strict=True)] == [
        True
    ] * 2
    assert format_codec(policy.codec_of("b0.weight")) == "none"


def test_policies_that_change_nothing_are_known():
    assert read_policy("none").changes_nothing
    assert read_policy("a -> none; b -> none").changes_nothing
    assert not read_policy("a -> none; b -> fp16").changes_nothing


@pytest.mark.parametrize(
    ("pattern", "best"), [("layr4.*", "layer4.0.conv1.weight"), ("fc", "fc.weight"), ("bn2.weight", "bn1.weight")]
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(pattern, best):
    assert nearest_names(pattern, NAMES)[0] == best
    policy = read_policy(f"{pattern} -> onebit; * -> none")
    with pytest.raises(UsageError) as caught:
        policy.check(NAMES)
    assert repr(pattern) in caught.value.what
    assert best in caught.value.fix
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ('[[rule]]\npattern = "a"\ncodec = onebit\n', 3, "Invalid value"),
        ('[[rule]]\npattern = "a"\ncodec = "onebit', 3, "line 3"),
        ('[[rules]]\npattern = "a"\ncodec = "onebit"\n', 1, "'rules'"),
        ('# a comment\ncodec = "onebit"\n', 2, "'codec'"),
        ('[rule]\npattern = "a"\ncodec = "onebit"\n', 1, "no [[rule]]"),
        ("", 1, "no [[rule]]"),
        ('[[rule]]\npattern = "a"\ncodec = "onebit"\n[[rule]]\npattern="b"\ncodecs = "onebit"\n', 6, "'codecs'"),
        ('[[rule]]\npattern = "a"\n', 1, "without codec"),
        ('[[rule]]\npattern = 3\ncodec = "onebit"\n', 2, "pattern = 3"),
        ('[[rule]]\npattern = "a"\ncodec = "onebitt"\n', 3, "unknown codec 'onebitt'"),
        ('[[rule]]\npattern = "a"\ncodec = "onebit:dekay=1"\n', 3, "no option 'dekay'"),
        ('[[rule]]\npattern="a"\ncodec="none"\n\n[[rule]]\npattern="a"\ncodec="fp16"\n', 6, "given twice"),
    ],
)
def test_a_bad_file_is_one_error_with_file_and_line(text, line, told, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_policy(path)
    assert caught.value.what.startswith(f"{path}, line {line}: ")
    assert told in caught.value.what


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read the policy file"):
        read_policy(str(tmp_path / "missing.toml"))
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for name in ("folder.toml", "bytes.toml"):
        with pytest.raises(UsageError, match="cannot read the policy file"):
            read_policy(str(tmp_path / name))


@pytest.mark.parametrize("text", ["a -> ; b -> fp16", "-> onebit", "a -> onebit; b"])
def test_a_rule_that_is_not_whole_is_refused(text):
    with pytest.raises(UsageError, match="Rules are pattern -> codec"):
        read_policy(text)
