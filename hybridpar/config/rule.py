"""A rule that the value of an option must keep."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """What an option's value must be.

    Attributes:
        option: The option, as users type it.
        value: Its value.
        holds: Whether the value is allowed.
        says: What it must be, to be put behind "It must be".
    """

    option: str
    value: object
    holds: bool
    says: str
