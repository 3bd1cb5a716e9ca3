"""A plan goes to disk and back unchanged, and whatever is not a plan for this model is refused with the reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import PlanError
from hybridpar.plan import (
    Compute,
    KernelChoice,
    Kernels,
    Measured,
    ModelInfo,
    Partition,
    Pipeline,
    Placement,
    Plan,
    Stage,
    StepFigures,
    Sync,
    SyncRule,
    parse_plan,
    read_plan,
)
from hybridpar.schedule.layout import Layout

MODEL = ModelInfo(name="resnet18", fingerprint="0123456789abcdef", parameters=11_689_512, input=(3, 224, 224))

FULL = Plan(
    model=MODEL,
    partition=Partition(
        stages=(Stage(units=("conv1", "bn1"), forward_ms=1.5, parameter_bytes=64), Stage(units=("fc",), cut_bytes=8)),
        cut="balanced",
        micro_batch=8,
    ),
    placement=Placement(layout=Layout.repeated([(0, 1), (1, 0)], 2), device="cuda"),
    pipeline=Pipeline(schedule="1f1b", micro_batches=4, recompute=(1,)),
    sync=Sync(lanes=3, bucket_bytes=1 << 20, policy=(SyncRule(pattern="fc.*", codec="topk:ratio=0.01"), SyncRule())),
    kernels=Kernels(database="k.json", choices=(KernelChoice(layer="conv1", direction="forward", kernel="t1"),)),
    measured=Measured(device="a GPU", threads=2, noise=0.01, seed=7, versions={"torch": "2.11"}),
    predicted=StepFigures(step_ms=12.5, bubble=0.2, bytes_sent_per_step=1000),
)

SMALL = Plan(
    model=MODEL,
    partition=Partition(stages=(Stage(units=("conv1",)),)),
    placement=Placement(layout=Layout.repeated([(0, 0)], 2)),
)


def test_a_plan_survives_the_disk(tmp_path):
    FULL.save(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == FULL
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


names = st.text(min_size=1, max_size=8)


@settings(max_examples=40)
@given(
    stages=st.lists(names, min_size=1, max_size=6, unique=True),
    replicas=st.integers(1, 9),
    bubble=st.floats(0, 1),
    versions=st.dictionaries(names, names, max_size=3),
)
def test_any_plan_survives_as_text(stages, replicas, bubble, versions):
    plan = Plan(
        model=MODEL,
        partition=Partition(stages=tuple(Stage(units=(name,)) for name in stages)),
        placement=Placement(layout=Layout.dealt(len(stages), 1, "loop", replicas=replicas)),
        measured=Measured(versions=versions),
        predicted=StepFigures(bubble=bubble),
    )
    read = parse_plan(json.loads(plan.to_json()))
    assert read == plan
    assert read.to_json() == plan.to_json()


def test_the_text_is_stable_so_that_plans_can_be_compared():
    text = FULL.to_json()
    assert list(json.loads(text)) == [
        *("version", "model", "partition", "placement", "pipeline", "sync", "kernels", "measured", "predicted")
    ]
    assert text.endswith("}\n")
    shuffled = dict(reversed(json.loads(text).items()))
    assert parse_plan(shuffled).to_json() == text


def test_the_format_of_a_version_never_changes():
    # A change here needs a new version, so that plans that are on disk are refused with a reason.
    assert json.loads(SMALL.to_json()) == {
        "version": 2,
        "model": {
            "name": "resnet18",
            "fingerprint": "0123456789abcdef",
            "parameters": 11_689_512,
            "input": [3, 224, 224],
        },
        "partition": {"stages": [{"units": ["conv1"], "parameter_bytes": 0}], "cut": "whole", "edges": []},
        "placement": {"layout": ["0", "1"], "device": "cpu"},
    }


def change(**sections: object) -> dict[str, object]:
    return {**json.loads(FULL.to_json()), **sections}


def changed_in(section: str, **values: object) -> dict[str, object]:
    return change(**{section: {**json.loads(FULL.to_json())[section], **values}})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (change(version=1), "has plan version 1"),
        ([], "is not a plan"),
        ({"version": 2}, "model: Field required"),
        (change(stages=3), "stages: Extra inputs"),
        (changed_in("sync", bucket_byte=3), "sync.bucket_byte: Extra inputs"),
        (changed_in("sync", lanes=0), "sync.lanes"),
        (changed_in("placement", layout=["0", "1"]), "the layout has 1 stages, but the partition has 2"),
        (changed_in("placement", layout=["0,1", "2"]), "each replica has a rank, as 1, or a lane of it, as 1.0"),
        (changed_in("placement", layout=["0,1", "0,1"]), "each rank from 0 on is in one replica"),
        (changed_in("placement", layout=[["0", "1"]]), "it is a list with a text for every replica"),
        (changed_in("placement", shares=[1]), "every replica has one of 2"),
        (changed_in("pipeline", recompute=[2]), "recompute names stages (2,), but there are only 2"),
        (changed_in("partition", stages=[{"units": ["a"]}, {"units": ["b", "a"]}]), "unit 'a' is in two stages"),
    ],
)
def test_what_is_not_a_valid_plan_is_refused_with_the_place(tmp_path, data, said):
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError) as caught:
        read_plan(file)
    assert said in caught.value.what
    assert "edited.json" in caught.value.what
    assert caught.value.exit_code == 2
    assert caught.value.fix or caught.value.why


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    FULL.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"cannot write .*plan\.json"):
        FULL.save(tmp_path / "missing" / "plan.json")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(PlanError, match="No space left"):
        SMALL.save(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == FULL
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"], "nothing half-written is left behind"


def test_a_plan_goes_where_a_link_points_and_into_what_is_no_file(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    FULL.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert read_plan(tmp_path / "real.json") == FULL
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    FULL.save(tmp_path / "pipe")
    assert os.read(reader, 1 << 16).decode() == FULL.to_json()
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(PlanError, match="No space left"):
        FULL.save("/dev/full")


def pipelined(*rows: tuple[str, ...]) -> Plan:
    """A plan of two stages on two workers, whose two micro-batches run in these rows."""
    return Plan(
        model=ModelInfo(name="net", fingerprint="0" * 16, parameters=1),
        partition=Partition(stages=(Stage(units=("a",)), Stage(units=("b",)))),
        placement=Placement(layout=Layout.dealt(2, 2)),
        pipeline=Pipeline(schedule="gpipe", micro_batches=2, rows=rows),
    )


WHOLE = ("0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1")


@pytest.mark.parametrize(
    "rows",
    [
        (("0F0,0F1,0B0", WHOLE[1]),),
        (("0F0,0F1,0B0,0B0", WHOLE[1]),),
        ((WHOLE[1], WHOLE[0]),),
        (WHOLE, WHOLE),
        (("0F0,0B0,0F1,0B1", "1F1,1F0,1B1,1B0"),),
    ],
)
def test_passes_that_are_not_all_there_once_in_an_order_that_can_be_are_refused(rows):
    with pytest.raises(PlanError, match="the passes of the plan cannot be run"):
        pipelined(*rows).orders()


def test_passes_that_can_be_run_are_those_that_run():
    (order,) = pipelined(("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")).orders()
    assert [[str(action) for action in row] for row in order.rows][1] == ["1F0", "1B0", "1F1", "1B1"]


@pytest.mark.parametrize("change", [{"amp": "bf16"}, {"threads": 1}, {"cuda_graph": "on"}, {"compile": True}])
def test_how_steps_are_computed_belongs_to_what_a_plan_does(change):
    plan = pipelined(WHOLE)
    other = plan.model_copy(update={"compute": Compute(**change)})
    assert plan.digest != other.digest
