"""Tests the benchmark of the thesis, without its GPUs: methods, rounds, and what its command prints.

The benchmark itself runs for hours on machines that the tests do not have.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rig.table import check_csv
from benchmarks.thesis import __main__ as command
from benchmarks.thesis import cells
from benchmarks.thesis.cells import DDP, ONE, OURS, Job, Place, Setting
from benchmarks.thesis.worker import work
from tests.data.test_sets import cifar  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[2]
SETTING = Setting(
    model="tests.small_nets:plain",
    data="synthetic",
    data_root="data",
    batch=16,
    epochs=21,
    most_steps=2,
    lr=0.05,
    stem="imagenet",
    image_size=8,
)
PLACE = Place(device="cpu", workers=2, name="some CPU", commit="abc1234", code="0123456789ab")


# ------------------------------------------------------------------------ what is measured


# ------------------------------------------------------------------------ rounds


# ------------------------------------------------------------------------ methods


# ------------------------------------------------------------------------ the command


@pytest.mark.parametrize("cifar", ["cifar10"], indirect=True)
def test_one_worker_measures_cifar_from_its_published_format(
    cifar: tuple[str, Path, Path, dict[str, object]],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, root, *_ = cifar
    monkeypatch.setenv("WORLD_SIZE", "1")
    setting = replace(SETTING, data=name, data_root=str(root))
    table = tmp_path / "table.csv"
    methods = [ONE, DDP, OURS]
    place = replace(PLACE, workers=1)
    job = Job(
        setting=setting,
        place=place,
        methods=methods,
        missing=cells.still_missing([], setting, place, methods, [0, 1]),
        output=str(table),
        cuda_graph=True,
        probe_steps=1,
        most_stages=2,
    )
    work(job)
    rows = check_csv(table)
    assert [(entry.method, entry.baseline, entry.extra["seed"]) for entry in rows] == [
        (ONE, ONE, 0),
        (OURS, ONE, 0),
        (ONE, ONE, 1),
        (OURS, ONE, 1),
    ]
    ours = rows[1].extra
    assert ours["layout"]["stages"] * ours["layout"]["replicas"] in (1, 2)
    assert len(ours["probe_ms"]) == 4  # whole, and two stages with 2, 4 and 8 micro-batches
    assert ours["skipped"] == {DDP: "DistributedDataParallel needs two workers"}
    assert 0 <= ours["accuracy"] <= 1
    assert ours["steps_per_epoch"] == 2
    assert cells.still_missing(rows, setting, place, methods, [0, 1]) == []


def test_a_missing_data_set_says_what_to_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "launch", lambda *_, **__: pytest.fail("nothing to measure"))
    arguments = ["--small", "--data", *cells.DATA, "--data-root", str(tmp_path), "--output", str(tmp_path / "t.csv")]
    assert command.run(arguments) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    for line, data in zip(lines, cells.DATA, strict=True):
        source, folder = cells.SOURCES[data]
        assert line.startswith(f"{data} is not measured")
        assert source in line
        assert str(tmp_path / folder) in line
    assert not (tmp_path / "t.csv").exists()


def test_the_committed_tables_are_valid_and_claim_nothing_for_a_cpu() -> None:
    tables = sorted((ROOT / "benchmarks/thesis/results").glob("*.csv"))
    assert tables
    for table in tables:
        for entry in check_csv(table):
            assert entry.claim == cells.CLAIM
            assert entry.extra["cuda"] or entry.target is None
