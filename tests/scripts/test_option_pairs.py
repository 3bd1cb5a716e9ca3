"""What a run with a pair of options may end with: its result, or one error."""

from __future__ import annotations

import subprocess
from dataclasses import fields

import pytest

from hybridpar.commands.train import Train
from scripts import option_pairs


def test_every_name_is_an_option():
    names = {field.name.replace("_", "-") for field in fields(Train)}
    assert {name.removeprefix("no-") for name in option_pairs.OPTIONS} <= names


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (0, "", ""),
        (2, "error: --a with --b\nLeave out one of them.", ""),
        (2, "Traceback (most recent call last):\nTypeError: no", "TypeError: no"),
        (1, "error: it broke", "ended with 1"),
    ],
)
def test_only_a_result_and_one_error_are_no_fault(monkeypatch, code, error, said):
    done = subprocess.CompletedProcess([], code, "", error)
    monkeypatch.setattr(option_pairs.subprocess, "run", lambda *_, **__: done)
    message = option_pairs.fault(("lr", "amp"), 1)
    assert message.startswith(said)
    assert bool(message) == bool(said)
