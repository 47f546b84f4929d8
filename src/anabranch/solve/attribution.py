"""Why a plan's step takes as long as it does: what no plan can beat, what this one loses to which
cause, and the one change that would help most.

The losses are those of the device that computes most. What its time goes to adds up to the step::

    its compute   = work            of all devices, spread evenly, each operator at its best slice
                  + small slices    what slices of fewer samples, or bookkeeping, cost more
                  + recompute
                  + idle devices    that the plan leaves out
                  + imbalance       what it computes more than the mean device
                  + sharing         of a host's processors with other ranks
    its waiting   = by cause: from when a device waits, the critical path is followed back until
                    the device was busy (``simulator.critical_path``)

Other stages' compute on these ways back is warm-up before the device's first backward, drain after
its last forward, and waiting for other stages in between. The rest are messages of one stage edge,
their waiting for ports, all-reduces that outlast the last backward, agreement, update, and waiting
for updates of other stages that take longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from anabranch.cluster import Cluster
from anabranch.cost import CostModel
from anabranch.plans.plan import Plan
from anabranch.plans.prices import prices_of
from anabranch.plans.stages import StageGraph
from anabranch.profile.profile import Profile
from anabranch.schedule import compute_order
from anabranch.schedule.schedule import Action
from anabranch.simulator.costs import ModelCosts
from anabranch.simulator.critical_path import Cause, History, Ran, Segment
from anabranch.simulator.events import Role
from anabranch.simulator.run import collector_paused
from anabranch.simulator.run import simulate as simulate_step
from anabranch.simulator.sums import summing_s
from anabranch.solve.explanation import Explanation, Loss
from anabranch.solve.floors import busiest_link, floors, sum_floors, work_floor
from anabranch.solve.relaxations import relaxations
from anabranch.solve.simulation import scheduled


def explain(
    plan_: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str | None = None,
    optimizer_factor: float = 2.0,
) -> Explanation:
    """Say what the step of a plan is spent on, and what would shorten it.

    Args:
        plan_: any synchronous plan for the profile's model.
        profile: seconds and bytes of the model's operators.
        cluster: where it shall run.
        schedule: another schedule than the plan's, as for ``simulate``.
        optimizer_factor: optimizer state in bytes per byte of trainable parameter.

    Raises:
        InvalidPlanError: if the plan does not suit model and cluster.
        ValueError: for an asynchronous plan, which has no step.
    """
    if plan_.mode == "async":
        raise ValueError(
            "only the step of a synchronous plan can be explained; without a flush, the slowest "
            "stage decides the time from one mini-batch to the next"
        )
    cost = prices_of(plan_, profile, cluster, optimizer_factor=optimizer_factor)
    graph, name = scheduled(plan_, cost, schedule)
    costs = ModelCosts(graph, cost)
    with collector_paused():
        order = compute_order(graph, name, slots=cost.receive_slots)
        step = simulate_step(graph, order, costs)
        history = History(step)
        computed = [_actions(ran) for ran in history.ran]
        device_seconds = {
            device: sum(ran.unit.seconds for ran in computed[d])
            for d, device in enumerate(step.program.devices)
        }
        d = _busiest(history, device_seconds)
        device = step.program.devices[d]
        losses = [
            *_work(graph, costs, device_seconds, device),
            Loss(
                "sharing",
                sum(ran.end - ran.start - ran.unit.seconds for ran in computed[d]),
            ),
            *_waits(history, d, order.actions[device]),
        ]
        return Explanation(
            plan_,
            graph,
            step.end,
            device,
            (*floors(graph, cost), busiest_link(step, cluster), *sum_floors(step, cost)),
            tuple(_gathered(losses)),
            tuple(relaxations(graph, name, cost, step, device_seconds)),
            _too_few_samples(graph, costs),
        )


def _actions(units: Iterable[Ran]) -> list[Ran]:
    return [ran for ran in units if ran.unit.role is Role.ACTION]


def _busiest(history: History, device_seconds: Mapping[int, float]) -> int:
    """The place of the device that computes most; of equals, the one that is most in the way."""
    on_path: dict[int, float] = defaultdict(float)
    for segment in history.path():
        on_path[segment.device] += segment.end - segment.start
    most = max(device_seconds.values()) * (1 - 1e-9)
    _, d = max(
        (on_path[device], -d)
        for d, (device, seconds) in enumerate(device_seconds.items())
        if seconds >= most
    )
    return -d


def _work(
    graph: StageGraph, costs: ModelCosts, device_seconds: Mapping[int, float], device: int
) -> Iterator[Loss]:
    """What the busiest device computes, by the reason why it is more than an even share."""
    cost = costs.cost
    whole, total = sum(device_seconds.values()), cost.cluster.num_devices
    again = _recomputed_s(graph, cost)
    summing = sum(s * len(graph.stages[at].devices) for at, s in summing_s(costs).items())
    besides = sum(
        2 * cost.calibration.pass_s
        for s, stage in enumerate(graph.stages)
        for i in range(graph.num_microbatches(s))
        for replica in range(stage.replicas)
        if len(range(*graph.slice(s, i, replica)))
    )
    least = work_floor(cost, graph.batch_size)
    mean = whole / len(device_seconds)
    yield Loss("work", least)
    yield Loss("recompute", again / total)
    yield Loss("summing", summing / total)
    yield Loss(Cause.OVERHEAD.value, besides / total)
    yield Loss("small_slices", (whole - again - summing - besides) / total - least)
    yield Loss("idle_devices", mean - whole / total)
    yield Loss("imbalance", max(0.0, device_seconds[device] - mean))  # -1e-17 of even shares


def _recomputed_s(graph: StageGraph, cost: CostModel) -> float:
    """Seconds of forwards that are run again, on all devices together."""
    seconds = 0.0
    for s, stage in enumerate(graph.stages):
        if stage.recompute:
            mask = cost.graph.mask(stage.operators)
            for i in range(graph.num_microbatches(s)):
                for replica in range(stage.replicas):
                    start, stop = graph.slice(s, i, replica)
                    seconds += cost.stage_s(mask, stop - start)[0]
    return seconds


def _too_few_samples(graph: StageGraph, costs: ModelCosts) -> int:
    stage, cost = graph.stages[0], costs.cost
    if len(graph) > 1 or stage.replicas == 1:
        return 0
    sum_s = max((work.seconds for work in costs.all_reduces()), default=0.0)
    most = max(graph.slice_sizes(0)).bit_length()
    slices = (2**n for n in reversed(range(most)))
    return next((n for n in slices if cost.covers(n) and costs.compute_s(0, n)[1] < sum_s), 0)


def _waits(history: History, d: int, actions: Sequence[Action]) -> Iterator[Loss]:
    """What a device waits for, by the ways back from where it waits to where it was busy."""
    units = history.ran[d]
    own = [k for k, ran in enumerate(units) if ran.unit.role in (Role.ACTION, Role.OVERHEAD)]
    computes = [units[k] for k in own if units[k].unit.role is Role.ACTION]
    kinds = [action.kind for action in actions if action.kind.is_compute]
    ran = list(zip(computes, kinds, strict=True))
    first_backward = next((r.start for r, kind in ran if not kind.is_forward), 0.0)
    last_forward = max((r.end for r, kind in ran if kind.is_forward), default=0.0)

    updates = [r for r in units if r.cause is Cause.UPDATE]

    def losses(segments: Iterable[Segment]) -> Iterator[Loss]:
        for segment in segments:
            cause: str = segment.cause.value
            if segment.cause is Cause.UPDATE:
                # Meanwhile it updates its own stages, if that does not take as long.
                left = segment.end - segment.start
                for r in updates:
                    meanwhile = max(0.0, min(segment.end, r.end) - max(segment.start, r.start))
                    left -= meanwhile
                    yield Loss(cause, meanwhile, r.stages)
                yield Loss("other_updates", left, segment.stages)
                continue
            if segment.cause is Cause.COMPUTE:
                if segment.end <= first_backward:
                    cause = "warm_up"
                elif segment.start >= last_forward:
                    cause = "drain"
                else:
                    cause = "other_stages"
            yield Loss(cause, segment.end - segment.start, segment.stages)

    for k in own:
        if units[k].unit.role is Role.OVERHEAD:
            yield Loss(Cause.OVERHEAD.value, units[k].end - units[k].start)
    if own:
        yield from losses(history.back_from(d, own[0], 0.0))
    for before, k in pairwise(own):
        if units[k].start > units[before].end:
            yield from losses(history.back_from(d, k, units[before].end))
    yield from losses(history.back_from_end(units[own[-1]].end if own else 0.0))


def _gathered(losses: Iterable[Loss]) -> list[Loss]:
    """One part for each cause and its stages, the largest of each cause first."""
    seconds: dict[tuple[str, tuple[int, ...]], float] = {}
    for loss in losses:
        key = loss.cause, loss.stages
        seconds[key] = seconds.get(key, 0.0) + loss.seconds
    found = [Loss(cause, s, stages) for (cause, stages), s in seconds.items() if s]
    order = list(dict.fromkeys(loss.cause for loss in found))
    return sorted(found, key=lambda loss: (order.index(loss.cause), -loss.seconds))
