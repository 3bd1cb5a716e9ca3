"""Options of data whose texts are joined, or taken apart."""

from __future__ import annotations

import pytest

from hybridpar.config.data import images_over, samples_of


@pytest.mark.parametrize(
    ("below", "above", "both"),
    [
        (None, 64, "64"),
        ("224,crop=0.9,mean=0.5/0.5/0.5", None, "224,crop=0.9,mean=0.5/0.5/0.5"),
        ("224,crop=0.9", "test=288,crop=0.95", "224,test=288,crop=0.95"),
        ("test=288", 64, "64,test=288"),
    ],
)
def test_what_is_named_wins_over_what_is_known(below, above, both):
    assert images_over(below, above) == both


def test_how_files_are_got_and_read_is_not_what_samples_there_are():
    assert samples_of("cifar10:download") == samples_of("cifar10:bad=error") == "cifar10"
    assert samples_of("synthetic:classes=5,download") == "synthetic:classes=5"
