"""Lower bounds of a step that need no simulation.

work              every operator at the slice where a sample takes least, over all devices
largest operator  the same for one operator alone, on as many devices as there are slices
longest path      the quickest slice, as a rule the smallest, through the model and back
busiest link      messages and all-reduces of this plan that go through one port
all-reduce        the longest all-reduce of this plan; and the all-reduce of the whole model over
                  all devices, as in data parallelism
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from anabranch.cost.overheads import computed_at_once
from anabranch.plans.plan import memory_text, ranges
from anabranch.plans.stages import StageGraph
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.messages import port_seconds
from anabranch.solve.bound import least_s_per_sample, longest_way_s, work_floor


@dataclass(frozen=True, slots=True)
class Floor:
    """A lower bound of the seconds of a step.

    Attributes:
        kind: ``work``, ``largest_operator``, ``longest_path``, ``busiest_link``, ``all_reduce`` or
            ``data_parallel_all_reduce``.
        what: name of the operator, link or gradients.
        any_plan: True if it holds for every plan of this batch, False if only for this one.
    """

    kind: str
    seconds: float
    what: str
    any_plan: bool


def floors(graph: StageGraph, costs: ModelCosts) -> Iterator[Floor]:
    """Generate the floors of any plan, then those of this one."""
    cost, batch_size = costs.cost, graph.batch_size
    total, per_sample = cost.cluster.num_devices, least_s_per_sample(cost, batch_size)
    at_once = computed_at_once(cost.cluster)
    where = f"over {total} devices"
    if at_once < total:
        where += f", worth {at_once:.3g} cores"
    yield Floor("work", work_floor(cost, batch_size), where, True)
    smallest = 1 if cost.profile.proportional else cost.profile.samples[0]
    parts = min(total, max(batch_size // smallest, 1))
    largest = int(per_sample.argmax())
    where = f"{cost.graph.ops[largest].name}, over {parts}"
    yield Floor("largest_operator", float(per_sample[largest]) * batch_size / parts, where, True)
    slices = "1 sample" if smallest == 1 else f"{smallest} samples"
    yield Floor("longest_path", longest_way_s(cost, batch_size), f"of {slices}", True)
    yield _busiest_link(graph, costs)
    yield from _all_reduces(costs)


def _busiest_link(graph: StageGraph, costs: ModelCosts) -> Floor:
    """Return the seconds of all transfers through the port that is busy longest."""
    carried = port_seconds(costs, graph)
    if not carried:
        return Floor("busiest_link", 0.0, "nothing is sent", False)
    busiest = max(carried, key=lambda port: carried[port])
    direction, level, card = costs.cost.cluster.port(busiest)
    cards = costs.cost.cluster.cards[level]
    way = "out of" if direction == "out" else "into"
    if cards > 1:
        way += f" card {card % cards} of"
    where = {0: "device", 1: "node"}.get(level, f"group of level {level - 1}")
    return Floor("busiest_link", carried[busiest], f"{way} {where} {card // cards}", False)


def _all_reduces(costs: ModelCosts) -> Iterator[Floor]:
    """Generate the longest all-reduce, and that of data parallelism if it is another one."""
    cost, nbytes = costs.cost, Counter[tuple[int, ...]]()
    seconds: dict[tuple[int, ...], float] = defaultdict(float)
    for work in costs.all_reduces():
        seconds[work.devices] += work.seconds
        nbytes[work.devices] += work.nbytes
    if seconds:
        longest = max(seconds, key=lambda devices: seconds[devices])
        what = f"{memory_text(nbytes[longest])} over devices {ranges(longest)}"
        yield Floor("all_reduce", seconds[longest], what, False)
    everywhere = tuple(range(cost.cluster.num_devices))
    summed = cost.stage_parameter_bytes(range(len(cost.graph))).summed
    if len(everywhere) > 1 and summed and everywhere not in seconds:
        what = f"{memory_text(summed)} over all devices"
        whole_s = cost.all_reduce_s(summed, everywhere)
        yield Floor("data_parallel_all_reduce", whole_s, what, False)
