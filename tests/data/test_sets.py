import hashlib
import logging
import os
import pickle
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import ExifTags, Image
from torchvision.transforms.v2 import functional as reference

from hybridpar.config import DataConfig
from hybridpar.data import describe_data, load_dataset
from hybridpar.data.augment import normalise, shift_and_flip
from hybridpar.data.decode import read_image
from hybridpar.data.sampling import AugmentKey
from hybridpar.errors import DataError, UsageError

CIFARS = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}


@pytest.fixture
def cifar(tmp_path, monkeypatch, request):
    """Write a small CIFAR in the published format, and make torchvision expect the checksums of these files."""
    name = request.param
    dataset = CIFARS[name]
    folder = tmp_path / dataset.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)
    labels_key = "labels" if name == "cifar10" else "fine_labels"
    classes = int(name.removeprefix("cifar"))
    written = {}

    def write(file: str, content: dict) -> str:
        payload = pickle.dumps(content, protocol=2)
        (folder / file).write_bytes(payload)
        return hashlib.md5(payload).hexdigest()

    def batch(file: str) -> list[str]:
        pixels = rng.integers(0, 256, (12, 3072), dtype=np.uint8)
        labels = rng.integers(0, classes, 12).tolist()
        written[file] = pixels.reshape(-1, 3, 32, 32), labels
        return [file, write(file, {"data": pixels, labels_key: labels, "batch_label": file})]

    for part in ("train_list", "test_list"):
        monkeypatch.setattr(dataset, part, [batch(file) for file, _ in getattr(dataset, part)])
    names = [f"class-{number}" for number in range(classes)]
    md5 = write(dataset.meta["filename"], {dataset.meta["key"]: names})
    monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": md5})
    return name, tmp_path, folder, written


both_cifars = pytest.mark.parametrize("cifar", CIFARS, indirect=True)


@both_cifars
def test_cifar_is_read_from_the_published_format(cifar):
    name, root, _, written = cifar
    data = load_dataset(DataConfig(data=name, data_root=root))
    train_files = [file for file, _ in CIFARS[name].train_list]
    assert data.classes == int(name.removeprefix("cifar"))
    assert data.class_names[3] == "class-3"
    assert data.sample_shape == (3, 32, 32)
    assert np.array_equal(data.train.images, np.concatenate([written[file][0] for file in train_files]))
    assert data.train.labels.tolist() == [label for file in train_files for label in written[file][1]]
    (test_file, _), *_ = CIFARS[name].test_list
    assert np.array_equal(data.test.images, written[test_file][0])
    assert data.test.labels.tolist() == written[test_file][1]


@both_cifars
def test_incomplete_cifar_names_the_file(cifar):
    name, root, folder, _ = cifar
    missing = folder / CIFARS[name].test_list[0][0]
    missing.unlink()
    with pytest.raises(DataError, match="not complete") as caught:
        load_dataset(DataConfig(data=name, data_root=root))
    assert str(missing) in caught.value.what


@both_cifars
@pytest.mark.parametrize("damaged", ["images", "meta"])
def test_damaged_cifar_names_the_file_and_is_never_unpickled(cifar, damaged, tmp_path):
    name, root, folder, _ = cifar
    dataset = CIFARS[name]
    file = folder / (dataset.train_list[0][0] if damaged == "images" else dataset.meta["filename"])

    exploded = tmp_path / "exploded"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(exploded),)

    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match="damaged") as caught:
        load_dataset(DataConfig(data=name, data_root=root))
    assert str(file) in caught.value.what
    assert ",download" in caught.value.fix
    assert not exploded.exists()
    pickle.loads(file.read_bytes())
    assert exploded.exists(), "the file would have done harm"


