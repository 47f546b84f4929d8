"""Check of schedules: order, messages, number in flight, no deadlock.

The check assumes this transport:

- a channel is one direction of one stage edge between two devices; its messages arrive in the order
  they were sent;
- a device waits only for receives; sends are asynchronous;
- receives are posted ahead, for the next micro-batch of the receiver, and a message moves once it
  has been sent and its receive is posted;
- a device with several stages passes values and gradients between them in memory, so its list has
  to compute them before it uses them;
- the replicas of a stage sum gradients before an update, so they start it together.

Every message that was sent arrives, so a deadlock is a cycle of devices that wait for each other.
Running the lists once, without a clock, finds it: they stop at the same actions whichever device
runs first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from anabranch.errors import DeadlockError, InvalidScheduleError
from anabranch.plans.edges import EVERY_EDGE, MessageEdges
from anabranch.plans.in_flight import waited_for_samples
from anabranch.plans.stages import StageGraph
from anabranch.schedule.lower import compute_of, lower, needs
from anabranch.schedule.schedule import Action, Kind, Schedule

ChannelKey = tuple[int, int, int, int, bool]
"""(sending stage, receiving stage, sending device, receiving device, is forward)."""


def check(schedule: Schedule, graph: StageGraph, edges: MessageEdges = EVERY_EDGE) -> None:
    """Check that a schedule can be executed. Its messages must be those that ``lower`` inserts.
    Time is linear in the number of actions.

    Args:
        edges: stage edges with messages.

    Raises:
        InvalidScheduleError: if actions are missing, out of order (C4; on a device with several
            stages also against its stage edges), messages differ from those of the sample
            intervals, or too many micro-batches are in flight.
        DeadlockError: if devices wait for each other; the message shows what each waits for.
    """
    expected = checked(schedule.computes, graph, edges)
    for device, actions in schedule.actions.items() if schedule.is_lowered else ():
        for at, both in enumerate(zip_longest(actions, expected.actions[device])):
            if both[0] != both[1]:
                raise InvalidScheduleError(
                    f"device {device}, step {at + 1} of {len(actions)}: the sample intervals ask "
                    f"for {both[1] or 'nothing'} here: {show(actions, at)}"
                )


def checked(order: Schedule, graph: StageGraph, edges: MessageEdges = EVERY_EDGE) -> Schedule:
    """Return a schedule with its messages; raises as ``check`` does if it cannot be executed."""
    check_order(order, graph, edges)
    schedule = lower(order, graph, edges)
    check_deadlock(schedule, graph)
    return schedule


def check_order(schedule: Schedule, graph: StageGraph, edges: MessageEdges = EVERY_EDGE) -> None:
    """Check order and number in flight of a schedule without messages. Deadlocks are left to
    ``check_deadlock`` or to a simulation.

    Raises:
        InvalidScheduleError: as ``check`` does.
    """
    _check_devices(schedule, graph)
    checked = set[tuple[object, ...]]()  # replicas share a list
    for device, actions in schedule.actions.items():
        key = id(actions), *graph.stages_of[device]
        if key not in checked:
            _check_list(device, actions, graph.stages_of[device], graph)
        checked.add(key)
    check_handovers(schedule, graph, edges)


def channel(action: Action, device: int) -> ChannelKey:
    """Return the channel of a send or receive on a device."""
    forward = action.kind.is_forward
    if action.kind.is_send:
        return action.stage, action.peer_stage, device, action.peer, forward
    return action.peer_stage, action.stage, action.peer, device, forward


def show(actions: Sequence[Action], position: int) -> str:
    """Format a part of a device's list with one action marked: ``0F0 >>0RB0<1@1[0:4]<< 0B0``."""
    first, last = max(position - 4, 0), position + 5
    words = [
        f">>{action}<<" if i == position else str(action)
        for i, action in enumerate(actions[first:last], first)
    ]
    return " ".join(["..."] * (first > 0) + words + ["..."] * (last < len(actions)))


