"""A step that is captured and replayed is the step that the host would have issued."""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from hybridpar.lanes import Lanes
from hybridpar.lanes.base import Constants
from hybridpar.pipeline import cuda_graph
from hybridpar.pipeline.cuda_graph import StepGraph, why_not_captured
from hybridpar.pipeline.local_stage import forward_report
from tests.pipeline.tape import StandInCuda, StreamLanes, Tape, stand_in
from tests.small_nets import SmallNet

SAMPLES = 8
#: Rates that float32 holds exactly, as those of a run without graphs are Python's own numbers.
PLAIN = TrainConfig(lr=0.125, lr_schedule="constant:warmup=4", micro_batches=2)
GRAPH = replace(PLAIN, cuda_graph="on")
STEPS = 7


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    return stand_in(monkeypatch)


def batches(samples: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(count, 3, 8, 8, generator=generator), torch.randint(0, 10, (count,), generator=generator))
        for count in samples
    ]


class Run:
    """A trainer on streams of the stand-in, or on a CPU's own lanes."""

    def __init__(self, config: TrainConfig, cuda: StandInCuda | None = None, **changes: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = SmallNet()
        lanes = StreamLanes() if cuda is not None else None
        config = replace(config, plan="none", **changes)
        self.trainer = Trainer(
            self.model,
            config=config,
            total_steps=100,
            world=World(),
            lanes=lanes,
            example=torch.zeros(SAMPLES // config.micro_batches, 3, 8, 8),
        )
        self.seen: list[tuple[Any, ...]] = []

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        self.trainer.close()

    @property
    def graph(self) -> StepGraph:
        graph = self.trainer.engine.graph
        assert graph is not None
        return graph

    def step(self, batch: tuple[Tensor, Tensor], **flags: bool) -> Any:
        result = self.trainer.step(batch, **flags)
        outcome = result.outcome
        self.seen.append((outcome.loss, outcome.samples, outcome.committed, outcome.grad_norm, outcome.stop))
        return result

    def drop_by(self, generator: torch.Generator) -> None:
        """Let a layer drop half of what it passes on, by numbers of a generator."""
        self.model.body[3].register_forward_hook(  # type: ignore[index, union-attr]
            lambda _, args, output: output * torch.rand(output.shape, generator=generator).round()
        )

    def state(self) -> dict[str, Tensor]:
        optimizer = self.trainer.engine.optimizer_state()["state"]
        extra = {f"{name} {key}": one for name, values in optimizer.items() for key, one in values.items()}
        return {**{name: one.clone() for name, one in self.model.state_dict().items()}, **extra}


def assert_same(run: Run, other: Run) -> None:
    assert run.seen == other.seen
    state, expected = run.state(), other.state()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


def assert_not_captured(run: Run, plain: Run) -> None:
    """Steps that were to be captured, and were not, are those of a plain run."""
    for batch in batches([SAMPLES] * STEPS):
        plain.step(batch)
        run.step(batch)
    assert_same(run, plain)
    assert not run.graph.captured


WAYS = {
    "one worker": {},
    "without micro-batches": {"micro_batches": 1},
    "clipping": {"clip_grad": 0.5},
    "no guard": {"guard": False},
    "clipping without guard": {"guard": False, "clip_grad": 0.5},
    "adamw": {"optimizer": "adamw", "lr": 2**-10},
    "bf16": {"amp": "bf16"},
    "local statistics": {"batch_norm": "local"},
    "2 stages": {"stages": 2, "schedule": "1f1b"},
    "3 stages": {"stages": 3, "schedule": "1f1b", "micro_batches": 4},
    "2 stages, gpipe, recompute": {"stages": 2, "schedule": "gpipe", "recompute": (0,)},
    "2 stages, adamw, clipping": {"stages": 2, "optimizer": "adamw", "lr": 2**-10, "clip_grad": 0.5},
    "2 stages, no guard": {"stages": 2, "guard": False},
}


class TestReplay:
    @pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS.keys())
    def test_is_the_step_that_the_host_would_have_issued(self, cuda: StandInCuda, changes: dict[str, Any]) -> None:
        with Run(PLAIN, **changes) as plain, Run(GRAPH, cuda, **changes) as graphed:
            for batch in batches([SAMPLES] * STEPS):
                assert type(plain.step(batch).outcome) is type(graphed.step(batch).outcome)
            assert graphed.graph.reason is None
            assert sum(line.startswith("replay") for line in cuda.log) == STEPS - 3 + 1  # one is a test
            assert_same(graphed, plain)

    @pytest.mark.parametrize("stages", [1, 2])
    def test_a_bad_step_is_rolled_back_without_the_host(self, cuda: StandInCuda, stages: int) -> None:
        given = batches([SAMPLES] * STEPS)
        given[5][0][0, 0, 0, 0] = torch.nan
        with Run(PLAIN, stages=stages) as plain, Run(GRAPH, cuda, stages=stages) as graphed:
            for batch in given:
                plain.step(batch)
                graphed.step(batch)
            assert [committed for _, _, committed, _, _ in graphed.seen] == [True] * 5 + [False, True]
            assert graphed.seen[5][1:3] == plain.seen[5][1:3]
            del plain.seen[5], graphed.seen[5]  # nan is not equal to itself
            assert_same(graphed, plain)

    @pytest.mark.parametrize("stages", [1, 2])
    def test_an_outcome_stays_what_it_was(self, cuda: StandInCuda, stages: int) -> None:
        with Run(GRAPH, cuda, stages=stages) as run:
            results = [run.trainer.step(batch) for batch in batches([SAMPLES] * STEPS)]
            losses = [result.loss for result in results]
        assert len(set(losses)) == STEPS
        with Run(PLAIN, stages=stages) as plain:
            assert losses == [plain.trainer.step(batch).loss for batch in batches([SAMPLES] * STEPS)]

    @pytest.mark.parametrize("stages", [1, 2])
    def test_wishes_are_read_in_every_step(self, cuda: StandInCuda, stages: int) -> None:
        with Run(GRAPH, cuda, stages=stages) as run:
            given = batches([SAMPLES] * STEPS)
            for batch in given[:4]:
                run.step(batch)
            answers = [
                (outcome.stop, outcome.save)
                for flags in ({}, {"stop": True}, {"save": True}, {})
                if (outcome := run.step(given[4], **flags).outcome)
            ]
        assert answers == [(False, False), (True, False), (False, True), (False, False)]

    @pytest.mark.parametrize("spoilt", [False, True])
    def test_random_numbers_of_the_device_are_those_of_the_step(
        self, cuda: StandInCuda, spoilt: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def replay_otherwise(tape: Tape) -> None:
            replay(tape)
            graphed.graph._parameters[0].detach().mul_(1.5)

        replay = Tape.replay
        if spoilt:
            monkeypatch.setattr(Tape, "replay", replay_otherwise)
        with Run(PLAIN) as plain, Run(GRAPH, cuda) as graphed:
            for run, generator in ((plain, torch.Generator()), (graphed, cuda.draws)):
                generator.manual_seed(0)
                run.drop_by(generator)
            for batch in batches([SAMPLES] * STEPS):
                plain.step(batch)
                graphed.step(batch)
            assert graphed.graph.captured != spoilt
            assert_same(graphed, plain)


class TestSequence:
    @pytest.mark.parametrize("stages", [1, 2])
    def test_warm_ups_then_a_capture_then_replays(self, cuda: StandInCuda, stages: int) -> None:
        with Run(GRAPH, cuda, stages=stages) as run:
            for batch in batches([SAMPLES] * 5):
                run.step(batch)
        side = cuda.log[0].split(" waits")[0]
        warm_up = [f"{side} waits for default", f"default waits for {side}"]
        rehearsal = [warm_up[0], "sync debug mode warn", "sync debug mode 0", warm_up[1]]
        lanes = 0 if stages == 1 else 3  # two stages and control
        assert cuda.log == [
            *warm_up,
            *warm_up,
            *rehearsal,
            "synchronize",
            "capture, thread_local",
            f"captured {lanes} other streams",
            *["replay on default"] * 3,  # the first does what the warm-up before has done
        ]

    @pytest.mark.parametrize("stages", [1, 2])
    def test_a_step_of_another_shape_is_issued_and_the_graph_stays(self, cuda: StandInCuda, stages: int) -> None:
        sizes = [SAMPLES] * 5 + [SAMPLES - 2] + [SAMPLES] * 2 + [SAMPLES - 2]
        with Run(PLAIN, stages=stages) as plain, Run(GRAPH, cuda, stages=stages) as graphed:
            for batch in batches(sizes):
                plain.step(batch)
                graphed.step(batch)
            assert cuda.log.count("capture, thread_local") == 1
            assert sum(line.startswith("replay") for line in cuda.log) == 4 + 1
            assert_same(graphed, plain)

    @pytest.mark.parametrize("stages", [1, 2])
    def test_another_shape_that_lasts_is_captured_instead(
        self, cuda: StandInCuda, stages: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cuda_graph, "LASTING", 3)
        sizes = [SAMPLES] * 5 + [SAMPLES - 2] * 9
        with Run(PLAIN, stages=stages) as plain, Run(GRAPH, cuda, stages=stages) as graphed:
            for batch in batches(sizes):
                plain.step(batch)
                graphed.step(batch)
            assert cuda.log.count("capture, thread_local") == 2
            # Of both shapes those after the warm-ups, and the tests of both graphs.
            assert sum(line.startswith("replay") for line in cuda.log) == (5 - 3) + (9 - 3 - 3) + 2
            assert_same(graphed, plain)

    def test_gradients_are_those_of_the_last_step_also_after_another_shape(self, cuda: StandInCuda) -> None:
        sizes = [SAMPLES] * 5 + [SAMPLES - 2] + [SAMPLES]
        with Run(PLAIN) as plain, Run(GRAPH, cuda) as graphed:
            for batch in batches(sizes):
                plain.step(batch)
                graphed.step(batch)
                for ours, theirs in zip(graphed.model.parameters(), plain.model.parameters(), strict=True):
                    assert ours.grad is not None
                    assert theirs.grad is not None
                    assert torch.equal(ours.grad, theirs.grad)

    @pytest.mark.parametrize("stages", [1, 2])
    def test_frozen_parameters_modes_and_loaded_state_begin_anew(self, cuda: StandInCuda, stages: int) -> None:
        with Run(PLAIN, stages=stages) as plain, Run(GRAPH, cuda, stages=stages) as graphed:
            for number, batch in enumerate(batches([SAMPLES] * 18)):
                for run in (plain, graphed):
                    if number == 5:
                        engine = run.trainer.engine
                        engine.load_optimizer_state(copy.deepcopy(engine.optimizer_state()))
                    if number == 9:
                        next(run.model.parameters()).requires_grad_(False)
                    if number == 13:
                        run.model.body[1].eval()  # type: ignore[index, union-attr]
                    run.step(batch)
            assert cuda.log.count("capture, thread_local") == 4
            assert_same(graphed, plain)

    def test_the_mark_of_adam_is_set_for_the_capture_alone(self, cuda: StandInCuda) -> None:
        marks: list[tuple[bool, bool]] = []
        with Run(GRAPH, cuda, optimizer="adamw") as run:
            optimizer = run.trainer.optimizer
            note: Callable[..., None] = lambda *_: marks.append(  # noqa: E731
                (cuda.is_current_stream_capturing(), optimizer.param_groups[0]["capturable"])
            )
            optimizer.register_step_pre_hook(note)
            for batch in batches([SAMPLES] * 5):
                run.step(batch)
        assert marks == [(False, False)] * 3 + [(True, True)]
        assert not optimizer.param_groups[0]["capturable"]


class TestFailure:
    @pytest.mark.parametrize("stages", [1, 2])
    def test_training_goes_on_without(
        self, cuda: StandInCuda, stages: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(tape: Tape, **_: Any) -> None:
            begin(tape, **_)
            cuda.problems.append("a made-up reason")

        begin = Tape.capture_begin
        monkeypatch.setattr(Tape, "capture_begin", refuse)
        with Run(PLAIN, stages=stages) as plain, Run(GRAPH, cuda, stages=stages) as graphed:
            assert_not_captured(graphed, plain)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "a made-up reason" in caplog.text

    @pytest.mark.parametrize("stages", [1, 2])
    @pytest.mark.parametrize("spoilt", ["weights", "buffer body.1.running_mean", "the optimizer's state", "loss"])
    def test_a_replay_that_does_otherwise_is_taken_back(
        self,
        cuda: StandInCuda,
        spoilt: str,
        stages: int,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def replay_otherwise(tape: Tape) -> None:
            replay(tape)
            graph = graphed.graph
            spoil = [graph._issued.values[:1]] if spoilt == "loss" else graph._state()[spoilt]  # type: ignore[union-attr, index]
            spoil[0].mul_(1.5)

        replay = Tape.replay
        monkeypatch.setattr(Tape, "replay", replay_otherwise)
        with Run(PLAIN, stages=stages) as plain, Run(GRAPH, cuda, stages=stages) as graphed:
            assert_not_captured(graphed, plain)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert f"left other values in {spoilt} than" in caplog.text

    @pytest.mark.parametrize("where", ["_copied", "_norm"])
    def test_without_memory_for_the_comparison_training_goes_on_without(
        self, cuda: StandInCuda, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def run_out(*given: Any) -> Any:
            if given[1:] == ("cpu",):
                return copied(*given)
            raise torch.OutOfMemoryError

        copied = cuda_graph._copied
        monkeypatch.setattr(cuda_graph, where, run_out)
        with Run(PLAIN) as plain, Run(GRAPH, cuda) as graphed:
            assert_not_captured(graphed, plain)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "too little memory" in caplog.text

    def test_an_infinite_buffer_is_no_difference(self, cuda: StandInCuda) -> None:
        with Run(GRAPH, cuda) as run:
            run.model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
            for batch in batches([SAMPLES] * STEPS):
                run.step(batch)
            assert run.graph.captured

    @pytest.mark.parametrize("source", ["random", "numpy", "torch", "counter"])
    def test_what_a_replay_would_not_change_on_the_host_is_found(
        self, cuda: StandInCuda, source: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        draw: dict[str, Callable[[nn.Module], object]] = {
            "random": lambda _: random.random(),
            "numpy": lambda _: numpy.random.rand(),
            "torch": lambda _: torch.rand(1),
            "counter": lambda layer: setattr(layer, "calls", getattr(layer, "calls", 0) + 1),
        }
        with Run(GRAPH, cuda) as run:
            run.model.body[3].register_forward_hook(lambda layer, *_: draw[source](layer) and None)  # type: ignore[index, union-attr]
            for batch in batches([SAMPLES] * STEPS):
                run.step(batch)
            assert not run.graph.captured
        assert "capture, thread_local" not in cuda.log
        assert "random numbers on the host" in caplog.text

    @pytest.mark.parametrize("guard", [True, False])
    def test_buffers_that_are_assigned_change_as_without(
        self, cuda: StandInCuda, guard: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        def assign(layer: nn.Module, *_: Any) -> None:
            layer.mean = layer.mean + 1  # type: ignore[operator]

        with Run(PLAIN, guard=guard) as plain, Run(GRAPH, cuda, guard=guard) as graphed:
            for run in (plain, graphed):
                run.model.body[3].register_buffer("mean", torch.zeros(1))  # type: ignore[index, union-attr]
                run.model.body[3].register_forward_hook(assign)  # type: ignore[index, union-attr]
            for batch in batches([SAMPLES] * 12):
                plain.step(batch)
                graphed.step(batch)
            assert_same(graphed, plain)
            assert graphed.graph.captured == guard  # which writes them to where they were
        assert ("again and again" in caplog.text) != guard

    def test_a_step_that_is_not_finite_shows_nothing_and_the_next_is_tried(self, cuda: StandInCuda) -> None:
        given = batches([SAMPLES] * STEPS)
        given[2][0][0, 0, 0, 0] = torch.nan
        with Run(GRAPH, cuda) as run:
            for batch in given:
                run.step(batch)
            assert run.graph.captured
            assert cuda.log.count("capture, thread_local") == 2

    @pytest.mark.parametrize("stages", [1, 2])
    def test_an_error_in_the_middle_is_told_and_stops_no_lane(
        self, cuda: StandInCuda, stages: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        def meddle(layer: nn.Module, args: Any, output: Tensor) -> None:
            if cuda.is_current_stream_capturing():
                raise RuntimeError("the middle of a forward pass")

        with Run(PLAIN, stages=stages) as plain, Run(GRAPH, cuda, stages=stages) as graphed:
            graphed.model.body[3].register_forward_hook(meddle)  # type: ignore[index, union-attr]
            for batch in batches([SAMPLES] * STEPS):
                plain.step(batch)
                graphed.step(batch)
            assert_same(graphed, plain)
        assert len(caplog.records) == 1
        assert "the middle of a forward pass" in caplog.text

    def test_a_host_that_waits_is_found_before_the_capture(
        self, cuda: StandInCuda, caplog: pytest.LogCaptureFixture
    ) -> None:
        def read(layer: nn.Module, args: Any, output: Tensor) -> None:
            if cuda.sync_debug_mode:
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
                warnings.warn("something else", stacklevel=1)

        with Run(PLAIN) as plain, Run(GRAPH, cuda) as graphed:
            graphed.model.body[3].register_forward_hook(read)  # type: ignore[index, union-attr]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for batch in batches([SAMPLES] * STEPS):
                    plain.step(batch)
                    graphed.step(batch)
            assert_same(graphed, plain)
        assert [str(one.message) for one in caught] == ["something else"] * 2
        assert "capture, thread_local" not in cuda.log
        assert "test_cuda_graph.py" in caplog.text


# ------------------------------------------------------------------------------ what is refused

CUDA, ONE = torch.device("cuda", 0), World()


def sgd(**changes: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, **{"fused": True, **changes})


class TestRefusals:
    def test_what_can_be_captured_is_not_refused(self) -> None:
        assert why_not_captured(CUDA, ONE, [sgd()]) is None

    @pytest.mark.parametrize(
        ("device", "optimizer", "facts", "said"),
        [
            (torch.device("cpu"), sgd(), {}, ["device 'cpu'", "on a GPU"]),
            (CUDA, sgd(), {"positions": 2}, ["2 workers", "--replicas"]),
            (CUDA, sgd(fused=False), {}, ["SGD, not fused", "fused=True"]),
            (CUDA, sgd(), {"random_stages": [1]}, ["stage 1", "masks of one step", "--stages"]),
        ],
        ids=["device", "positions", "optimizer", "random"],
    )
    def test_a_reason_says_what_and_why(
        self, device: torch.device, optimizer: Any, facts: dict[str, Any], said: list[str]
    ) -> None:
        reason = why_not_captured(device, ONE, [optimizer], **facts)
        assert reason is not None
        for part in said:
            assert part in ": ".join(reason)

    def test_another_backend_than_nccl(self) -> None:
        reason = why_not_captured(CUDA, World(0, 2, CUDA, transport="gloo"), [sgd()])
        assert reason is not None
        assert "2 workers over 'gloo'" in reason[0]
        assert why_not_captured(CUDA, World(0, 2, CUDA, transport="nccl"), [sgd()]) is None

    def test_a_compiler_that_makes_graphs(self) -> None:
        with inductor_config.patch({"triton.cudagraphs": True}):
            reason = why_not_captured(CUDA, ONE, [sgd()], compiled=True)
            assert reason is not None
            assert "graphs of its own" in reason[0]
            assert why_not_captured(CUDA, ONE, [sgd()]) is None

    def test_the_trainer_refuses_before_it_cuts_the_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hybridpar.train.trainer.cut_model", lambda *_, **__: pytest.fail("cut"))
        with Lanes("cpu") as lanes, pytest.raises(UsageError, match="device 'cpu'"):
            Trainer(SmallNet(), config=replace(GRAPH, stages=2), world=World(), lanes=lanes, example=torch.zeros(1))

    def test_dropout_in_a_stage_is_found(self, cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[Any] = []
        monkeypatch.setattr("hybridpar.pipeline.cuda_graph.why_not_captured", lambda *_, **facts: given.append(facts))
        config = replace(GRAPH, stages=2)
        with (
            StreamLanes() as lanes,
            Trainer(
                SmallNet(dropout=0.5), config=config, world=World(), lanes=lanes, example=torch.zeros(4, 3, 8, 8)
            ) as trainer,
        ):
            stages = trainer.engine.pipeline.stages  # type: ignore[union-attr]
            owner = [number for number, stage in stages.items() if "dropout" in dict(stage.module.named_children())]
        assert given[-1]["random_stages"] == owner != []


# ------------------------------------------------------------------------------ copies


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts numbers that the host hands to torch as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.__name__.startswith("lift_fresh")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def copies() -> Iterator[Copies]:
    with Copies() as mode:
        yield mode


@pytest.mark.parametrize("stages", [1, 2])
def test_steady_steps_copy_nothing_to_the_device(cuda: StandInCuda, copies: Copies, stages: int) -> None:
    given = batches([SAMPLES] * 4)
    with Run(PLAIN, cuda, stages=stages) as run:
        for batch in given[:2]:
            run.step(batch)
        assert copies.count > 0
        copies.count = 0
        for batch in given[2:]:
            run.step(batch)
        assert copies.count == 0


def test_the_report_of_a_replica_copies_nothing_either(copies: Copies) -> None:
    known = Constants(torch.device("cpu"))
    for _ in range(2):
        forward_report(torch.ones(()), 4, constants=known)
    assert copies.count == 1  # what is known of the step before its passes
