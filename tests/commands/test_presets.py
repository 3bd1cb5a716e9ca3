"""Tests `hybridpar presets`: lists the presets, prints one as the file it is, and refuses an unknown one."""

from __future__ import annotations

import pytest

from hybridpar.cli import main
from hybridpar.config.files import preset_file


def test_presets_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    assert "digits" in capsys.readouterr().out
    assert main(["presets", "digits"]) == 0
    assert capsys.readouterr().out == preset_file("digits").read_text()


def test_an_unknown_preset_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "digit"]) == 2
    assert "digits" in capsys.readouterr().err
