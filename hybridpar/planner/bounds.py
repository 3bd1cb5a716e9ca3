"""A lower bound of the step time of a candidate plan, by which a search leaves out candidates without simulating them.

`lower_bound_ms` never exceeds what the simulator says of any schedule of a candidate (it is admissible), so a candidate
whose bound is above what is already reached may be left out, and the search still answers what exhaustive enumeration
answers. Tests compare both.
"""

from __future__ import annotations

from hybridpar.schedule.actions import Edge, Kind, Layout
from hybridpar.schedule.costs import Costs


def lower_bound_ms(layout: Layout, costs: Costs, micro_batches: int) -> float:
    """Time that no schedule of these stages beats.

    The largest of the following, each of which every simulated step takes at least; sharing cores or links, and waiting
    in queues, only adds to the durations used here.

    1. *Lanes.* A lane runs M forward and M backward passes of each of its stages, one at a time. Before the first of
       them, some micro-batch has gone forward through all stages before one of the lane's (`head`, the longest path of
       passes and transfers). The last thing that a lane runs is a backward pass, and afterwards that micro-batch's
       gradient goes back through the stages before (`tail`). So: least head + M (F + B) + least tail.
    2. *One micro-batch.* It goes forward to the last stage and back to the first: the longest path through it. That is
       (head + F + B + tail) of each stage, as a stage's backward pass follows its forward pass.
    3. *Links.* The first bucket of a stage is ready no earlier than after M forward passes, M - 1 backward passes and
       its part of the last one, and the head. From the earliest of these on, all buckets of a worker pass over its
       link, which carries no more than one at its full speed.
    4. *Cores.* All core time of a worker, divided by its cores.

    Where a step commits as a whole, the agreement and the shortest optimizer step come after everything of 1 to 3.

    Args:
        layout: Where stages run, and what flows.
        costs: What actions take.
        micro_batches: M.

    Returns:
        Milliseconds.
    """
    stages = range(layout.stages)
    forward = [costs.compute_ms(stage, Kind.FORWARD) for stage in stages]
    backward = [costs.compute_ms(stage, Kind.BACKWARD) for stage in stages]
    head, tail = _paths(layout, costs, forward, backward)
    longest = 0.0
    for lane in range(layout.lanes):
        own = layout.stages_on(lane)
        work = micro_batches * sum(forward[stage] + backward[stage] for stage in own)
        longest = max(longest, min(head[stage] for stage in own) + work + min(tail[stage] for stage in own))
    longest = max(longest, *(head[stage] + forward[stage] + backward[stage] + tail[stage] for stage in stages))
    if costs.replicas > 1:
        longest = max(longest, _links(layout, costs, micro_batches, forward, backward, head))
    if costs.commit:
        updates = [costs.compute_ms(stage, Kind.STEP) for stage in stages]
        longest += costs.control_ms + min(updates)
    return max(longest, _cores(layout, costs, micro_batches, forward, backward))


def _paths(
    layout: Layout, costs: Costs, forward: list[float], backward: list[float]
) -> tuple[list[float], list[float]]:
    """For every stage the time before its first forward pass, and the time after its last backward pass."""
    head, tail = [0.0] * layout.stages, [0.0] * layout.stages
    for stage in range(layout.stages):
        for edge in layout.into(stage):
            arrival = head[edge.source] + forward[edge.source] + _transfer(layout, costs, edge, edge.bytes)
            head[stage] = max(head[stage], arrival)
            if edge.gradient_bytes > 0:
                rest = _transfer(layout, costs, edge, edge.gradient_bytes, back=True) + backward[edge.source]
                tail[stage] = max(tail[stage], rest + tail[edge.source])
    return head, tail


def _transfer(layout: Layout, costs: Costs, edge: Edge, size: int, back: bool = False) -> float:
    if not layout.crosses(edge):
        return 0.0
    pair = (layout.home(edge.source), layout.home(edge.target))
    link = costs.links.get(pair[::-1] if back else pair, costs.link)
    return link.latency_ms + link.wire_ms(size)


def _links(
    layout: Layout, costs: Costs, count: int, forward: list[float], backward: list[float], head: list[float]
) -> float:
    """When the last bucket of any worker is through, at the earliest."""
    last = 0.0
    for worker in range(layout.workers):
        begin, wire = float("inf"), 0.0
        for stage in range(layout.stages):
            buckets = costs.buckets[stage] if stage < len(costs.buckets) else ()
            if layout.home(stage) != worker or not buckets:
                continue
            ready = min(one.ready for one in buckets)
            passes = count * forward[stage] + (count - 1) * backward[stage]
            begin = min(begin, head[stage] + passes + ready * backward[stage])
            wire += sum(one.link_part * (one.wire_ms or 0.0) for one in buckets)
        if wire > 0 and costs.sync_shares_link:
            last = max(last, begin + wire)
    return last


def _cores(layout: Layout, costs: Costs, count: int, forward: list[float], backward: list[float]) -> float:
    if costs.cores is None:
        return 0.0
    needed = [0.0] * layout.workers
    for stage in range(layout.stages):
        home = layout.home(stage)
        computing = count * (forward[stage] + backward[stage]) + costs.compute_ms(stage, Kind.STEP)
        needed[home] += costs.compute_cores * computing
        if costs.replicas > 1 and stage < len(costs.buckets):
            for one in costs.buckets[stage]:
                needed[home] += one.encode_ms + one.decode_ms + costs.sync_core_ms(one)
    return max(needed) / costs.cores
