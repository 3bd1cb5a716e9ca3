"""Policies between workers: one for all, known before the first step, with what it does told and measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.compress.policy import check_compression
from hybridpar.errors import HybridparError
from hybridpar.lanes import Lanes
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.pipeline.stage_module import WholeModel
from hybridpar.pipeline.step import whole_options
from hybridpar.sync import compression
from hybridpar.sync.compression import Decision
from hybridpar.sync.figures import kind_of
from hybridpar.sync.stage_gradients import SyncOptions
from tests.pipeline.oracle import run_step
from tests.ranks import run_ranks
from tests.runs import check_run, train_rank
from tests.sync.test_compression import Net, Staged, batch, kept, make, state_of

RULES = "second.* -> onebit; *.weight -> powersgd:rank=1"


def failing(world: World, texts: list[str]) -> tuple[str, int]:
    with pytest.raises(HybridparError) as caught:
        make(world, texts[world.rank % len(texts)])
    return str(caught.value), caught.value.exit_code


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["onebit", "twobit"], ["worker 1", "twobit and not onebit"]),
        (["second.* -> onebit; *.weight -> fp16", "second.* -> onebit"], ["no rule and not *.weight -> fp16"]),
        (["auto", "fp16"], ["fp16 and not auto with fidelity exact"]),
        (["fp16", "onebitt"], ["unknown codec 'onebitt'"]),
        (["secnd.* -> fp16"], ["'secnd.*'", "Nearest: second."]),
    ],
)
def test_workers_with_different_policies_are_refused_at_the_start(texts, told):
    texts_of_workers = run_ranks(failing, 2, texts, shared_memory=False)
    for part in told:
        assert part in texts_of_workers[0][0]
    assert [code for _, code in texts_of_workers] == [2, 2]


def trained(world: World, codec: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], set[str], Any, list[Any]]:
    with make(world, codec, **options) as trainer:
        replica = world.rank % (options.get("replicas") or world.size)
        for step in range(3):
            result = trainer.step(batch(replica, step))
        trainer.wait()
        sync = result.outcome.sync
        rows = trainer.engine.wire_format().layers
        names = {path.split("/parameters/")[1].split("/")[0] for path in kept(trainer)}
        if options.get("stages", 1) > 1:
            trainer.engine.pipeline.collect()
        return state_of(trainer), names, sync, rows


@pytest.mark.parametrize("options", [{}, {"stages": 2, "replicas": 2, "micro_batches": 2}])
def test_each_parameter_travels_by_the_first_rule_that_matches(options):
    rules = RULES if not options else "4.* -> onebit; *.weight -> powersgd:rank=1"
    runs = run_ranks(trained, 4 if options else 2, rules, options, shared_memory=False)
    state, _, _, rows = runs[0]
    for other, *_ in runs[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())
    names = set[str]().union(*(run[1] for run in runs))
    wide, last = ("4.weight", "6.weight") if options else ("second.weight", "last.weight")
    codecs = {row.layer: row.codec for row in rows}
    assert codecs[wide] == "onebit"
    assert codecs[last] == "powersgd:rank=1" if last in names else codecs[last] == "none"
    assert wide in names
    assert [row.layer for row in rows] == [name for name, _ in (Staged() if options else Net()).named_parameters()]


def test_figures_of_a_step_are_those_of_its_bytes_and_times():
    elements = sum(parameter.numel() for parameter in Net().parameters())
    for _, _, sync, rows in run_ranks(trained, 2, RULES, {}, shared_memory=False):
        assert sync.bytes_before == 4 * elements == sum(row.bytes_before for row in rows)
        # Stripes are aligned to 8 bytes.
        assert sync.bytes_after == pytest.approx(sum(row.bytes_after for row in rows), rel=0.02)
        assert sync.bytes_after < sync.bytes_before / 3
        assert min(sync.encode_ms, sync.wire_ms, sync.decode_ms) > 0
        parts = sync.encode_ms + sync.wire_ms + sync.decode_ms
        # Two lanes; first messages are written in the hook.
        assert (sync.wire_ms + sync.decode_ms) / 2 * 0.999 <= sync.sync_ms <= parts * 1.001
    for _, _, sync, rows in run_ranks(trained, 2, "none", {}):
        assert not rows
        assert sync.bytes_before == sync.bytes_after == 4 * elements
        assert (sync.encode_ms, sync.decode_ms) == (0.0, 0.0)
        assert sync.wire_ms > 0


def first_norm(world: World) -> tuple[list[float | None], float]:
    with make(world, "onebit") as trainer:
        taken = [trainer.step(batch(world.rank, step)).outcome.sync for step in range(3)]
    found = [one.residual_norm for one in taken]
    norms = taken[0].residual_norms
    assert norms is not None
    assert sum(one**2 for one in norms.values()) == pytest.approx(found[0] ** 2)
    assert norms.keys() < dict(trainer.model.named_parameters()).keys()  # biases are sent as they are
    with make(world, "onebit") as trainer:
        trainer.step(batch(world.rank, 0))
        squares = sum(float(tensor.square().sum()) for tensor in kept(trainer).values())
    return found, squares**0.5


def test_the_norm_of_what_was_not_sent_is_taken_now_and_then():
    for (first, *rest), expected in run_ranks(first_norm, 2, shared_memory=False):
        assert first == pytest.approx(expected, rel=1e-4)
        assert rest == [None, None]


def late(world: World, poisoned: bool) -> tuple[list[str], dict[str, Tensor]]:
    """Three steps of which the second is poisoned, with the decision left where it is; and when it was read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 5))
    doing, reads = "", list[str]()

    class Watched(Decision):
        @property
        def committed(self) -> bool:
            reads.append(doing)
            return super().committed

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        nonlocal doing
        doing = f"backward pass of {step}"
        return nn.functional.cross_entropy(output, targets) * (float("inf") if poisoned and step == 1 else 1.0)

    def apply(factor: float | None, commit: Tensor | None, pieces: object) -> None:
        nonlocal doing
        assert commit is not None
        doing = f"end of {step}"

    sync = SyncOptions(bucket_bytes=4096, codec="onebit")
    options = whole_options(world.size, sync=sync, capture=True)  # the host must not read decisions
    with Lanes(world.device) as lanes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "Decision", Watched)
        engine = PipelineEngine(model, [WholeModel(model)], world, lanes, loss, lambda _: apply, options, 1)
        for step in range(3):
            doing = f"beginning of {step}"
            run_step(engine, [batch(world.rank, step)], 16)
        before = list(reads)
        residuals = {
            name: one["residuals"]["worker"] for name, one in _parameters(engine).items() if "residuals" in one
        }
        engine.close()
    return before, residuals


