"""A source whose samples have several copies, each augmented by itself (`--repeats`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridpar.data.sampling import AugmentKey, IntArray
from hybridpar.data.sources import ImageSource, Loaded

#: Between the epochs by which the copies of a sample are augmented; no run has so many.
_APART = 1 << 32


class RepeatedImages(ImageSource):
    """Every sample of a source several times: copy c of sample i is sample i + c * len(source)."""

    def __init__(self, source: ImageSource, repeats: int) -> None:
        self._source = source
        self.in_memory = source.in_memory  # type: ignore[misc]
        self.labels = torch.cat([source.labels] * repeats)

    def load(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Tensor:
        return self.load_readable(indices, key, device).images

    def load_readable(self, indices: IntArray, key: AugmentKey | None, device: torch.device) -> Loaded:
        """Load some copies; see `ImageSource.load_readable`."""
        copies, samples = np.divmod(indices, len(self._source))
        parts: dict[int, Loaded] = {}
        damaged: tuple[str, ...] = ()
        for copy in np.unique(copies):
            own = None if key is None else key._replace(epoch=key.epoch + int(copy) * _APART)
            part = self._source.load_readable(samples[copies == copy], own, device)
            parts[int(copy)] = part
            damaged += part.damaged
        images = torch.cat([part.images for part in parts.values()])
        found = np.concatenate([part.indices for part in parts.values()])
        if key is None:  # in testing, what cannot be read is left out
            return Loaded(images, found, damaged)
        places = np.concatenate([np.flatnonzero(copies == copy) for copy in parts])
        back = np.argsort(places)
        return Loaded(images[torch.from_numpy(back).to(device)], found[back], damaged)
