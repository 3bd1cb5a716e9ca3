from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.loader import main as loader


def test_every_loader_reads_every_image_once_in_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    monkeypatch.setattr(loader, "IMAGES", 32)
    monkeypatch.setattr(loader, "SIDE", 32)
    mean = loader.write_images(tmp_path, 80, 60)
    files = sorted(tmp_path.glob("train/*/*.jpg"))
    assert len(files) == 32
    assert mean == sum(file.stat().st_size for file in files) / 32
    with Image.open(files[0]) as image:
        assert image.size == (80, 60)
    methods = loader.make_methods(tmp_path, 0)
    for epoch in methods.values():
        epoch()  # counts
    files[0].unlink()
    with pytest.raises((AssertionError, OSError)):
        methods["torchvision"]()


def test_runs_are_added_to_a_table(tmp_path: Path) -> None:
    row = dict.fromkeys(loader.WAITING, 1)
    for _ in range(2):
        loader._append(tmp_path / "waiting.csv", [row])
    lines = (tmp_path / "waiting.csv").read_text().splitlines()
    assert lines == [",".join(loader.WAITING), *[",".join("1" * len(loader.WAITING))] * 2]
