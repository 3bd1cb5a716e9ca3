"""Small inputs of the planner's search, whose whole search space can be enumerated."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from hybridpar.machine.cluster_file import ClusterSpec, parse_cluster
from hybridpar.partition.graph import Saved, Unit, UnitGraph, Value
from hybridpar.plan import ModelInfo
from hybridpar.planner.codecs import FIDELITIES
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.profile import ModelProfile, Parameter, SizedTimes
from hybridpar.planner.rates import CodecRate

#: A core that reads or writes a million elements of any codec in a millisecond.
ALL_RATES = {text: CodecRate(((1 << 20, 1.0, 1.0),)) for text in FIDELITIES["lossy"]}
#: Few, so that spaces stay small enough to enumerate.
RATES = {text: ALL_RATES[text] for text in ("fp16", "bf16", "onebit:decay=0.5")}


def chain(
    times: list[tuple[float, float]],
    parameters: list[tuple[int, ...]],
    activation: int = 100_000,
    *,
    samples: int = 4,
    noise: float = 0.0,
    batch_norm: bool = False,
    sizes: tuple[SizedTimes, ...] | None = None,
) -> ModelProfile:
    """A model of units one after the other, each with one parameter and one activation that it hands on and keeps.

    Args:
        times: Forward and backward milliseconds of a micro-batch, per unit.
        parameters: Shape of the parameter of each unit.
        activation: Bytes between units, for a micro-batch.
        samples: Samples of it.
        noise: Of the times.
        batch_norm: As for `ModelProfile`.
        sizes: Times at several sizes, instead of these.
    """
    last = len(times) - 1
    held = tuple(Parameter(f"u{unit}.weight", shape, unit) for unit, shape in enumerate(parameters))
    units = tuple(Unit(f"u{unit}", parameter_bytes=4 * one.count) for unit, one in enumerate(held))
    values = tuple(
        Value(f"v{unit}", unit, (unit + 1,) if unit < last else (), activation, activation, unit == last)
        for unit in range(len(times))
    )
    saved = tuple(Saved(activation, (unit,)) for unit in range(len(times)))
    alone = SizedTimes(samples, tuple(one for one, _ in times), tuple(one for _, one in times))
    return ModelProfile(
        ModelInfo(name="chain", fingerprint="0" * 16, parameters=sum(one.count for one in held)),
        UnitGraph(units, values, saved),
        samples,
        held,
        sizes or (alone,),
        noise,
        batch_norm,
    )


def cluster(workers: int = 2, bandwidth: float = 1.25e8, **host: Any) -> ClusterSpec:
    """Workers on hosts of their own."""
    return parse_cluster(
        {
            "hosts": [{"count": workers, **host}],
            "between": {"bandwidth": bandwidth, "latency_ms": 0.1} if workers > 1 else None,
        }
    )


def inputs(profile: ModelProfile | None = None, spec: ClusterSpec | None = None, **options: Any) -> PlannerInputs:
    """A search on a small chain and two workers."""
    profile = profile or chain([(1, 2), (2, 4), (2, 4), (1, 2)], [(64, 64), (256, 256), (512, 512), (1024, 512)])
    options = {"batch": 8, "rates": RATES, "most_stages": 3, "most_micro_batches": 4, **options}
    return PlannerInputs(profile, spec or cluster(), **options)


@st.composite
def random_inputs(draw: st.DrawFn, most_workers: int = 4) -> PlannerInputs:
    """A search with a random chain, cluster, batch and fidelity."""
    units = draw(st.integers(2, 4))
    number = st.integers(1, 20).map(float)
    side = st.sampled_from([8, 64, 512])
    profile = chain(
        [(draw(number), draw(number)) for _ in range(units)],
        [(draw(side), draw(side)) for _ in range(units)],
        draw(st.sampled_from([1_000, 100_000, 4_000_000])),
        noise=draw(st.sampled_from([0.0, 0.02, 0.3])),
        batch_norm=draw(st.booleans()),
    )
    devices, hosts = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 3)]))
    link = {"bandwidth": draw(st.sampled_from([1e7, 1.25e8, 1e10])), "latency_ms": draw(st.sampled_from([0.0, 0.5]))}
    spec = parse_cluster(
        {
            "hosts": [
                {
                    "count": hosts,
                    "devices": devices,
                    "memory_bandwidth": draw(st.sampled_from([None, 1e10])),
                    "kind": draw(st.sampled_from(["cpu", "cuda"])),
                }
            ],
            "inside": {"bandwidth": 4 * link["bandwidth"], "latency_ms": 0.01},
            "between": link,
        }
    )
    return inputs(
        profile,
        spec,
        batch=draw(st.sampled_from([4, 8, 12])),
        fidelity=draw(st.sampled_from(["exact", "close", "lossy"])),
        sync_lanes=draw(st.integers(1, 2)),
        bucket_bytes=draw(st.sampled_from([1, 200_000, 8 << 20])),
        most_micro_batches=draw(st.sampled_from([2, 4])),
    )
