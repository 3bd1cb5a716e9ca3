"""Tests runs with compiled kernels: the same training as without, and what the plan and the summary say of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from hybridpar.observe.metrics import read_metrics
from hybridpar.plan import read_plan
from hybridpar.run import kernel_use as kernels_of_run
from hybridpar.run.kernel_use import prepare_kernels
from hybridpar.tvm_kernels import choice, norm_swap
from hybridpar.tvm_kernels.database import Database, append_records
from hybridpar.tvm_kernels.shapes import Direction, KernelKey, Layout, NormShape
from tests.ranks import run_ranks
from tests.runs import check_run, train
from tests.small_nets import separable
from tests.test_cli import assert_one_error, call  # noqa: F401 - a fixture
from tests.tvm_kernels.standin import NormStandIn, StandIn, all_records

SHAPES = [f"{{batch}}x8x8x8 k{taps}x{taps} s1x1 p{taps // 2}x{taps // 2} d1x1" for taps in (3, 5)]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return standing_in(monkeypatch)


def standing_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Kernels that numpy computes, until the test ends."""
    made = StandIn()
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")
    monkeypatch.setattr(choice, "make_kernels", made)
    monkeypatch.setattr(choice, "_active", None)
    monkeypatch.setattr(kernels_of_run, "confirm_kernels", lambda *_: "")
    return made


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> NormStandIn:
    monkeypatch.setattr(norm_swap, "LEAST_VALUES", 16 * 64 * 8)
    return NormStandIn(monkeypatch)


def database(directory: Path, *batches: int, layout: Layout = Layout.CHANNELS_LAST) -> str:
    for batch in batches:
        for shape in SHAPES:
            append_records(directory, all_records(shape.format(batch=batch), layout))
    return str(directory)