def test_download_that_fails_says_why(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", unreachable)
    monkeypatch.setattr(torchvision.datasets.caltech, "download_and_extract_archive", unreachable)
    for name in ("cifar10", "caltech101"):
        with pytest.raises(DataError, match="no route to host") as caught:
            load_dataset(DataConfig(data=f"{name},download", data_root=tmp_path / name))
        assert str(tmp_path / name) in caught.value.what


@both_cifars
def test_download_puts_the_files_into_the_data_root(cifar, tmp_path, monkeypatch):
    name, _, folder, _ = cifar
    root = tmp_path / "new"

    def transfer(url, download_root, **kwargs):
        assert url == CIFARS[name].url
        folder.rename(Path(download_root) / folder.name)

    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", transfer)
    assert len(load_dataset(DataConfig(data=f"{name},download", data_root=root)).test) == 12


def save_image(path: Path, mode: str = "RGB", size: tuple[int, int] = (20, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = {"RGB": (3,), "RGBA": (4,), "L": ()}[mode]
    seed = int.from_bytes(hashlib.md5(path.name.encode()).digest()[:4], "big")
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], *channels), dtype=np.uint8)).save(path)


@pytest.fixture
def caltech(tmp_path):
    """Three classes and the background in torchvision's layout; every fifth image is grey."""
    directory = tmp_path / "caltech101" / "101_ObjectCategories"
    for name, images in (("Faces", 34), ("accordion", 32), ("yin_yang", 31), ("BACKGROUND_Google", 3)):
        for number in range(1, images + 1):
            save_image(directory / name / f"image_{number:04d}.jpg", "L" if number % 5 == 0 else "RGB")
    return tmp_path, directory


def test_caltech101_is_split_as_documented(caltech, caplog):
    root, directory = caltech
    with caplog.at_level(logging.WARNING, logger="hybridpar"):
        data = load_dataset(DataConfig(data="caltech101", data_root=root))
    assert "3 classes and 97 images; the published set has 101 and 8677" in caplog.text
    assert data.class_names == ("Faces", "accordion", "yin_yang")
    assert data.ignored == ("1 directory that is not read (BACKGROUND_Google/)",)
    assert torch.bincount(data.train.labels).tolist() == [30, 30, 30]
    assert torch.bincount(data.test.labels).tolist() == [4, 2, 1]
    samples = {
        (source.dataset.path(index), int(source.labels[index]))
        for source in (data.train, data.test)
        for index in range(len(source))
    }
    theirs = torchvision.datasets.Caltech101(root)
    assert samples == {
        (directory / theirs.categories[label] / f"image_{number:04d}.jpg", label)
        for number, label in zip(theirs.index, theirs.y, strict=True)
    }


def test_small_class_of_caltech101_keeps_one_image_for_testing(caltech):
    root, directory = caltech
    for number in range(4, 32):
        (directory / "yin_yang" / f"image_{number:04d}.jpg").unlink()
    data = load_dataset(DataConfig(data="caltech101", data_root=root))
    assert torch.bincount(data.train.labels).tolist() == [30, 30, 2]
    assert torch.bincount(data.test.labels).tolist() == [4, 2, 1]
    (directory / "yin_yang" / "image_0001.jpg").unlink()
    (directory / "yin_yang" / "image_0002.jpg").unlink()
    with pytest.raises(DataError, match="'yin_yang' of caltech101 has 1 image"):
        load_dataset(DataConfig(data="caltech101", data_root=root))


@pytest.fixture
def folder(tmp_path):
    for part, images in (("train", 3), ("test", 2)):
        for name in ("cat", "dog"):
            for number in range(images):
                save_image(tmp_path / part / name / f"{number}.png", "RGBA" if number else "RGB")
    return tmp_path


@pytest.mark.parametrize("test", ["test", "val"])
def test_folder_agrees_with_image_folder(folder, test):
    (folder / "test").rename(folder / test)
    data = load_dataset(DataConfig(data="folder", data_root=folder))
    assert data.class_names == ("cat", "dog")
    assert data.sample_shape == (3, 224, 224)
    for source, part in ((data.train, "train"), (data.test, test)):
        theirs = torchvision.datasets.ImageFolder(str(folder / part)).samples
        assert [(str(source.dataset.path(index)), int(source.labels[index])) for index in range(len(source))] == theirs


def test_folder_prefers_test_to_val(folder):
    save_image(folder / "val" / "cow" / "0.png")
    assert load_dataset(DataConfig(data="folder", data_root=folder)).class_names == ("cat", "dog")


def test_folder_whose_classes_differ_names_them(folder):
    (folder / "test" / "dog").rename(folder / "test" / "wolf")
    with pytest.raises(DataError) as caught:
        load_dataset(DataConfig(data="folder", data_root=folder))
    assert caught.value.what == f"{folder / 'test'} has classes that {folder / 'train'} has not: wolf"


