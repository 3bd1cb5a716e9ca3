"""The photographs that come with scikit-image and scikit-learn: real images of a usual size, without a download."""

from __future__ import annotations

from pathlib import Path

import skimage
import sklearn
from PIL import Image

SKIMAGE = (
    *("astronaut.png", "brick.png", "chelsea.png", "coffee.png", "coins.png", "hubble_deep_field.jpg", "grass.png"),
    *("gravel.png", "moon.png", "motorcycle_left.png", "camera.png", "retina.jpg", "rocket.jpg", "ihc.png"),
)
SKLEARN = ("flower.jpg", "china.jpg")


def photographs() -> list[Image.Image]:
    """All of them, in RGB."""
    files = [Path(skimage.__file__).parent / "data" / name for name in SKIMAGE]
    files += [Path(sklearn.__file__).parent / "datasets" / "images" / name for name in SKLEARN]
    return [Image.open(file).convert("RGB") for file in files]
