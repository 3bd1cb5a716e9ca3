"""Compares what a run measured with what its plan predicted, and names the part of the step that differs most."""

from __future__ import annotations

from hybridpar.plan import Plan, StepFigures

#: Relative difference above which a prediction has failed.
APART = 0.15

#: Load of other programs, per core, above which the machine counts as busy.
BUSY = 0.5

#: Sizes, with the bytes that no prediction counts (messages by which workers agree on a step, with the sums of
#: BatchNorm; what a process grows by for other things than the model, such as code that is loaded when it first runs),
#: and the likely cause of a difference.
_SIZES = (
    ("bytes_sent_per_step", "a worker sent", 1 << 20, "gradients were not sent with the codec of the plan"),
    (
        *("memory_bytes", "a worker needed", 256 << 20),
        "steps keep more than parameters, gradients, optimizer state and activations, or the allocator has not given "
        "back what it freed",
    ),
)


def prediction_warnings(plan: Plan, ran: StepFigures, load: float = 0.0) -> list[str]:
    """What missed its prediction by more than `APART`, each with the likely cause; empty where nothing did."""
    predicted, differences = plan.predicted, []
    if predicted is not None and predicted.step_ms and ran.step_ms is not None:
        missed = ran.step_ms / predicted.step_ms - 1
        if abs(missed) > APART:
            differences.append(
                f"a step took {ran.step_ms:,.1f} ms, {100 * missed:+.0f} % off the {predicted.step_ms:,.1f} ms that "
                f"were predicted: {_cause(predicted, ran, load)}"
            )
    for name, what, uncounted, cause in _SIZES:
        wanted, measured = getattr(predicted, name, None), getattr(ran, name)
        if not wanted or measured is None:
            continue
        if abs(measured - wanted) < uncounted or (name == "memory_bytes" and measured < wanted):
            continue  # nor is it a failure where less was needed than was feared
        missed = measured / wanted - 1
        if abs(missed) > APART:
            differences.append(
                f"{what} {measured / 1e6:,.1f} MB, {100 * missed:+.0f} % off the {wanted / 1e6:,.1f} MB that were "
                f"predicted: {cause}"
            )
    return differences


def _cause(predicted: StepFigures, ran: StepFigures, load: float) -> str:
    more_sync = (ran.exposed_sync_ms or 0.0) - (predicted.exposed_sync_ms or 0.0)
    more_computing = (ran.step_ms or 0.0) - (predicted.step_ms or 0.0) - more_sync
    if abs(more_sync) > abs(more_computing):
        exposed = f"the exchange of gradients was exposed for {more_sync:+,.1f} ms"
        return f"{exposed}, so the link is not as it was when this was predicted"
    busy = f" (other programs: load {load:.1f} per core)" if load > BUSY else ""
    return (
        f"all but the exposed exchange differs by {more_computing:+,.1f} ms, so the machine was busier, or more "
        f"throttled, {'when it was profiled' if more_computing < 0 else 'now'}{busy}"
    )
