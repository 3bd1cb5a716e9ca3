"""What users of other libraries for gradient compression ran into, one test for each, against all of our codecs.

The names in brackets are public: issues and pull requests of the projects, or files in which the fault can be read.
"""

from __future__ import annotations

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.compress import CODECS, ErrorFeedback, parse_codec, run_together
from hybridpar.compress.codec import Scratch
from hybridpar.compress.ddp import ddp_hook
from hybridpar.compress.packing import Fields
from tests.compress.team import Team, equal, same_bits
from tests.compress.test_ddp import batch as ddp_batch
from tests.compress.test_ddp import net, weights
from tests.ranks import run_ranks
from tests.sync.test_compression import Net, batch

NAMES = list(CODECS)
SHAPES = {"matrix": (40, 33), "conv": (12, 10, 3, 3), "few": (3, 70), "bias": (7,)}


def by_size(name: str) -> str:
    """The codec without its least size, where it has one, so that it compresses what is small, too."""
    return f"{name}:least=32" if hasattr(CODECS.get(name), "least") else name


@pytest.fixture(params=NAMES)
def text(request: pytest.FixtureRequest) -> str:
    return by_size(str(request.param))


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_parameters_are_equal_on_all_replicas_after_every_step(text: str, workers: int) -> None:
    """Replicas that begin equal stay so [a sparsifier that leaves the local gradient where nothing came]."""
    team = Team(text, SHAPES, workers)
    replicas = [
        {name: torch.zeros(torch.Size(shape).numel()) for name, shape in SHAPES.items()} for _ in range(workers)
    ]
    for seed in range(5):
        for replica, outs in zip(replicas, team.meet(team.gradients(seed)), strict=True):
            for parameter, out in zip(replica.values(), outs, strict=True):
                parameter.sub_(out, alpha=0.1)
        team.commit()
        for replica in replicas[1:]:
            assert all(same_bits(replica[name], replicas[0][name]) for name in SHAPES)


def test_a_skipped_step_leaves_all_state_bit_for_bit(text: str) -> None:
    team = Team(text, SHAPES, 2)
    for seed in range(3):
        team.step(team.gradients(seed))
    before = team.snapshot()
    gradients = team.gradients(3)
    gradients[1][1][5] = torch.inf
    team.meet(gradients)
    team.rollback()
    assert equal(before, team.snapshot())


@pytest.mark.parametrize(("name", "bits"), [("onebit", 1), ("twobit", 2)])
def test_bits_are_packed(name: str, bits: int) -> None:
    """[grace: onebit sends a byte per element] [horovod#2675]."""
    coder = Team(name, {"w": (64, 1024)}, 2).coders("w")[0]
    assert sum(entry.bytes for entry in coder.rounds) <= 64 * 1024 * bits // 8 + 64 * 16


def test_signs_come_back_as_they_went() -> None:
    """[grace: onebit inverts a mask of bytes bitwise] Two values are what a bit says exactly, whatever their number."""
    signs = torch.where(torch.rand(64 * 100, generator=torch.Generator().manual_seed(0)) < 0.1, 1.5, -0.25)
    (out,) = Team("onebit", {"w": (64, 100)}, 2).step([[signs], [signs]])
    torch.testing.assert_close(out, signs)


def test_generators_of_the_process_are_left_alone(text: str) -> None:
    """[grace: randomk seeds the global generator at every call, and with it dropout and augmentation]."""
    team = Team(text, SHAPES, 2)
    gradients = [team.gradients(seed) for seed in range(3)]
    torch.manual_seed(7)
    states = (torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=True)[1].copy())
    for own in gradients:
        team.step(own)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy.array_equal(numpy.random.get_state(legacy=True)[1], states[2])


