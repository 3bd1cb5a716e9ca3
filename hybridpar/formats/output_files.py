"""Checks that files can be written, before the work whose result they are to hold."""

from __future__ import annotations

import os
from pathlib import Path

from hybridpar.errors import UsageError


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that could not be written.

    Args:
        option: That names it.
        path: The file.

    Raises:
        UsageError: Its directory is missing, it is a directory, or it may not be written to.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {folder}", fix=f"Run: mkdir -p {folder}")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a directory", "A file is needed.", "Name a file in it.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written", fix="Name a file in a directory of yours.")


def check_picture(option: str, path: Path) -> None:
    """Refuse the name of a picture that says no format.

    Args:
        option: That names it.
        path: The file.

    Raises:
        UsageError: It does not end in .svg, .png or .pdf.
    """
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(
            f"{option} {path}", "A picture ends in .svg, .png or .pdf.", f"Use {option} {path.with_suffix('.svg')}."
        )