def _parameters(engine: PipelineEngine) -> dict[str, Any]:
    parameters: dict[str, Any] = engine.state_dict()["orders"]["0"]["codec"]["parameters"]
    return parameters


@pytest.mark.parametrize("poisoned", [False, True])
def test_a_decision_that_is_left_on_the_device_is_not_read_before_the_next_backward_pass(poisoned):
    for reads, residuals in run_ranks(late, 2, poisoned, shared_memory=False):
        # The buckets are cut anew at the beginning of the second step, and for that codecs must have settled.
        assert reads == ["beginning of 1", "backward pass of 2"]
        assert all(bool(torch.isfinite(residual).all()) for residual in residuals.values())
        assert any(bool(residual.any()) for residual in residuals.values())


def test_a_policy_with_a_single_replica_can_gain_nothing_and_says_so(caplog):
    check_compression("auto", {}, 1)
    check_compression("none", {}, 1)
    assert not caplog.records
    check_compression("last.* -> onebit", {"last.weight": torch.ones(1)}, 1)
    assert "can gain nothing" in caplog.text


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        (nn.Conv2d(8, 8, 3), "weight", "conv"),
        (nn.Conv2d(8, 16, 3, groups=8), "weight", "depthwise"),
        (nn.Conv2d(8, 8, 3, groups=4), "weight", "conv"),
        (nn.Linear(3, 4), "weight", "linear"),
        (nn.BatchNorm2d(3), "bias", "norm"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight", "linear"),
        (nn.Embedding(3, 4), "weight", "embedding"),
        (nn.PReLU(), "weight", "other"),
    ],
)
def test_kinds_of_layers_are_named(module, name, kind):
    assert kind_of(module, name) == kind


def test_a_run_tells_what_travels_and_leaves_it_behind(tmp_path, capfd):
    options = {"nproc": 2, "compress": "onebit", "epochs": 1, "checkpoints": "never"}
    assert run_ranks(train_rank, 2, tmp_path / "run", "plain", None, options) == [0, 0]
    summary = check_run(tmp_path / "run")
    assert summary["codec"] == "onebit"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "event" not in row]
    before, after = (sum(row[key] for row in steps) for key in ("bytes_before", "bytes_after"))
    assert summary["compression_ratio"] == pytest.approx(before / after, abs=1e-3)
    assert summary["compression_ratio"] > 1
    assert {row["residual_norm"] is None for row in steps[1:]} == {True}
    assert steps[0]["residual_norm"] is not None
    for row in steps:
        assert 0 <= row["hidden_share"] <= 1
        assert min(row["encode_ms"], row["wire_ms"], row["decode_ms"], row["sync_ms"]) > 0
    assert min(summary["encode_ms"], summary["wire_ms"], summary["decode_ms"]) > 0
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["sync"]["policy"] == [{"pattern": "*", "codec": "onebit"}]
    assert (
        (tmp_path / "run" / "compress.csv").read_text().startswith("layer,kind,size,codec,bytes_before,bytes_after\n")
    )