def test_what_is_drawn_does_not_depend_on_the_generators_of_the_process(text: str) -> None:
    """The same job gives the same bits, whatever else was drawn meanwhile."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        team = Team(text, SHAPES, 2, seed=5)
        results.append([team.step(team.gradients(step)) for step in range(2)])
    for one, other in zip(*results, strict=True):
        assert all(map(same_bits, one, other))


def test_workers_round_on_their_own() -> None:
    """Rounding that is alike on all workers loses the gain of averaging [byteps#395 shares seeds for indices alone]."""
    team = Team("qsgd_mn:bits=2,least=1", {"w": (400, 100)}, 4)
    gradient = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    (out,) = team.step([[gradient]] * 4)
    alone = Team("qsgd_mn:bits=2,least=1", {"w": (400, 100)}, 1)
    (single,) = alone.step([[gradient]])
    assert float((out - gradient).var()) < 0.4 * float((single - gradient).var())


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_messages_are_of_one_size_whatever_the_gradient(text: str, value: float) -> None:
    """[grace#16: a threshold codec hangs on gloo where a worker has nothing to send]."""
    team = Team(text, SHAPES, 3)
    sizes = [exchange.traffic for exchange in team.exchanges]
    nothing = [[torch.zeros(torch.Size(shape).numel()) for shape in SHAPES.values()] for _ in range(2)]
    outs = team.step([*nothing, [torch.full_like(one, value) for one in nothing[0]]])
    assert [exchange.traffic for exchange in team.exchanges] == sizes
    assert all(bool(out.isfinite().all()) for out in outs)


def idle_with_all(world: World, codecs: tuple[str, ...]) -> list[tuple[Tensor, Tensor]]:
    """`idle` with one codec after the other."""
    return [idle(world, codec) for codec in codecs]


def idle(world: World, codec: str) -> tuple[Tensor, Tensor]:
    """Worker 0 has no gradient but zeros for two steps."""
    model = net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    state, hook = ddp_hook(codec, model)
    ddp.register_comm_hook(state, hook)
    with state:
        for step in range(2):
            images, labels = ddp_batch(world.rank, step)
            (F.cross_entropy(ddp(images), labels) * float(world.rank)).backward()
        grads = torch.cat([one.grad.flatten() for one in model.parameters()])  # type: ignore[union-attr]
    return weights(model), grads


def test_a_worker_that_has_nothing_to_send_does_not_stop_the_others() -> None:
    codecs = ("onebit", "twobit:least=10", "hylo:least=100", "qsgd_mn:least=10")
    for codec, (_, one), (_, other) in zip(codecs, *run_ranks(idle_with_all, 2, codecs), strict=True):
        assert torch.equal(one, other), codec
        assert bool(one.any()), codec


def test_tensors_are_made_on_the_device_of_the_gradient(text: str) -> None:
    """[grace#16: the wrong GPU] Another default device must make no difference; on `meta` nothing can be computed."""
    other = Team(text, SHAPES, 2)
    gradients = other.gradients(0)
    outs = [[torch.empty_like(one) for one in own] for own in gradients]
    torch.set_default_device("meta")
    try:
        team = Team(text, SHAPES, 2)
        run_together(team.exchanges, gradients, outs)
    finally:
        torch.set_default_device(None)
    assert all(map(same_bits, outs[0], other.step(gradients)))


def test_a_warm_up_is_a_setting_and_its_place_is_saved() -> None:
    """[grace#15: the loop has to poke an attribute]."""
    team = Team("onebit:warmup=3", SHAPES, 2)
    full = Team("none", SHAPES, 2).exchanges[0].traffic
    for seed in range(2):
        assert team.exchanges[0].traffic == full
        team.step(team.gradients(seed))
    resumed = Team("onebit:warmup=3", SHAPES, 2)
    resumed.restore(team.state())
    assert resumed.exchanges[0].traffic == full
    resumed.step(resumed.gradients(2))
    assert resumed.exchanges[0].traffic.payload < full.payload


@pytest.mark.parametrize("text", ["powersgd:cast=bf16,gain=0,decay=0.9", "hylo:cast=fp16,least=100"])
def test_casts_and_codecs_go_together(text: str) -> None:
    """[pytorch#52986, PR 53325]."""
    plain = text.replace("cast=bf16,", "").replace("cast=fp16,", "")
    short, full = Team(text, SHAPES, 2), Team(plain, SHAPES, 2)
    gradients = short.gradients(0)
    assert short.exchanges[0].traffic.payload < full.exchanges[0].traffic.payload
    for one, other in zip(short.step(gradients), full.step(gradients), strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)


def amp(world: World, codec: str, kind: str) -> tuple[list[bool], Tensor, bool]:
    """Steps of a loss scaler, one of which overflows on worker 1: which counted, the weights, residuals finite."""
    model = net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    state, hook = ddp_hook(codec, model)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind == "fp16")
    counted = []
    with state:
        for step in range(4):
            optimizer.zero_grad()
            images, labels = ddp_batch(world.rank, step)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "bf16"):
                loss = F.cross_entropy(ddp(images), labels)
            bad = float("inf") if step == 2 and world.rank == 1 else 1.0
            scaler.scale(loss * bad).backward()
            before = weights(model)
            if kind == "fp16":
                scaler.step(optimizer)
                scaler.update()
            elif all(bool(one.grad.isfinite().all()) for one in model.parameters()):  # type: ignore[union-attr]
                optimizer.step()
            counted.append(not torch.equal(before, weights(model)))
        kept = state.state_dict()["parameters"].values()
        finite = all(bool(one.isfinite().all()) for entry in kept for one in entry.get("residuals", {}).values())
        return counted, weights(model), finite


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_an_overflow_under_mixed_precision_poisons_nothing(kind: str) -> None:
    """[pytorch PR 55031: PowerSGD gives NaN with AMP]."""
    for codec in ("powersgd:gain=0", "onebit"):
        (counted, one, finite), (same, other, also) = run_ranks(amp, 2, codec, kind)
        assert counted == same == [True, True, False, True]
        assert finite
        assert also
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())


