"""Errors carry value, rule and remedy, and choose the exit code."""

from __future__ import annotations

import inspect
import pickle

import pytest

from hybridpar import errors
from hybridpar.errors import HybridparError, UsageError, nearest

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HybridparError)]


def test_an_error_reads_as_value_rule_remedy():
    error = UsageError("--lr is -1", "It must be greater than 0.", "Try 0.1.")
    assert str(error) == "--lr is -1\nIt must be greater than 0.\nTry 0.1."
    assert (error.what, error.why, error.fix) == ("--lr is -1", "It must be greater than 0.", "Try 0.1.")


def test_empty_parts_leave_no_empty_lines():
    assert str(HybridparError("it broke", fix="Mend it.")) == "it broke\nMend it."


@pytest.mark.parametrize("kind", ALL)
def test_an_error_travels_between_workers(kind):
    sent = kind("value", "rule", "remedy")
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is kind
    assert str(received) == str(sent)


@pytest.mark.parametrize("kind", ALL)
def test_wrong_requests_exit_with_2_and_failed_runs_with_1(kind):
    assert kind("x").exit_code == (2 if issubclass(kind, UsageError) else 1)


def test_nearest_names_close_choices_and_no_others():
    said = nearest("resnet19", ["resnet18", "resnet34", "vgg11"])
    assert said.startswith("Did you mean resnet18")
    assert "vgg11" not in said


def test_nearest_lists_the_choices_where_none_is_close():
    assert nearest("zzz", ["digits", "cifar10"]) == "Valid: cifar10, digits."


def test_nearest_does_not_list_a_hundred_choices():
    said = nearest("zzz", [f"model{number:03}" for number in range(100)])
    assert ", ..." in said
    assert said.count("model") == 12
