import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from hybridpar.config import TrainConfig
from hybridpar.data import TrainBatches, load_dataset
from hybridpar.data.cache import ImageCache, memory_for_images
from hybridpar.data.sampling import AugmentKey
from hybridpar.data.sources import keep_decoded

CPU = torch.device("cpu")
KINDS = ("big.jpg", "turned.jpg", "small.jpg", "grey.jpg", "palette.png", "alpha.png", "cmyk.jpg", "tall.jpg")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Files of all kinds, some of them so large that crops are decoded at a fraction of their size."""
    root = tmp_path_factory.mktemp("kinds")
    rng = np.random.default_rng(0)
    modes = {"grey": "L", "palette": "P", "alpha": "RGBA", "cmyk": "CMYK"}
    for number, name in enumerate(KINDS):
        width, height = {"small": (20, 15), "tall": (90, 301)}.get(name[:-4], (211, 160))
        smooth = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((width, height))
        options = {}
        if name == "turned.jpg":
            options["exif"] = Image.Exif()
            options["exif"][0x0112] = 6
        for part in ("train", "test"):
            file = root / part / f"{number}" / name
            file.parent.mkdir(parents=True)
            smooth.convert(modes.get(name[:-4], "RGB")).save(file, **options)
    return root


def load(root, **options):
    return load_dataset(TrainConfig(data="folder", data_root=root, image_size=16, **options))


def forget_files(data):
    """From now on every image must come from memory."""

    def gone(index):
        raise AssertionError(f"image {index} was opened again")

    for source in (data.train, data.test):
        source.open = gone


def epochs(data, count, **options):
    batches = TrainBatches(data, seed=1, batch_size=4, rank=0, workers=1, micro_batches=1, **options)
    return [part for epoch in range(count) for batch in batches.epoch(epoch) for part in batch.micro_batches]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest", "lanczos"])
def test_images_are_those_that_files_give(root, interpolation):
    plain, kept = (load(root, cache_images=cache, interpolation=interpolation) for cache in (False, True))
    indices = np.arange(len(KINDS))
    for epoch in range(12):
        images = [data.train.load(indices, AugmentKey(0, epoch), CPU) for data in (plain, kept)]
        assert torch.equal(*images), epoch
    for _ in range(2):
        assert torch.equal(plain.test.load(indices, None, CPU), kept.test.load(indices, None, CPU))
    forget_files(kept)
    assert torch.equal(plain.test.load(indices, None, CPU), kept.test.load(indices, None, CPU))


def test_jpegs_are_kept_in_each_size_that_was_decoded(root):
    data = load(root, cache_images=True)
    for epoch in range(40):
        data.train.load(np.array([0]), AugmentKey(0, epoch), CPU)
    data.train.load(np.array([0]), None, CPU)
    sizes = [data.train.cache.get(0, divisor, (-(-211 // divisor), -(-160 // divisor))) for divisor in (1, 2, 4, 8)]
    assert [pixels is not None for pixels in sizes] == [True, True, True, True]
    assert data.train.cache.used == sum(pixels.size for pixels in sizes)
    for epoch in range(40):
        data.train.load(np.array([4]), AugmentKey(0, epoch), CPU)
    assert data.train.cache.used == sum(pixels.size for pixels in sizes) + 3 * 211 * 160, "PNG files have one size"


def test_loader_processes_fill_one_memory(root):
    data = load(root)
    keep_decoded(data, 1 << 24)
    expected = epochs(load(root), 3, loader_workers=0)
    read = epochs(data, 2, loader_workers=2)
    filled = data.train.cache.used
    assert filled > 0, "this process sees what its loader processes decoded"
    found = [data.train.cache.facts(index) for index in range(len(KINDS))]
    assert found[2] == ((20, 15), True)
    assert found[1] == ((160, 211), False), "turned, so decoded at once"
    data.train.load(np.arange(len(KINDS)), None, CPU)  # the whole images, which crops may not have needed
    forget_files(data)
    read += epochs(data, 3, loader_workers=0)[len(read) :]
    for (images, labels), (others, wanted) in zip(read, expected, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, wanted)


def test_what_finds_no_room_is_decoded_every_time(root):
    data = load(root)
    keep_decoded(data, 2 * 3 * 100 * 80)  # each part: not one of the large images in full
    indices, plain = np.arange(len(KINDS)), load(root)
    for epoch in range(3):
        key = AugmentKey(0, epoch)
        assert torch.equal(data.train.load(indices, key, CPU), plain.train.load(indices, key, CPU))
    assert 0 < data.train.cache.used <= 3 * 100 * 80


def test_a_process_that_is_not_forked_keeps_nothing(root):
    data = load(root, cache_images=True)
    data.train.load(np.arange(3), None, CPU)
    source = pickle.loads(pickle.dumps(data.train))
    assert torch.equal(source.load(np.arange(3), None, CPU), data.train.load(np.arange(3), None, CPU))
    assert source.cache.used == 0 < data.train.cache.used


def _put(cache, index):
    cache.note(index, (4, 4), True)
    cache.put(index, 1, np.full((4, 4, 3), index, dtype=np.uint8))


def test_processes_that_write_at_the_same_time_get_places_of_their_own():
    cache = ImageCache(40, 48 * 40)
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=lambda first=first: [_put(cache, at) for at in range(first, 40, 2)]) for first in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert cache.used == 48 * 40
    for index in range(40):
        assert np.array_equal(cache.get(index, 1, (4, 4)), np.full((4, 4, 3), index)), index


def test_a_damaged_file_is_replaced_as_without(root, tmp_path, caplog):
    for part in ("train", "test"):
        for number in range(3):
            file = tmp_path / part / "one" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            content = (root / part / "0" / "big.jpg").read_bytes()
            file.write_bytes(content[: len(content) // 3] if number == 1 else content)
    for _ in range(2):
        loaded = load(tmp_path, cache_images=True).train.load_readable(np.arange(3), AugmentKey(0, 0), CPU)
        assert loaded.indices.tolist() == [0, 2, 2]
        assert "1.jpg" in loaded.damaged[0]


def test_half_of_the_free_memory_is_divided_among_workers(monkeypatch):
    monkeypatch.setattr("hybridpar.data.cache.free_memory", lambda: 1000)
    assert [memory_for_images(workers) for workers in (1, 2, 5)] == [500, 250, 100]
