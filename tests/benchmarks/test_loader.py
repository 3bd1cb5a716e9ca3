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
