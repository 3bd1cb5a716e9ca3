import pytest

from hybridpar.errors import UsageError
from hybridpar.models import parse_arguments


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("true", True),
        ("True", True),
        ("None", None),
        ("(1, 2)", (1, 2)),
        ("{a = 1}", {"a": 1}),
        ('"avg"', "avg"),
        ("a=b", "a=b"),
        ("1\nx = 2", "1\nx = 2"),
        ("", ""),
    ],
)
def test_values_are_toml_or_python_or_text(text, value):
    parsed = parse_arguments([f"key={text}"])["key"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("texts", [["drop"], ["=1"], ["a b=1"], ["key=1", "key=2"]])
def test_what_is_no_argument_is_refused(texts):
    with pytest.raises(UsageError, match="--model-arg"):
        parse_arguments(texts)
