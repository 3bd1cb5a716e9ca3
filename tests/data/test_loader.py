import itertools
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hybridpar.config import DataConfig
from hybridpar.data import ImageData, ImageFiles, MemoryImages, TestBatches, TrainBatches, load_dataset
from hybridpar.data import images as image_sources
from hybridpar.data.images import ImageSource
from hybridpar.data.sampling import AugmentKey
from hybridpar.errors import DataError, LaneError, LaunchError
from hybridpar.lanes import cuda as lane_cuda
from hybridpar.machine.launch import record_failure
from tests.lanes.checked import Checker, Lanes
from tests.pipeline.device_calls import pretend_cuda

SAMPLES, TESTED = 29, 11
CPU = torch.device("cpu")


def write_images(root, paths):
    rng = np.random.default_rng(0)
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(root / path)


@pytest.fixture(scope="module")
def file_data(tmp_path_factory):
    """Images in files, through torchvision's own random transforms; each sample's label is its index."""
    root = tmp_path_factory.mktemp("images")
    for part in ("train", "test"):
        write_images(root / part, [f"{number:03d}/image.png" for number in range(SAMPLES)])
    return load_dataset(DataConfig(data="folder", data_root=root, image_size=16))


@pytest.fixture(scope="module")
def memory_data():
    """Random images in memory, with shifts and mirrors; each sample's label is its index."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for samples in (SAMPLES, TESTED):
        images = torch.randint(0, 256, (samples, 3, 16, 16), dtype=torch.uint8, generator=generator)
        parts.append(MemoryImages(images, torch.arange(samples), flip=0.5))
    facts = {"name": "random", "class_names": tuple(map(str, range(SAMPLES))), "sample_shape": (3, 16, 16)}
    return ImageData(**facts, test_size=16, train=parts[0], test=parts[1], mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


@pytest.fixture(params=["memory", "files"])
def data(request):
    return request.getfixturevalue(f"{request.param.removesuffix('s')}_data")


def train_batches(data, workers=1, micro_batches=1, rank=0, **options):
    layout = {"workers": workers, "micro_batches": micro_batches, "rank": rank}
    return TrainBatches(data, **{"seed": 5, "batch_size": 24, "loader_workers": 0, **layout, **options})


def joined(views):
    """Images and labels of each step, all workers' parts in order."""
    steps = []
    for batches in zip(*views, strict=True):
        parts = [part for batch in batches for part in batch.micro_batches]
        assert {sum(batch.samples for batch in batches)} == {batch.global_samples for batch in batches}
        steps.append(tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    return steps


def read_steps(data, workers, micro_batches, epoch=0, **options):
    """The same of an epoch from its start."""
    views = [list(train_batches(data, workers, micro_batches, rank, **options).epoch(epoch)) for rank in range(workers)]
    assert {len(batch.micro_batches) for view in views for batch in view} == {micro_batches}
    return joined(views)


def as_tested(data):
    """All test images."""
    return torch.cat([images for images, _ in TestBatches(data, batch_size=4, rank=0, workers=1, loader_workers=0)])


def same(one, two):
    """Whether two sequences of (images, labels) are bit-equal."""
    pairs = list(itertools.zip_longest(one, two))
    return bool(pairs) and all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.parametrize(
    ("workers", "shares", "counts"),
    [(1, None, [24]), (2, None, [12, 12]), (2, (1, 3), [6, 18]), (2, (0, 1), [0, 24])],
)
def test_counts_are_the_samples_of_each_worker_in_a_step(memory_data, workers, shares, counts):
    assert train_batches(memory_data, workers, shares=shares).counts == counts
    views = [train_batches(memory_data, workers, rank=rank, shares=shares) for rank in range(workers)]
    assert [next(view.epoch(0)).samples for view in views] == counts


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_worker_count_trains_on_the_same_images_in_the_same_steps(data, workers, micro_batches):
    reference = read_steps(data, 1, 1)
    steps = read_steps(data, workers, micro_batches)
    assert [len(labels) for _, labels in reference] == [24, 5]
    if workers * micro_batches > 2:
        # Five samples are too few for so many parts: the tail joins the step before.
        reference = [tuple(torch.cat(tensors) for tensors in zip(*reference, strict=True))]
    assert same(steps, reference)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_training_image_once_per_epoch_in_an_order_of_its_own(data, workers):
    seen = [torch.cat([labels for _, labels in read_steps(data, workers, 1, epoch, batch_size=6)]) for epoch in (0, 1)]
    for labels in seen:
        assert sorted(labels.tolist()) == list(range(SAMPLES))
    assert not torch.equal(*seen)


@pytest.mark.parametrize(
    ("micro_batches", "options"),
    [(1, {}), (2, {}), (1, {"in_pairs": True}), (2, {"in_pairs": True}), (1, {"repeats": 2})],
)
def test_shares_change_within_an_epoch_and_every_sample_comes_once(data, micro_batches, options):
    reference = read_steps(data, 1, 1, batch_size=10, **options)
    assert [len(labels) for _, labels in reference] == [10, 10, 9]
    views = []
    for rank in range(2):
        batches = train_batches(data, 2, micro_batches, rank, batch_size=10, shares=(2, 3), **options)
        first = next(iter(batches.epoch(0)))
        batches.shares = (20, 1)
        views.append([first, *batches.epoch(0, 1)])
    assert [next(batch.samples for batch in view) for view in views] == [4, 6]
    assert [batch.samples for batch in views[1][1:]] == [0, 0]
    assert views[1][2].micro_batches == ()
    assert views[1][2].global_samples == 9
    assert same(joined(views), reference)


def test_unequal_shares_of_the_test_set_are_all_of_it(memory_data):
    views = [TestBatches(memory_data, batch_size=3, rank=rank, workers=3, shares=(1, 0, 4)) for rank in range(3)]
    assert [view.samples for view in views] == [2, 0, TESTED - 2]
    assert torch.equal(torch.cat([labels for view in views for _, labels in view]), memory_data.test.labels)


@pytest.mark.parametrize("start_step", [0, 3, 4])
def test_resuming_in_an_epoch_gives_the_batches_that_were_left(data, start_step):
    batches = train_batches(data, 1, 2, batch_size=7)
    whole = list(batches.epoch(3))
    assert batches.steps_per_epoch == len(whole) == 4
    resumed = list(batches.epoch(3, start_step))
    assert len(resumed) == 4 - start_step
    for one, two in zip(resumed, whole[start_step:], strict=True):
        assert same(one.micro_batches, two.micro_batches)
        assert (one.samples, one.global_samples) == (two.samples, two.global_samples)


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_skipped_images_are_not_read(tmp_path, loader_workers, caplog):
    data = numbered_files(tmp_path / "images", 12, to_pixels)
    batches = train_batches(data, batch_size=4, loader_workers=loader_workers)
    first, *rest = list(batches.epoch(0))
    for label in first.micro_batches[0][1].tolist():
        Path(data.train.name(label)).unlink()
    resumed = list(batches.epoch(0, start_step=1))
    assert same([batch.micro_batches[0] for batch in resumed], [batch.micro_batches[0] for batch in rest])
    assert not caplog.records, "they are not there"


@pytest.mark.parametrize("workers", [1, 2, 3, 13])
def test_workers_together_test_every_image_once(data, workers):
    views = [TestBatches(data, batch_size=3, rank=rank, workers=workers, loader_workers=0) for rank in range(workers)]
    tested = [batch for view in views for batch in view]
    assert torch.cat([labels for _, labels in tested]).tolist() == list(range(len(data.test)))
    assert [view.samples for view in views] == [sum(len(labels) for _, labels in view) for view in views]
    assert [len(view) for view in views] == [len(list(view)) for view in views]
    assert max(len(labels) for _, labels in tested) <= 3
    whole = data.test.load(np.arange(len(data.test)), None, CPU).images.double() / 255
    expected = (whole - torch.tensor(data.mean).view(3, 1, 1)) / torch.tensor(data.std).view(3, 1, 1)
    assert torch.allclose(torch.cat([images for images, _ in tested]).double(), expected, atol=1e-5)


@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_have_the_types_and_layout_promised(data, channels_last):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images, labels = next(train_batches(data, channels_last=channels_last).epoch(0)).micro_batches[0]
    tested, _ = next(iter(TestBatches(data, batch_size=4, rank=0, workers=1, channels_last=channels_last)))
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.shape == (24, *data.sample_shape)
    assert images.is_contiguous(memory_format=layout)
    assert tested.is_contiguous(memory_format=layout)


def numbered_files(root, samples, augment):
    """A data set of files whose labels are their numbers."""
    paths = [f"{number:03d}.png" for number in range(samples)]
    write_images(root, paths)
    files = ImageFiles(root, paths, range(samples))
    source = ImageSource(files, files.labels, augment=augment, prepare=augment)
    facts = {"name": "numbered", "class_names": tuple(paths), "sample_shape": (3, 20, 20), "test_size": 20}
    return ImageData(**facts, train=source, test=source, mean=(0.0,) * 3, std=(1.0,) * 3)


def to_pixels(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[:, :, :20]


def interrupt_is_ignored(image):
    return torch.full((3, 20, 20), 255 if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else 0, dtype=torch.uint8)


def test_loader_processes_ignore_interrupts(tmp_path):
    data = numbered_files(tmp_path / "images", 4, interrupt_is_ignored)
    # A shell that runs the tests in the background has them ignore interrupts from the start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for loader_workers, expected in ((0, 0.0), (1, 1.0)):
            batch = next(train_batches(data, batch_size=4, loader_workers=loader_workers).epoch(0))
            assert batch.micro_batches[0][0].unique().tolist() == [expected]
    finally:
        signal.signal(signal.SIGINT, before)


def test_loader_processes_may_outnumber_the_cores_of_a_worker(tmp_path, monkeypatch, recwarn):
    """Workers are pinned to a part of the cores, of which torch would warn at each epoch."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    data = numbered_files(tmp_path / "images", 4, to_pixels)
    next(train_batches(data, batch_size=4, loader_workers=2).epoch(0))
    assert not [warning for warning in recwarn if "DataLoader" in str(warning.message)]


def damage(path, harm):
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": path.read_bytes()[:200], "garbage": b"not an image", "empty": b""}[harm])


@pytest.mark.parametrize(
    ("harm", "loader_workers"), [("truncated", 0), ("truncated", 1), ("garbage", 0), ("missing", 0), ("empty", 1)]
)
def test_damaged_image_is_replaced_in_training_and_left_out_of_the_test(tmp_path, harm, loader_workers, caplog):
    data = numbered_files(tmp_path / "images", 40, to_pixels)
    path = Path(data.train.name(2))
    data.train.labels[2] = 3  # a class of which other images can be read
    damage(path, harm)
    batches = train_batches(data, batch_size=8, loader_workers=loader_workers)
    trained = torch.cat([batch.micro_batches[0][1] for batch in batches.epoch(0)]).tolist()
    assert sorted(trained) == sorted([*range(2), 4, *range(3, 40)]), "the next of 20 that are spread over the set"
    test = TestBatches(data, batch_size=8, rank=0, workers=1, loader_workers=loader_workers)
    assert torch.cat([labels for _, labels in test]).tolist() == [*range(2), *range(3, 40)]
    assert (test.total, test.samples) == (40, 40)
    for record, use in zip(caplog.records, ("is replaced by another image", "is left out"), strict=True):
        assert str(path) in record.message
        assert f"{use} (unreadable files so far: 1)" in record.message
    list(test)
    assert len(caplog.records) == 2, "once is enough"


def test_a_replacement_is_the_same_whoever_asks(tmp_path):
    data = numbered_files(tmp_path / "images", 12, to_pixels)
    data.train.labels[5] = 6
    damage(Path(data.train.name(5)), "garbage")
    alone = data.train.load(np.array([5]), AugmentKey(0, 0), CPU)
    among = data.train.load(np.arange(12), AugmentKey(0, 0), CPU)
    assert alone.indices.tolist() == [6] == among.indices[5:6].tolist()
    assert torch.equal(alone.images[0], among.images[5])


def test_a_batch_of_damaged_test_images_is_left_out(tmp_path):
    data = numbered_files(tmp_path / "images", 6, to_pixels)
    for index in (4, 5):
        damage(Path(data.train.name(index)), "garbage")
    assert [labels.tolist() for _, labels in TestBatches(data, batch_size=2, rank=0, workers=1)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_training_ends_where_no_image_can_be_read(tmp_path, loader_workers):
    data = numbered_files(tmp_path / "images", 4, to_pixels)
    for index in range(4):
        damage(Path(data.train.name(index)), "garbage")
    with pytest.raises(DataError, match="cannot read the image") as caught:
        list(train_batches(data, batch_size=4, loader_workers=loader_workers).epoch(0))
    assert "Traceback" not in str(caught.value)


def test_a_killed_loader_process_is_noticed_where_batches_are_taken(tmp_path, monkeypatch):
    """Not by a signal, whose error would come out of whatever this process is at."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))  # looks so often
    batches = train_batches(numbered_files(tmp_path / "images", 8, to_pixels), batch_size=4, loader_workers=1)
    before, others = signal.getsignal(signal.SIGCHLD), multiprocessing.active_children()
    list(batches.epoch(0))
    assert signal.getsignal(signal.SIGCHLD) is before
    (process,) = [each for each in multiprocessing.active_children() if each not in others]
    process.kill()
    process.join()
    with pytest.raises(LaunchError, match="a loader process died") as caught:
        list(batches.epoch(1))
    assert "--loader-workers" in caught.value.fix
    assert not record_failure(caught.value, debug=False)  # so the workers start again, as after one of them was killed


def fail(image):
    raise RuntimeError("a bug in the transforms")


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_bug_in_the_transforms_is_not_disguised(tmp_path, loader_workers):
    data = numbered_files(tmp_path / "images", 4, fail)
    with pytest.raises(RuntimeError, match="a bug in the transforms"):
        list(train_batches(data, batch_size=4, loader_workers=loader_workers).epoch(0))


def pixels_of_pid(image):
    """Each channel holds a byte of the number of the process."""
    number = torch.tensor([os.getpid() >> shift & 255 for shift in (0, 8, 16)], dtype=torch.uint8)
    return number.view(3, 1, 1).expand(3, 20, 20)


def test_loader_processes_are_kept_from_epoch_to_epoch(tmp_path):
    data = numbered_files(tmp_path / "images", 8, pixels_of_pid)
    batches = train_batches(data, batch_size=4, loader_workers=1)

    def pid():
        images = torch.cat([batch.micro_batches[0][0] for batch in batches.epoch(0)])
        (number,) = (images[:, :, 0, 0] * 255).round().int().unique(dim=0).tolist()
        return sum(part << shift for part, shift in zip(number, (0, 8, 16), strict=True))

    first = pid()
    assert pid() == first != os.getpid()
    left = batches.epoch(0)
    next(left)
    assert pid() == first, "also after an epoch that was left early"
    with pytest.raises(RuntimeError, match="another epoch"):
        next(left)


def on_a_lane(data, checker, micro_batches=2):
    """Batches that are placed on a lane of their own, as on a GPU; a thread is in the place of loader processes."""
    batches = train_batches(data, micro_batches=micro_batches, batch_size=8, loader_workers=1)
    lanes = batches._lanes = Lanes("cpu", check=checker)
    batches._lane = lanes.open("data")

    def load_ahead(jobs):
        with ThreadPoolExecutor(1) as pool:
            yield from pool.map(lambda job: data.train.load(*job, CPU), jobs)

    batches._load_ahead = load_ahead
    return batches, lanes


def train_on(epoch):
    """Use each batch and let go of it, as a step does."""
    seen = []
    for batch in epoch:
        for images, labels in batch.micro_batches:
            seen.append((images * 1.0, labels * 1))
        del batch, images, labels
    return seen


@pytest.mark.parametrize("seed", [0, 1])
def test_batches_from_a_lane_of_their_own_are_the_same(file_data, seed):
    checker = Checker(seed)
    batches, lanes = on_a_lane(file_data, checker)
    with checker, lanes:
        seen = [part for epoch in range(2) for part in train_on(batches.epoch(epoch))]
    reference = train_batches(file_data, micro_batches=2, batch_size=8)
    expected = [part for epoch in range(2) for part in train_on(reference.epoch(epoch))]
    assert same(seen, expected)


@pytest.mark.parametrize("seed", [0, 1])
def test_batches_are_kept_until_they_were_used(file_data, seed):
    checker = Checker(seed)
    batches, lanes = on_a_lane(file_data, checker)
    lanes.caller.keep = lambda *_: None
    with pytest.raises(LaneError, match="lane 'data'"), checker, lanes:
        train_on(batches.epoch(0))


def test_images_go_to_a_gpu_as_bytes_on_a_stream_of_their_own(data, monkeypatch):
    moved, moves = [], image_sources.to_device

    def to_device(tensor, device):
        moved.append((lane_cuda.cuda.current_stream().name, tensor.dtype))
        return moves(tensor, device)

    expected = next(train_batches(data, micro_batches=1, batch_size=8).epoch(0)).micro_batches[0]
    with pretend_cuda(monkeypatch):
        monkeypatch.setattr("hybridpar.data.images.to_device", to_device)
        monkeypatch.setattr("hybridpar.data.loader.to_device", to_device)
        batches = train_batches(data, micro_batches=1, batch_size=8, device="cuda")
        batch = next(batches.epoch(0)).micro_batches[0]
    assert same([batch], [expected])
    assert {stream for stream, _ in moved} == {"stream 1"}
    assert torch.uint8 in {dtype for _, dtype in moved}
    assert not any(dtype.is_floating_point for _, dtype in moved)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_batches_on_a_gpu_are_those_on_the_cpu(data, loader_workers):
    on_gpu = read_steps(data, 1, 2, loader_workers=loader_workers, device="cuda")
    for (images, labels), (expected, expected_labels) in zip(on_gpu, read_steps(data, 1, 2), strict=True):
        assert images.is_cuda
        assert torch.allclose(images.cpu(), expected, atol=1e-6)
        assert torch.equal(labels.cpu(), expected_labels)
