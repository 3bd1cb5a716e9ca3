"""Tests the benchmark of the thesis, without its GPUs: methods, rounds, and what its command prints.

The benchmark itself runs for hours on machines that the tests do not have.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from rich.console import Console
from torch import Tensor

from benchmarks.rig.paired import FOREIGN_LOAD, Paired
from benchmarks.rig.rows import Row, row
from benchmarks.rig.table import check_csv
from benchmarks.thesis import __main__ as command
from benchmarks.thesis import cells
from benchmarks.thesis.cells import DDP, METHODS, ONE, OURS, Job, Place, Setting
from benchmarks.thesis.ours import Ours, StageLayout, choose
from benchmarks.thesis.peers import Peer
from benchmarks.thesis.report import print_report
from benchmarks.thesis.rounds import Meeting, foreign_loads, keep_quiet, train_in_turn
from benchmarks.thesis.task import Task
from benchmarks.thesis.worker import work
from hybridpar.comm.world import World
from hybridpar.config import DataConfig
from hybridpar.data import cut_epoch, load_dataset
from hybridpar.errors import UsageError
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
SMALL_NET = ("--small", "--models", "tests.small_nets:plain", "--image-size", "8", "--seeds", "0", "--probe-steps", "1")


def make_task(world: World, *, seed: int = 0, samples: int = 40) -> Task:
    data = load_dataset(DataConfig(data="synthetic", image_size=8, synthetic_samples=samples))
    steps = cells.whole_steps(samples, SETTING.batch, 4)
    return Task(setting=SETTING, data=data, seed=seed, steps=steps, workers=world.size, device=world.device)


def make_rows(setting: Setting = SETTING, place: Place = PLACE, seed: int = 0, speedup: float = 2.0) -> list[Row]:
    times = {ONE: [100.0 + number for number in range(20)]}
    times[OURS] = [time / speedup for time in times[ONE]]
    result = Paired({name: tuple(values) for name, values in times.items()}, 0, 0.02, False)
    extra = {
        "seed": seed,
        "code": place.code,
        "epoch_s": 2.5,
        "accuracy": 0.9 + seed / 100,
        "published_speedup": 1.47,
        "skipped": {"DDP": "needs two workers"},
        "layout": {"stages": 2, "replicas": 1, "micro_batches": 4, "cuda_graph": True},
    }
    rows = [
        row(result, method, ONE, claim="thesis", setting=str(setting), ranks=place.workers, extra=extra)
        for method in (ONE, OURS)
    ]
    return [replace(entry, device=place.name, commit=place.commit) for entry in rows]


# ------------------------------------------------------------------------ what is measured


def test_every_method_runs_or_says_why_not() -> None:
    def can(device: str, workers: int) -> set[str]:
        return {method for method in METHODS if cells.why_not(method, device, workers) is None}

    assert can("cpu", 1) == {ONE, cells.ONE_COMPILED, OURS}
    assert can("cpu", 2) == {ONE, DDP, cells.DDP_COMPILED, OURS}
    assert can("cuda", 1) == {ONE, cells.ONE_GRAPH, cells.ONE_COMPILED, OURS}
    assert can("cuda", 4) == {ONE, cells.DATA_PARALLEL, DDP, cells.DDP_GRAPH, cells.DDP_COMPILED, OURS}
    wanted, reasons = cells.runnable(METHODS, PLACE)
    assert set(wanted) | set(reasons) == set(METHODS)
    assert reasons[cells.DATA_PARALLEL] == "nn.DataParallel needs two GPUs"


@given(some.integers(40, 400), some.integers(16, 40), some.integers(1, 8), some.integers(1, 8))
def test_whole_steps_are_whole_for_every_method(samples: int, batch: int, parts: int, more: int) -> None:
    most = max(parts, more)
    steps = cells.whole_steps(samples, batch, most)
    cut = cut_epoch(samples, batch, parts)
    assert all(stop - start == batch for start, stop in cut[:steps])
    assert samples // batch - 1 <= steps <= samples // batch


def test_only_gpus_are_held_to_what_was_published() -> None:
    assert cells.target_of("resnet50", OURS, ONE, "cuda") == pytest.approx(1 / 2.44, abs=1e-6)
    assert cells.target_of("resnet50", OURS, ONE, "cpu") is None
    assert cells.target_of("resnet50", OURS, DDP, "cuda") is None
    assert cells.target_of("resnet50", DDP, ONE, "cuda") is None


# ------------------------------------------------------------------------ rounds


def test_all_methods_train_for_all_epochs_and_the_first_is_not_timed() -> None:
    seen: list[tuple[str, int]] = []
    methods = {name: lambda epoch, name=name: seen.append((name, epoch)) for name in ("a", "b", "c")}
    result = train_in_turn(methods, 22, 1, Meeting())
    assert sorted(seen) == [(name, epoch) for name in "abc" for epoch in range(22)]
    assert [epoch for _, epoch in seen] == sorted(epoch for _, epoch in seen)
    assert {seen[3 * epoch][0] for epoch in range(3)} == set("abc")  # each goes first once in three rounds
    assert result.rounds + result.dropped == 21


def test_busy_rounds_are_left_out_while_enough_quiet_ones_are_there() -> None:
    times = {"a": [float(number + 1) for number in range(24)]}
    loads = [0.0] * 24
    loads[3] = loads[7] = 1.0
    kept = keep_quiet(times, loads)
    assert (kept.rounds, kept.dropped, kept.loaded, kept.load) == (22, 2, False, 0.0)
    assert 4.0 not in kept.milliseconds["a"]


def test_where_all_rounds_are_busy_the_least_busy_are_kept_and_it_says_so() -> None:
    loads = [FOREIGN_LOAD + 1 + number for number in range(24)]
    kept = keep_quiet({"a": [float(number + 1) for number in range(24)]}, loads)
    assert kept.milliseconds["a"] == tuple(float(number + 1) for number in range(20))
    assert kept.loaded
    assert kept.load == loads[19]


def test_foreign_load_is_what_the_machine_did_less_what_the_workers_did() -> None:
    # Two rounds of a quarter of a second are judged together; in the third round somebody uses two cores.
    accounts = [(0.0, 0.0, 0.0, 0.0), (0.25, 0.4, 0.2, 0.2), (0.5, 0.5, 0.5, 0.5), (1.5, 3.5, 3.0, 1.5)]
    assert foreign_loads(accounts) == [0.0, 0.0, 2.0]


# ------------------------------------------------------------------------ methods


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_peer_and_hybridpar_train_the_same() -> None:
    world = World()
    task = make_task(world)
    assert task.steps == 2
    peer, ours = Peer(ONE, task, world), Ours(task, world, StageLayout(stages=1, replicas=1, micro_batches=1))
    before = weights(peer._model).clone()
    assert torch.equal(before, weights(ours.trainer.model))
    for epoch in range(3):
        peer.epoch(epoch)
        ours.epoch(epoch)
    assert ours.trainer.steps_done == 6
    assert not torch.allclose(before, weights(peer._model))
    assert torch.allclose(weights(peer._model), weights(ours.trainer.model), rtol=1e-4, atol=1e-6)
    assert peer.accuracy() == ours.accuracy()
    assert not ours.captured
    ours.close()


def test_the_fastest_layout_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    plain, cut, broken = (StageLayout(stages=stages, replicas=1, micro_batches=1) for stages in (1, 2, 99))
    took = {plain: 5.0, cut: 3.0}

    def probe(task: Task, world: World, layout: StageLayout, *_: object) -> tuple[float, None]:
        if layout not in took:
            raise UsageError("no such cut")
        return took[layout], None

    monkeypatch.setattr("benchmarks.thesis.ours._probe", probe)
    choice = choose(make_task(world), world, [plain, cut, broken], 1, Meeting())
    assert choice.layout == cut
    assert choice.facts()["probe_ms"] == {str(plain): 5.0, str(cut): 3.0}
    assert choice.facts()["probe_failed"] == {str(broken): "no such cut"}
    with pytest.raises(UsageError, match="no such cut"):
        choose(make_task(world), world, [broken], 1, Meeting())


@pytest.mark.gpu
def test_a_captured_peer_trains_like_an_eager_one() -> None:
    world = World(device=torch.device("cuda", 0))
    task = make_task(world)
    eager, captured = (Peer(method, task, world) for method in (ONE, cells.ONE_GRAPH))
    for epoch in range(3):
        eager.epoch(epoch)
        captured.epoch(epoch)
    assert torch.allclose(weights(eager._model), weights(captured._model), rtol=1e-3, atol=1e-4)


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


@pytest.mark.sweep
def test_two_workers_from_the_command_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    monkeypatch.setattr(command, "commit", lambda: "abc1234")
    monkeypatch.setattr(cells, "code_digest", lambda: "0123456789ab")
    arguments = [*SMALL_NET, "--steps", "1", "--output", str(table), "--methods", ONE, DDP, cells.DATA_PARALLEL, OURS]
    assert command.run(arguments) == 0
    rows = check_csv(table)
    assert [(entry.method, entry.baseline) for entry in rows] == [(ONE, ONE), (DDP, ONE), (OURS, ONE), (OURS, DDP)]
    assert {entry.ranks for entry in rows} == {2}
    printed = capfd.readouterr().out
    assert "nn.DataParallel: not measured, nn.DataParallel needs two GPUs" in printed

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a finished cell was run again")

    monkeypatch.setattr(command, "launch", refuse)
    assert command.run(arguments) == 0
    assert "measured already" in capfd.readouterr().err
    assert check_csv(table) == rows


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


def test_without_a_gpu_only_the_small_form_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.run([]) == 3
    assert "--small" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--epochs", "20"], "--epochs is 20"),
        (["--methods", ONE, "DPP"], "unknown method 'DPP'"),
        (["--methods", OURS], "--methods without"),
        (["--steps", "0"], "--steps is 0"),
    ],
)
def test_a_wrong_request_is_refused(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["--small", *options]) == 2
    assert named in capsys.readouterr().err


def test_a_worker_that_fails_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "launch", lambda *_, **__: None)  # ends well, but writes no rows
    assert command.run([*SMALL_NET, "--output", str(tmp_path / "t.csv"), "--methods", ONE, OURS]) == 1
    assert "seed 0: not measured: one device, hybridpar" in capsys.readouterr().err


def test_the_report_shows_published_beside_measured() -> None:
    console = Console(record=True, width=150, file=open("/dev/null", "w"))  # noqa: SIM115
    old = make_rows(seed=0, speedup=9.0)
    print_report([*old, *make_rows(seed=0), *make_rows(seed=1, speedup=3.0)], console)
    text = console.export_text()
    assert "2.500 [2.000, 3.000]" in text  # the newest rows of each seed
    assert "1.47" in text
    assert "90.50 ± 0.71" in text
    assert "hybridpar: 2 x 1, 4 micro-batches, CUDA graphs" in text
    assert "DDP: not measured, needs two workers" in text


def test_the_committed_tables_are_valid_and_claim_nothing_for_a_cpu() -> None:
    tables = sorted((ROOT / "benchmarks/thesis/results").glob("*.csv"))
    assert tables
    for table in tables:
        for entry in check_csv(table):
            assert entry.claim == cells.CLAIM
            assert entry.extra["cuda"] or entry.target is None
