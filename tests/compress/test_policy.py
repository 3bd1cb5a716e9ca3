"""Which codec a parameter travels as: rules in order, and one clear error for each that cannot be."""

from __future__ import annotations

import pytest

from hybridpar.compress import Policy, TensorSpec, format_codec, parse_codec, read_policy
from hybridpar.compress.policy import exact_rules
from hybridpar.errors import UsageError

NAMES = ["conv1.weight", "bn1.weight", "bn1.bias", "layer4.0.conv1.weight", "layer4.1.conv2.weight", "fc.weight"]

RULES = "layer4.* -> powersgd:rank=1; *.weight -> onebit"


def codecs(policy: Policy) -> list[str]:
    return [format_codec(policy.codec_of(name)) for name in NAMES]


def test_the_first_rule_that_matches_counts_and_the_rest_travels_as_it_is():
    policy = read_policy(RULES)
    assert codecs(policy) == ["onebit", "onebit", "none", "powersgd:rank=1", "powersgd:rank=1", "onebit"]
    turned = Policy(policy.rules[::-1])
    assert codecs(turned) == ["onebit", "onebit", "none", "onebit", "onebit", "onebit"]


def test_a_codec_is_a_policy_of_one_rule():
    policy = read_policy("onebit:warmup=0")
    assert policy == Policy.of(parse_codec("onebit"))
    assert str(policy) == "onebit"
    assert set(codecs(policy)) == {"onebit"}
    policy.check([])


@pytest.mark.parametrize("text", ["onebit", "none", RULES, "a[12]? -> fp16"])
def test_text_and_policy_are_the_same_thing(text):
    policy = read_policy(text)
    assert str(policy) == text
    assert read_policy(str(policy)) == policy


def test_patterns_are_those_of_a_shell():
    policy = read_policy("layer4.[01].conv? -> fp16; LAYER4.* -> bf16; *conv1* -> onebit")
    assert codecs(policy) == ["onebit", "none", "none", "onebit", "none", "none"]


def test_binding_falls_back_to_full_precision_where_a_codec_does_not_fit():
    policy = read_policy("*.weight -> powersgd")
    shape = (64, 64)
    assert policy.codec_of("fc.weight").bind(TensorSpec("fc.weight", shape, workers=2)).rounds[0].sizes == (128,)
    assert policy.codec_of("fc.bias").bind(TensorSpec("fc.bias", shape, workers=2)).rounds[0].sizes == (64 * 64,)
    assert policy.codec_of("bn1.weight").bind(TensorSpec("bn1.weight", (64,), workers=2)).rounds[0].sizes == (64,)


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
    policy = read_policy(f"{pattern} -> onebit; * -> none")
    with pytest.raises(UsageError) as caught:
        policy.check(NAMES)
    assert repr(pattern) in caught.value.what
    assert best in caught.value.fix
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["fp16:cast=fp32", "onebit:cast=bf16"])
def test_what_is_no_float_or_has_its_type_by_name_is_not_cast(text):
    with pytest.raises(UsageError, match="with cast="):
        parse_codec(text)


@pytest.mark.parametrize("text", ["a -> ; b -> fp16", "-> onebit", "a -> onebit; b"])
def test_a_rule_that_is_not_whole_is_refused(text):
    with pytest.raises(UsageError, match="Rules are pattern -> codec"):
        read_policy(text)