@pytest.mark.parametrize(("missing", "named"), [("train", "train/"), ("test", "test/ or val/")])
def test_folder_without_a_part(tmp_path, missing, named):
    (tmp_path / ("test" if missing == "train" else "train")).mkdir()
    with pytest.raises(DataError, match=f"no directory {named} in {tmp_path}"):
        load_dataset(DataConfig(data="folder", data_root=tmp_path))


@pytest.mark.parametrize("part", ["train", "test"])
def test_folder_with_an_empty_class_names_it(folder, part):
    for one in ("train", "test"):
        save_image(folder / one / "fish" / "1.png")
    empty = folder / part / "fish"
    (empty / "1.png").rename(empty / "1.gif")
    with pytest.raises(DataError, match="no images in 1 of the 3 class directories") as caught:
        load_dataset(DataConfig(data="folder", data_root=folder))
    assert caught.value.what.endswith(f"{empty.parent}: fish")
    assert "fish holds 1 file that is no image (.gif)" in caught.value.why


def test_folder_without_a_class(tmp_path):
    for part in ("train", "test"):
        save_image(tmp_path / part / "0.png")
    with pytest.raises(DataError, match="there is no class folder"):
        load_dataset(DataConfig(data="folder", data_root=tmp_path))


def test_folder_names_directories_that_are_not_read(folder):
    save_image(folder / "val" / "cat" / "0.png")
    (folder / ".git").mkdir()
    data = load_dataset(DataConfig(data="folder", data_root=folder))
    assert (len(data.test), data.ignored) == (4, ("1 directory that is not read (val/)",))


def test_folder_ignores_what_is_hidden_or_no_image_and_says_so(folder):
    expected = [path.name for path in sorted((folder / "train" / "cat").iterdir())]
    for directory in (folder / "train", folder / "test", folder / "train" / "cat", folder / "train" / "cat" / "deeper"):
        save_image(directory / ".ipynb_checkpoints" / "copy.png")
    (folder / "train" / "cat" / "._0.png").write_text("what a Mac writes beside a file")
    (folder / "train" / "cat" / "notes.txt").write_text("x")
    (folder / "test" / "README").write_text("x")
    save_image(folder / "train" / "lost.png")
    data = load_dataset(DataConfig(data="folder", data_root=folder))
    assert data.class_names == ("cat", "dog")
    assert [data.train.dataset.path(index).name for index in range(3)] == expected
    assert (len(data.train), len(data.test)) == (6, 4)
    assert describe_data(data) == (
        "folder, 6 training and 4 test images, 2 classes, 224x224; ignored: 4 hidden directories (.ipynb_checkpoints), "
        "1 hidden file, 2 files that are no images (.txt, no extension), 1 image in no class directory"
    )


def test_a_bad_image_ends_the_run_where_that_is_asked_for(folder):
    path = folder / "train" / "dog" / "1.png"
    path.write_bytes(path.read_bytes()[:-40])
    data = load_dataset(DataConfig(data="folder,bad=error", data_root=folder, image_size=16))
    with pytest.raises(DataError, match=r"dog/1\.png"):
        data.train.load_readable(np.array([4]), AugmentKey(0, 0), torch.device("cpu"))


def test_a_class_of_which_no_image_can_be_read_is_an_error(folder):
    names = sorted((folder / "train" / "dog").iterdir())
    for path in names[:-1]:
        path.write_bytes(b"no image")
    data = load_dataset(DataConfig(data="folder", data_root=folder, image_size=16))
    loaded = data.train.load_readable(np.arange(6), AugmentKey(0, 0), torch.device("cpu"))
    assert len(loaded.indices) == 6
    assert len(set(loaded.damaged)) == 2
    names[-1].write_bytes(b"no image")
    data = load_dataset(DataConfig(data="folder", data_root=folder, image_size=16))
    with pytest.raises(DataError, match=r"none of the 3 training images of a class .*dog/0\.png"):
        data.train.load_readable(np.array([0, 3]), AugmentKey(0, 0), torch.device("cpu"))


def test_names_of_classes_that_are_not_utf8_are_refused(folder):
    for part in ("train", "test"):
        os.rename(folder / part / "dog", os.fsencode(folder / part) + b"/\xe9l\xe9phant")
    with pytest.raises(UsageError, match=r"the name '\\udce9l\\udce9phant' .* is not UTF-8"):
        load_dataset(DataConfig(data="folder", data_root=folder))