def test_sums_of_codes_do_not_wrap() -> None:
    """[codes of 8 bits added without headroom: 63 levels are enough for two workers and no more]."""
    scratch = Scratch(torch.device("cpu"))
    for workers in (2, 3, 4, 17):
        for bits in (1, 4, 8):
            steps = 2 * (2**bits - 1)
            fields = Fields.summable(100, steps, workers)
            words = torch.zeros(fields.words, dtype=fields.word)
            team = [torch.zeros_like(words) for _ in range(workers)]
            for own in team:
                fields.pack(own, lambda start, stop, into, top=steps: into.fill_(top), scratch)
            total = torch.stack(team).sum(0, dtype=fields.word)
            sums = torch.zeros(100)
            fields.unpack(total, lambda start, stop, values, out=sums: out[start:stop].copy_(values), scratch)
            assert bool((sums == steps * workers).all())


def test_memory_is_in_units_of_the_gradient(text: str) -> None:
    """[a memory of g minus the code instead of g minus what it decodes to]: scaled gradients, scaled residuals."""
    if not isinstance(parse_codec(text), ErrorFeedback):
        pytest.skip("it keeps nothing")
    one, other = Team(text, SHAPES, 2), Team(text, SHAPES, 2)
    for seed in range(2):
        one.step(one.gradients(seed))
        other.step(other.gradients(seed, 1024.0))
    for name in SHAPES:
        torch.testing.assert_close(1024 * one.unsent(name), other.unsent(name), rtol=1e-4, atol=1e-2)


def test_vectors_are_divided_once(text: str) -> None:
    """[PowerSGD of small tensors divided by K twice, and added to what an old buffer held]."""
    if getattr(CODECS.get(text.partition(":")[0]), "refuses_momentum", False):
        pytest.skip("it adds up what vectors were")
    team = Team(text, SHAPES, 3)
    for seed in range(3):
        gradients = team.gradients(seed)
        out = team.step(gradients)[list(SHAPES).index("bias")]
        mean = torch.stack([own[list(SHAPES).index("bias")] for own in gradients]).mean(0)
        torch.testing.assert_close(
            out, mean, rtol=1e-2 if text in ("fp16", "bf16") else 1e-6, atol=1e-2 if text in ("fp16", "bf16") else 1e-6
        )


# --------------------------------------------------------------------------------------------- odd input, in training


class WithNothing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


def nothing(world: World) -> Tensor:
    torch.manual_seed(0)
    model = WithNothing()
    with Trainer(model, config=TrainConfig(compress="onebit", lr=0.05, bucket_mb=0.02), world=world) as trainer:
        for step in range(2):
            trainer.step(batch(world.rank, step))
        assert trainer.optimizer.state[trainer.model.nothing]["momentum_buffer"].shape == (0, 5)
        return weights(trainer.model)


def test_a_parameter_of_no_elements_trains() -> None:
    one, other = run_ranks(nothing, 2, shared_memory=False)
    assert torch.equal(one, other)


def unlike(world: World) -> str:
    torch.manual_seed(0)
    config = TrainConfig(compress=["onebit", "twobit"][world.rank], lr=0.05)
    with pytest.raises(Exception, match="other") as caught, Trainer(Net(), config=config, world=world):
        pass
    return str(caught.value)


def test_workers_with_different_codecs_find_out_at_the_start() -> None:
    for said in run_ranks(unlike, 2, shared_memory=False):
        assert "onebit" in said
        assert "twobit" in said