def describe_deadlock(schedule: Schedule, graph: StageGraph, positions: Mapping[int, int]) -> str:
    """Describe the action that each unfinished device waits for.

    Args:
        positions: device -> index of its next action.
    """
    lines = ["the schedule deadlocks; every unfinished device waits for another:"]
    for device, at in sorted(positions.items()):
        actions = schedule.actions[device]
        if at == len(actions):
            continue
        action = actions[at]
        if action.peer < 0:
            lines.append(
                f"  device {device}, step {at + 1} of {len(actions)}, waits for the other devices "
                f"that sum gradients with it: {show(actions, at)}"
            )
            continue
        what = "samples" if action.kind.is_forward else "the gradient of samples"
        lines.append(
            f"  device {device}, step {at + 1} of {len(actions)}, waits for {what} {action.start} "
            f"to {action.stop - 1} from stage {action.peer_stage} on device {action.peer}: "
            f"{show(actions, at)}"
        )
    held = _warm_up_samples(schedule, graph)
    lines += [
        f"The warm-up is short along stage edge {x} -> {y}: {held[x]} samples forward before the "
        f"first backward of stage {x}, {held[y]} of stage {y}, which turn over {_group(graph, x)} "
        f"and {_group(graph, y)} at a time; give stage {x} at least {least}."
        for x, y in graph.edges
        if held[x] < (least := _least_before(graph, x, y, held[y]))
    ]
    return "\n".join(lines)


def _group(graph: StageGraph, s: int) -> int:
    """Return the samples of one group of micro-batches of a stage under kFkB."""
    return graph.stages[s].k * graph.stages[s].microbatch_size


def _least_before(graph: StageGraph, x: int, y: int, held: int) -> int:
    """Return the samples that x must hold under kFkB if its successor y holds ``held``."""
    before, after = graph.stages[x], graph.stages[y]
    both = before.k, before.microbatch_size, after.k, after.microbatch_size
    return min(held + waited_for_samples(*both), graph.batch_size)


def _warm_up_samples(schedule: Schedule, graph: StageGraph) -> list[int]:
    held = []
    for s, stage in enumerate(graph.stages):
        count = 0
        for action in schedule.actions[stage.devices[0]]:
            if action.stage == s and action.kind.is_compute:
                if not action.kind.is_forward:
                    break
                count += 1
        held.append(min(count * stage.microbatch_size, graph.batch_size))
    return held


def _check_devices(schedule: Schedule, graph: StageGraph) -> None:
    if set(graph.devices) != set(schedule.actions):
        raise InvalidScheduleError(
            f"the schedule has actions for devices {sorted(schedule.actions)}, but the stages are "
            f"on devices {list(graph.devices)}"
        )


def _check_list(
    device: int, actions: Sequence[Action], stages: Sequence[int], graph: StageGraph
) -> None:
    """Check C4, number in flight and completeness of the stages of one device."""
    done: Counter[tuple[int, Kind]] = Counter()
    split = {a.stage for a in actions if a.kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)}
    for at, action in enumerate(actions):
        if action.stage not in stages:
            problem: str | None = f"stage {action.stage} is not on this device"
        else:
            problem = _compute_problem(action, done, split, graph)
            done[action.stage, action.kind] += 1
        if problem:
            raise InvalidScheduleError(
                f"device {device}, step {at + 1} of {len(actions)}: {problem}: {show(actions, at)}"
            )
    for s in stages:
        for kind in _stage_kinds(s in split):
            if done[s, kind] != graph.num_microbatches(s):
                raise InvalidScheduleError(
                    f"device {device} runs {done[s, kind]} of the {graph.num_microbatches(s)} "
                    f"micro-batches of stage {s} through {kind.name.lower()}"
                )


