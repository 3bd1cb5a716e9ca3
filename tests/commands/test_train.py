"""What `hybridpar train` checks of names before it starts workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridpar.commands import find_command
from hybridpar.commands.train import Train, check_names
from hybridpar.errors import UsageError
from hybridpar.models import pretrained


def parsed(*words: str) -> Train:
    command = find_command("train")
    options = command.parse("train", command.expanded("train", words))
    assert isinstance(options, Train)
    return options


def test_a_resumed_run_needs_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read them: a file may be gone, and what was downloaded may have left the cache."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(pretrained, "unreachable", lambda url: "no network")
    for weights, said in ((f"{tmp_path}/gone.pth", "there is no such file"), ("default", "cannot be downloaded")):
        words = ("resnet18", "--preset", "finetune", "--weights", weights)
        with pytest.raises(UsageError, match=said):
            check_names(parsed(*words))
        check_names(parsed(*words, "--resume"))
