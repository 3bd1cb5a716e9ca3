"""What a run with a pair of options may end with: its result, or one error."""

from __future__ import annotations

import os
import signal
from dataclasses import fields

import pytest

from hybridpar.commands.train import Train
from scripts import option_pairs


def test_every_name_is_an_option():
    names = {field.name.replace("_", "-") for field in fields(Train)}
    assert {option.split()[0].removeprefix("no-") for option in option_pairs.OPTIONS} <= names


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
    monkeypatch.setattr(option_pairs.cli, "main", lambda _: os.write(2, error.encode()) and code)
    message = option_pairs.trained(("lr", "amp"), 1)
    assert message.startswith(said)
    assert bool(message) == bool(said)


def test_a_run_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(option_pairs.cli, "main", lambda _: signal.pause())
    assert option_pairs.trained(("lr", "amp"), 1, timeout=0.5).startswith("ended with None")