def test_the_plan_says_what_ran_and_why(tmp_path, kernels, capsys):
    train(tmp_path / "run", "separable", kernels=database(tmp_path / "k.jsonl", 4), epochs=1)
    plan = read_plan(tmp_path / "run" / "plan.json")
    assert plan.kernels is not None
    assert plan.measured is not None
    assert plan.measured.memory_format == "channels_last"
    assert {(entry.layer, entry.direction) for entry in plan.kernels.choices} == {
        *((layer, direction.value) for layer in ("body.3", "body.4") for direction in Direction),
        *((layer, "batch_norm_act") for layer in ("body.1", "body.6")),
    }
    assert {entry.kernel for entry in plan.kernels.choices} == {
        "stock: its record is for batch 4",
        "stock: kernels gain nothing below 65,536 values",
    }
    assert check_run(tmp_path / "run")["kernels"] == {"tuned": 0, "stock": 8, "saved_ms": None}
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 of 8 operations of convolutions and norms run on kernels of their own" in shown
    assert "6 on torch, as its record is for batch 4 2 on torch, as kernels gain nothing below" in shown


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2, "batch_size": 32}], ids=["whole", "pooled"])
def test_norms_run_fused_where_they_are_large_enough(tmp_path, kernels, norms, capsys, options):
    train(tmp_path / "plain", "separable", memory_format="channels_last", **options)
    file = database(tmp_path / "k.jsonl", 16)
    capsys.readouterr()
    assert train(tmp_path / "fused", "separable", kernels=file, **options) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "7 of 8 operations of convolutions and norms run on kernels of their own 1 on torch" in shown
    summary = check_run(tmp_path / "fused")
    saved = 6.0 * options.get("micro_batches", 1)
    assert summary["kernels"] == {"tuned": 7, "stock": 1, "saved_ms": saved}
    plan = read_plan(tmp_path / "fused" / "plan.json")
    assert plan.kernels is not None
    assert [(entry.layer, entry.kernel) for entry in plan.kernels.choices if entry.direction == "batch_norm_act"] == [
        ("body.1", "tuned"),
        ("body.6", "stock: kernels gain nothing below 8,192 values"),
    ]
    assert set(norms.calls["backward"]) == {NormShape(16 * 64, 8, "relu")}
    assert norms.calls["backward"].total() >= summary["steps"]
    losses = [read_metrics(tmp_path / name).steps["loss"] for name in ("plain", "fused")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    states = [load_file(next((tmp_path / name).rglob("model.safetensors"))) for name in ("plain", "fused")]
    assert list(states[0]) == list(states[1])
    for key in states[0]:
        torch.testing.assert_close(states[0][key], states[1][key], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(("amp", "dtype"), [("none", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_kernels_are_of_the_type_that_is_computed_in(kernels, monkeypatch, amp, dtype):
    monkeypatch.setattr(choice, "why_none", lambda key: f"it is {key.dtype}")
    config, world = TrainConfig(kernels="auto", data="synthetic", image_size=8, batch_size=4), World()
    with Trainer(separable(), config=config, world=world) as trainer:
        plan = trainer.plan
        plan = plan.model_copy(update={"compute": plan.compute.model_copy(update={"amp": amp})})
        use = prepare_kernels(trainer.model, config, plan, world, (3, 8, 8))
    assert use is not None
    assert {one.kernel for one in use.section.choices if one.direction == "forward"} == {f"stock: it is {dtype}"}


def test_looking_for_norms_leaves_no_trace_in_running_statistics(kernels, monkeypatch):
    config = TrainConfig(kernels="auto", data="synthetic", image_size=8, batch_size=4, micro_batches=2)
    world = World()
    with Trainer(separable(), config=config, world=world) as trainer:
        pool = next(layer._pool[0] for layer in trainer.model.modules() if hasattr(layer, "_pool"))
        before = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
        use = prepare_kernels(trainer.model, config, trainer.plan, world, (3, 8, 8))
        assert use is not None
        assert sum(choice.direction == "batch_norm_act" for choice in use.section.choices) == 2
        assert not pool.sums.any()
        assert not any(pool.counts)
        for name, buffer in trainer.model.named_buffers():
            assert torch.equal(buffer, before[name])


def _rank(world: World, directory: Path, file: str, options: dict[str, object]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        made = standing_in(patch)
        train(directory, "separable", kernels=file, **options)
        return made.calls[Direction.FORWARD]


@pytest.mark.parametrize("options", [{}, {"stages": 2, "micro_batches": 2}], ids=["replicas", "stages"])
def test_several_workers_use_the_kernels_of_their_share(tmp_path, options):
    file = database(tmp_path / "k.jsonl", 8)
    calls = run_ranks(_rank, 2, tmp_path / "run", file, {**options, "epochs": 1})
    summary = check_run(tmp_path / "run", steps=6)
    assert summary["kernels"]["tuned"] == 6
    assert sum(calls) > 0


def _confirming(patch: pytest.MonkeyPatch, cache: Path, batch: int) -> None:
    """Confirm all convolutions at once, and note that it was asked for."""
    patch.setenv("HYBRIDPAR_CACHE", str(cache))

    def confirm(keys: Mapping[KernelKey, int], _: Database, seconds: float) -> str:
        assert 0 < seconds <= 30
        assert len(keys) == 6
        database(cache / "kernels.jsonl", batch)
        with (cache / "asked").open("a") as file:
            file.write("once\n")
        return "confirmed 6 of 6 kernels"

    patch.setattr(kernels_of_run, "confirm_kernels", confirm)


def test_a_new_run_confirms_kernels_and_a_resumed_one_goes_on_with_them(tmp_path, kernels, monkeypatch, capsys):
    _confirming(monkeypatch, tmp_path / "cache", 16)
    train(tmp_path / "run", "separable", kernels="auto", epochs=1)
    assert check_run(tmp_path / "run")["kernels"]["tuned"] == 6
    assert "kernels confirmed 6 of 6 kernels" in " ".join(capsys.readouterr().out.split())
    train(tmp_path / "run", "separable", kernels="auto", epochs=2, resume=True)
    assert (tmp_path / "cache" / "asked").read_text() == "once\n"
    # What is named is used as it is.
    train(tmp_path / "named", "separable", kernels=database(tmp_path / "k.jsonl", 4), epochs=1)
    assert check_run(tmp_path / "named")["kernels"]["tuned"] == 0
    assert (tmp_path / "cache" / "asked").read_text() == "once\n"


def _confirming_rank(world: World, directory: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        standing_in(patch)
        _confirming(patch, directory / "cache", 8)
        train(directory / "run", "separable", kernels="auto", epochs=1)


def test_one_of_several_workers_confirms_and_all_use_it(tmp_path):
    run_ranks(_confirming_rank, 2, tmp_path)
    assert (tmp_path / "cache" / "asked").read_text() == "once\n"
    assert check_run(tmp_path / "run")["kernels"]["tuned"] == 6


def test_the_trainer_takes_kernels_too(tmp_path, kernels):
    config = TrainConfig(kernels=database(tmp_path / "k.jsonl", 16))
    with Trainer(separable(), config=config) as trainer:
        trainer.step((torch.randn(16, 3, 8, 8), torch.randint(10, (16,))))
    assert kernels.calls == dict.fromkeys(Direction, 2)
    with pytest.raises(UsageError, match="cannot read the kernel database"):
        Trainer(separable(), config=TrainConfig(kernels="none.jsonl"))


def test_a_plan_of_a_swapped_model_fits_the_plain_one(tmp_path, kernels):
    file = database(tmp_path / "k.jsonl", 16)
    train(tmp_path / "tuned", "separable", kernels=file, stages=2, epochs=1)
    plan = json.loads((tmp_path / "tuned" / "plan.json").read_text())
    assert any("body_3" in unit for stage in plan["partition"]["stages"] for unit in stage["units"])
    assert train(tmp_path / "plain", "separable", plan=tmp_path / "tuned" / "plan.json", epochs=1) == 0