def test_folder_finds_images_in_any_case_and_depth_as_image_folder_does(folder):
    for name in ("UPPER.PNG", "b/Mixed.Jpeg", "a/z.bmp", "a.b/x.webp", "a/b/y.tif"):
        save_image(folder / "train" / "cat" / name)
    data = load_dataset(DataConfig(data="folder", data_root=folder))
    theirs = torchvision.datasets.ImageFolder(str(folder / "train")).samples
    assert [(str(data.train.dataset.path(index)), int(data.train.labels[index])) for index in range(11)] == theirs
    assert len(data.train) == 11


def test_folder_follows_links_but_not_in_circles(folder):
    cat, dog = folder / "train" / "cat", folder / "train" / "dog"
    save_image(folder / "elsewhere" / "more.png")
    (cat / "more").symlink_to(folder / "elsewhere")
    (cat / "itself").symlink_to(cat)
    (dog / "up").symlink_to("..")
    (folder / "elsewhere" / "back").symlink_to(cat)
    data = load_dataset(DataConfig(data="folder", data_root=folder))
    assert torch.bincount(data.train.labels).tolist() == [4, 3]
    assert data.ignored == ("1 directory that is not read (elsewhere/)", "3 links to directories above them")


def test_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    listed = os.scandir

    def refuse(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read .*dog: Permission denied"):
        load_dataset(DataConfig(data="folder", data_root=folder))


def test_images_are_turned_as_the_camera_noted(tmp_path):
    upright = Image.new("RGB", (4, 2))
    upright.putpixel((3, 0), (255, 0, 0))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        stored = upright
        for turn in BACK_TO_STORED[orientation]:
            stored = stored.transpose(turn)
        stored.save(tmp_path / "turned.png", exif=exif)
        assert read_image(tmp_path / "turned.png").tobytes() == upright.tobytes(), orientation


#: What a camera does to an upright image before it notes an orientation (EXIF 2.3, tag 274).
_TURN = Image.Transpose
BACK_TO_STORED = {
    1: [],
    2: [_TURN.FLIP_LEFT_RIGHT],
    3: [_TURN.ROTATE_180],
    4: [_TURN.FLIP_TOP_BOTTOM],
    5: [_TURN.TRANSPOSE],
    6: [_TURN.ROTATE_90],
    7: [_TURN.TRANSVERSE],
    8: [_TURN.ROTATE_270],
}


def test_a_damaged_note_of_the_camera_is_ignored(tmp_path):
    Image.new("RGB", (4, 2), (9, 8, 7)).save(tmp_path / "image.png", exif=b"Exif\x00\x00MM\x00*\xff\xff")
    assert read_image(tmp_path / "image.png").getpixel((0, 0)) == (9, 8, 7)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "RGBA", "CMYK"])
def test_images_of_any_mode_become_rgb(tmp_path, mode, recwarn):
    image = Image.new("RGB", (4, 2), (255, 255, 255)).convert(mode)
    image.save(tmp_path / ("image.jpg" if mode == "CMYK" else "image.png"), transparency=b"\0" if mode == "P" else None)
    (path,) = tmp_path.iterdir()
    read = read_image(path)
    assert (read.mode, read.size) == ("RGB", (4, 2))
    assert not recwarn.list


@pytest.mark.parametrize("name", ["image.png", "image.tif", "image.pgm"])
def test_grey_of_16_bits_keeps_its_shades(tmp_path, name):
    Image.fromarray(np.array([[0, 256, 0x8000, 0xFFFF]], dtype=np.uint16)).save(tmp_path / name)
    assert np.asarray(read_image(tmp_path / name))[0, :, 1].tolist() == [0, 1, 128, 255]


def test_digits_are_the_documented_split():
    data = load_dataset(DataConfig(data="digits"))
    assert (len(data.train), len(data.test), data.classes) == (1437, 360, 10)
    assert data.sample_shape == tuple(data.train.images.shape[1:]) == (3, 32, 32)
    sizes = torch.bincount(torch.cat([data.train.labels, data.test.labels]))
    shares = torch.bincount(data.test.labels) / sizes
    assert (shares - 0.2).abs().max() < 1 / sizes.min(), "stratified to the nearest image"
    assert describe_data(data) == "digits, 1,437 training and 360 test images, 10 classes, 32x32"


