"""Tests the text form of codecs and their options: parsing, one canonical form, errors that name the mistake."""

from __future__ import annotations

import pytest

from hybridpar.compress import format_codec, parse_codec
from hybridpar.errors import UsageError


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("onebit:", "onebit"),
        ("onebit:feedback=on", "onebit"),
        ("onebit:warmup=20,decay=0.90,least=32", "onebit:decay=0.9,warmup=20"),
        ("onebit:feedback=FALSE", "onebit:feedback=off"),
        ("powersgd:cast=bf16,rank=4,decay=0.5", "powersgd:rank=4,decay=0.5,cast=bf16"),
        ("twobit:threshold=1e-3", "twobit:threshold=0.001"),
    ],
)
def test_one_meaning_has_one_text(text: str, short: str) -> None:
    assert format_codec(parse_codec(text)) == short


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("onebits", "unknown codec 'onebits'\nDid you mean onebit"),
        ("onebit:decat=0.9", "codec 'onebit' has no option 'decat'\nDid you mean decay"),
        ("onebit:decay", "'decay' in 'onebit:decay'"),
        ("onebit:decay=0.9,decay=0.8", "given twice"),
        ("onebit:decay=much", "decay=much\nIt must be a valid number"),
        ("onebit:warmup=1.5", "warmup=1.5\nIt must be a valid integer"),
        ("onebit:feedback=perhaps", "feedback=perhaps\nIt must be a valid boolean"),
        ("onebit:meet=gathr", "meet=gathr\nIt must be 'auto', 'shard' or 'gather'."),
        ("onebit:cast=fp16", "nothing to cast"),
        ("none:cast=fp61", "cast=fp61\nIt must be 'fp32', 'fp16' or 'bf16'."),
        ("none:feedback=on", "'none' with error feedback\nIt is unbiased"),
        ("qsgd_mn:feedback=on", "It is unbiased"),
        ("", "unknown codec ''"),
        ("onebit:decay=0", "decay=0\nIt must be greater than 0."),
        ("onebit:warmup=-1", "warmup=-1\nIt must be at least 0."),
        ("topk:least=0", "least=0\nIt must be at least 1."),
        ("onebit_sgd:adagrad=ovner", "adagrad=ovner"),
        ("onebit_sgd:momentum=1", "momentum=1"),
        ("powersgd:rank=0", "rank=0"),
        ("qsgd:bits=1", "bits=1"),
        ("qsgd:bucket=65537", "bucket=65537"),
        ("topk:rate=nan", "rate=nan\nIt must be a finite number."),
        ("terngrad:clip=0.5", "clip=0.5"),
        ("twobit:threshold=0", "threshold=0\nIt must be greater than 0."),
    ],
)
def test_slips_are_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_codec(text)
    assert message in str(caught.value)