def check_handovers(
    schedule: Schedule, graph: StageGraph, edges: MessageEdges = EVERY_EDGE
) -> None:
    """Check that a device with several stages computes values before another of its stages uses
    them, or raise an InvalidScheduleError.
    """
    inside = needs(graph, edges, inside_devices=True)
    for device in dict.fromkeys(device for _, device, _, _ in inside):
        done = set()
        for at, action in enumerate(schedule.actions[device]):
            if action.peer >= 0 or not action.kind.has_messages:
                continue
            compute = compute_of(action, device)
            for need in inside.get(compute, ()):
                if need not in done:
                    stage, _, forward, microbatch = need
                    name = "forward" if forward else "backward"
                    raise InvalidScheduleError(
                        f"device {device}, step {at + 1} of {len(schedule.actions[device])}: it "
                        f"comes before {name} {microbatch} of stage {stage} on the same device, "
                        f"whose {'values' if forward else 'gradients'} it takes: "
                        f"{show(schedule.actions[device], at)}"
                    )
            done.add(compute)


def _stage_kinds(split: bool) -> tuple[Kind, ...]:
    backward = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT) if split else (Kind.BACKWARD,)
    return (Kind.FORWARD, *backward)


def _compute_problem(
    action: Action, done: Counter[tuple[int, Kind]], split: set[int], graph: StageGraph
) -> str | None:
    s, kind, i = action.stage, action.kind, action.microbatch
    if kind is Kind.UPDATE:
        return None if i == done[s, kind] else f"update {i} where update {done[s, kind]} is next"
    order = _stage_kinds(s in split)
    if kind not in order:
        return f"stage {s} has its backwards both whole and in two halves"
    expected = done[s, kind]
    if i != expected:
        return f"micro-batch {i} where micro-batch {expected} is next"
    if i >= graph.num_microbatches(s):
        return f"stage {s} has only {graph.num_microbatches(s)} micro-batches"
    if kind is not Kind.FORWARD:
        before = order[order.index(kind) - 1]
        return None if i < done[s, before] else f"it comes before {before.name.lower()} {i}"
    in_flight = expected + 1 - done[s, order[-1]]
    limit = graph.stages[s].in_flight
    if in_flight > limit > 0:
        return f"{in_flight} micro-batches of stage {s} are in flight; its limit is {limit}"
    return None


def check_deadlock(schedule: Schedule, graph: StageGraph) -> None:
    """Run the lists of a schedule with messages, without a clock, until no device can continue.

    Raises:
        DeadlockError: if devices wait for each other; the message shows what each waits for.
    """
    sent: dict[ChannelKey, int] = defaultdict(int)
    received: dict[ChannelKey, int] = defaultdict(int)
    waiting: dict[ChannelKey, int] = {}
    arrived: dict[int, list[int]] = defaultdict(list)  # stage -> devices at its next update
    ready = dict.fromkeys(schedule.actions, -1)
    positions = dict.fromkeys(schedule.actions, 0)
    runnable = list(schedule.actions)
    while runnable:
        device = runnable.pop()
        actions = schedule.actions[device]
        at = positions[device]
        while at < len(actions):
            action = actions[at]
            if action.peer >= 0:
                key = channel(action, device)
                if action.kind.is_send:
                    sent[key] += 1
                    if key in waiting:
                        runnable.append(waiting.pop(key))
                elif received[key] < sent[key]:
                    received[key] += 1
                else:
                    waiting[key] = device
                    break
            elif action.kind is Kind.UPDATE and ready[device] != at:
                # All replicas continue when the last one has arrived.
                ready[device] = at
                arrived[action.stage].append(device)
                if len(arrived[action.stage]) < len(graph.stages[action.stage].devices):
                    break
                runnable += (other for other in arrived.pop(action.stage) if other != device)
            at += 1
        positions[device] = at
    if any(at < len(schedule.actions[device]) for device, at in positions.items()):
        raise DeadlockError(describe_deadlock(schedule, graph, positions))
