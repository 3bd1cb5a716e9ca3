"""What `hybridpar train` checks of names before it starts workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridpar.commands import COMMANDS
from hybridpar.commands.train import Train, check_names
from hybridpar.errors import UsageError


def parsed(*words: str) -> Train:
    command = COMMANDS.get("train")
    options = command.parse("train", words)
    assert isinstance(options, Train)
    return options


def test_a_resumed_run_needs_no_weights(tmp_path: Path) -> None:
    """It has read them: the file may be gone."""
    words = ("resnet18", "--preset", "finetune", "--weights", f"{tmp_path}/gone.pth")
    with pytest.raises(UsageError, match="there is no such file"):
        check_names(parsed(*words))
    check_names(parsed(*words, "--resume"))
