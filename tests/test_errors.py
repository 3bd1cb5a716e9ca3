"""Errors carry value, rule and remedy, and choose the exit code."""

from __future__ import annotations

import inspect
import pickle

import pytest
from torchvision.models import resnet18

from hybridpar import errors
from hybridpar.errors import HybridparError, UsageError, nearest, shortened, user_error, user_frames

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HybridparError)]


def test_an_error_reads_as_value_rule_remedy():
    error = UsageError("--lr is -1", "It must be greater than 0.", "Try 0.1.")
    assert str(error) == "--lr is -1\nIt must be greater than 0.\nTry 0.1."
    assert (error.what, error.why, error.fix) == ("--lr is -1", "It must be greater than 0.", "Try 0.1.")


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


def test_nearest_does_not_list_a_hundred_choices():
    said = nearest("zzz", [f"model{number:03}" for number in range(100)])
    assert ", ..." in said
    assert said.count("model") == 12


def test_long_texts_are_shortened():
    assert shortened("x" * 200) == "x" * 200
    cut = shortened("a" * 1000 + "z" * 1000)
    assert len(cut) == 200
    assert cut.startswith("aaa")
    assert cut.endswith("zzz")
    assert "..." in cut


def raised(act, *arguments):
    try:
        act(*arguments)
    except Exception as error:
        return error
    raise AssertionError


def test_frames_of_packages_are_no_users():
    frames = user_frames(raised(nearest, "x", (resnet18(num_classes="many") for _ in range(1))))
    assert "in <genexpr>" in frames[-1]


def test_of_a_deep_recursion_the_end_is_shown():
    def again():
        again()

    frames = user_frames(raised(again))
    assert "in again" in frames[0]
    assert "repeated 3 more times" in frames[-1]


def test_an_error_of_the_users_has_its_frames_and_a_way_out():
    def fail():
        raise ValueError("x" * 5000)

    error = user_error("it failed", raised(fail))
    assert error.what.startswith("it failed: ValueError: xxx")
    assert len(error.what) < 900
    assert "in fail" in error.why
    assert "--debug" in error.fix