def test_digits_are_scikit_learns_images():
    from sklearn.datasets import load_digits

    data = load_dataset(DataConfig(data="digits", image_size=8))
    ours = torch.cat([data.train.images, data.test.images])
    assert torch.equal(ours[:, 0], ours[:, 1])
    labels = torch.cat([data.train.labels, data.test.labels]).tolist()
    theirs = load_digits()
    pixels = np.rint(theirs.images * 255 / 16).astype(np.uint8)
    ours_set = sorted((image.tobytes(), label) for image, label in zip(ours[:, 0].numpy(), labels, strict=True))
    assert ours_set == sorted((image.tobytes(), label) for image, label in zip(pixels, theirs.target, strict=True))


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_statistics_are_those_of_the_training_images(name):
    data = load_dataset(DataConfig(data=name))
    pixels = data.train.images.double() / 255
    tolerance = 1e-3 if name == "digits" else 0.03
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.tensor(data.mean).double(), atol=tolerance)
    assert torch.allclose(pixels.std((0, 2, 3)), torch.tensor(data.std).double(), atol=tolerance)


@pytest.mark.parametrize("size", [None, 17])
def test_synthetic_images_have_the_size_asked_for(size):
    data = load_dataset(DataConfig(data="synthetic:samples=25", image_size=size))
    assert data.sample_shape == (3, size or 32, size or 32) == (*data.train.images.shape[1:],)
    assert (len(data.train), len(data.test)) == (25, 10)
    assert data.train.labels.unique().tolist() == data.test.labels.unique().tolist() == list(range(10))


def test_synthetic_images_can_be_learned_and_the_test_images_are_others():
    data = load_dataset(DataConfig(data="synthetic"))
    train, test = data.train.images.double(), data.test.images.double()
    centres = torch.stack([train[data.train.labels == label].mean(0) for label in range(10)])
    nearest = torch.cdist(test.flatten(1), centres.flatten(1)).argmin(1)
    assert (nearest == data.test.labels).double().mean() > 0.95
    assert torch.cdist(test.flatten(1), train.flatten(1)).min() > 0


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 5, 9)])
def test_shift_and_flip_is_pad_crop_and_mirror_of_each_image(shape, flip):
    generator = torch.Generator().manual_seed(0)
    pad = 3
    images = torch.randint(0, 256, (17, *shape), dtype=torch.uint8, generator=generator)
    rows, columns = (torch.randint(0, 2 * pad + 1, (17,), generator=generator) for _ in range(2))
    flips = torch.arange(17) % 2 == 1
    result = shift_and_flip(images, rows, columns, flips if flip else None, pad)
    for index in range(17):
        expected = reference.crop(
            reference.pad(images[index], [pad]), int(rows[index]), int(columns[index]), *shape[1:]
        )
        if flip and flips[index]:
            expected = reference.horizontal_flip(expected)
        assert torch.equal(result[index], expected)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [(8, 8), (12, 12), (6, 6)])
def test_normalise(channels_last, size):
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])
    result = normalise(images, mean, std, size=size, channels_last=channels_last)
    pixels = reference.resize(images.float(), list(size), antialias=True) / 255
    expected = reference.normalize(pixels, mean.tolist(), std.tolist())
    assert torch.allclose(result, expected, atol=1e-5)
    assert result.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_a_folder_of_classes_without_parts_is_divided_in_the_same_way_everywhere(tmp_path, kind):
    for name, count in (("cat", 10), ("dog", 5)):
        for number in range(count):
            save_image(tmp_path / name / f"{number}.{kind}")
    data, again = (load_dataset(DataConfig(data="folder", data_root=tmp_path)) for _ in range(2))
    assert data.class_names == ("cat", "dog")
    assert torch.bincount(data.train.labels).tolist() == [8, 4]
    assert torch.bincount(data.test.labels).tolist() == [2, 1]
    names = [{part.dataset.name(index) for index in range(len(part))} for part in (data.train, data.test)]
    assert len(set.union(*names)) == 15
    assert names[0] == {again.train.dataset.name(index) for index in range(12)}
