"""The clock: a step of the lanes of a layout, event by event, as ``simulator.step`` goes.

Every lane goes through its list without having it as a list: it counts its forwards and backwards,
and its messages are found by slices (``messages``). A lane, an all-reduce or a host has one event
that comes next, so the queue is a tournament among them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from anabranch.cost.overheads import slowdown_of
from anabranch.planner.auto.compiled.jit import compiled, making, part
from anabranch.planner.auto.compiled.messages import following
from anabranch.planner.auto.compiled.ports import num_ports
from anabranch.planner.auto.compiled.records import CLOCK, HOST, AllReduces, Layout, Marks, Messages
from anabranch.planner.auto.compiled.tournament import new_tree, settle
from anabranch.planner.auto.tables import Bools, Floats, Ints, Records, Tables

_slowdown_of = compiled(slowdown_of)

# Where a lane is in its list.
NEXT, RECEIVE, COMPUTE, SEND, AGREE, UPDATE, GATHER, DONE = range(8)

# What a lane's event is the end of.
ARRIVAL, ACTION, OVERHEAD, AGREEMENT, UPDATING, GATHERING = range(6)


class Run(NamedTuple):
    """A step that goes on.

    Attributes:
        clock: one ``CLOCK``.
        ready: [messages] whether one of two things has happened: it is sent, its receive is posted.
        arrival: [messages] when it arrives, and its number among events.
        free_at: [ports]
        waiting: [lanes] those that wait for the sums of their stage, from its first lane on.
        gathers: works of each lane that end with a gather, from ``first_gather`` of it on.
        lane_of: [devices]
        tree: whose event is next among lanes, works and hosts; their times and numbers.
    """

    clock: Records
    stages: Records
    lanes: Records
    edges: Records
    in_edges: Ints
    slices: Records
    bounds: Ints
    flows: Records
    flow_ports: Ints
    ready: Bools
    arrival: Floats
    number: Ints
    free_at: Floats
    owners: Records
    members: Ints
    works: Records
    work_lanes: Ints
    work_ports: Ints
    pieces: Records
    marks: Records
    marked: Ints
    waiting: Ints
    gathers: Ints
    first_gather: Ints
    hosts: Records
    lane_of: Ints
    slowdown: Floats
    tree: Ints
    times: Floats
    numbers: Ints
    slots: int
    host_size: int
    step_s: float
    agreement_s: float
    agrees: bool


@making
def run_step(
    layout: Layout,
    slices: Records,
    messages: Messages,
    reduces: AllReduces,
    marks: Marks,
    tables: Tables,
    agrees: bool,
    is_stream: bool,
    limit: float,
) -> float:
    """Seconds of a step; infinity if it takes longer than ``limit`` or never ends.

    Args:
        is_stream: stages update behind every ``per_update`` micro-batches, by themselves.
    """
    run = _begin(layout, slices, messages, reduces, marks, tables, agrees)
    clock = run.clock[0]
    clock.limit, clock.is_stream = limit, is_stream
    for lane in range(len(run.lanes)):
        if run.step_s > 0 and not is_stream:
            _compute(run, lane, run.step_s, OVERHEAD)
        else:
            _advance(run, lane)
    lanes, works = len(run.lanes), len(run.works)
    while True:
        place = run.tree[1]
        if run.times[place] == math.inf:
            break
        clock.now, clock.place = run.times[place], run.numbers[place]
        run.times[place] = math.inf
        if place < lanes:
            _end_job(run, place)
        elif place < lanes + works:
            _end_sum(run, place - lanes)
        else:
            _end_job(run, _end_share(run, place - lanes - works))
        if run.times[place] == math.inf:
            settle(run.tree, run.times, run.numbers, place)
        if clock.limit < 0:
            return math.inf
    for lane in range(lanes):
        if run.lanes[lane].mode != DONE:
            return math.inf
    return float(clock.end)


@part
def _begin(
    layout: Layout,
    slices: Records,
    messages: Messages,
    reduces: AllReduces,
    marks: Marks,
    tables: Tables,
    agrees: bool,
) -> Run:
    lanes, works = len(layout.lanes), len(reduces.works)
    host_size = tables.levels[0].group
    hosts = lanes // host_size if len(tables.slowdown) else 0
    places, count = lanes + works + hosts, len(messages.posted)
    lane_of = np.empty(lanes, np.int64)
    for at in range(lanes):
        lane = layout.lanes[at]
        lane_of[lane.device] = at
        stage, full, last = layout.stages[lane.stage], slices[lane.full], slices[lane.last]
        lane.missing, lane.waits_for, lane.mode = stage.tensor, -1, NEXT
        lane.forwards = lane.backwards = lane.updates = lane.gather = lane.job_number = 0
        lane.left_s = last.forward_s + last.backward_s
        lane.left_s += (stage.count - 1) * (full.forward_s + full.backward_s)
    for s in range(len(layout.stages)):
        layout.stages[s].summed = layout.stages[s].waiting = 0
    for w in range(works):
        reduces.works[w].missing = reduces.works[w].end_lane - reduces.works[w].first_lane
    gathers, first_gather = _gathers(reduces, lanes)
    return Run(
        np.zeros(1, CLOCK),
        layout.stages,
        layout.lanes,
        layout.edges,
        layout.in_edges,
        slices,
        messages.bounds,
        messages.flows,
        messages.ports,
        messages.posted,
        np.full(count, math.inf),
        np.zeros(count, np.int64),
        np.zeros(num_ports(tables.levels)),
        reduces.owners,
        reduces.members,
        reduces.works,
        reduces.lanes,
        reduces.ports,
        reduces.pieces,
        marks.marks,
        marks.pieces,
        np.empty(lanes, np.int64),
        gathers,
        first_gather,
        np.zeros(hosts, HOST),
        lane_of,
        tables.slowdown,
        new_tree(places),
        np.full(places, math.inf),
        np.zeros(places, np.int64),
        tables.charges[0].receive_slots,
        host_size,
        tables.charges[0].step_s,
        tables.charges[0].agreement_s,
        agrees,
    )


@part
def _gathers(reduces: AllReduces, lanes: int) -> tuple[Ints, Ints]:
    """The works of each lane that end with a gather, and where those of each begin."""
    first = np.zeros(lanes + 1, np.int64)
    for w in range(len(reduces.works)):
        work = reduces.works[w]
        for at in range(work.first_lane, work.end_lane if work.gather_s > 0 else 0):
            first[reduces.lanes[at] + 1] += 1
    for lane in range(lanes):
        first[lane + 1] += first[lane]
    gathers, end = np.empty(first[lanes], np.int64), first.copy()
    for w in range(len(reduces.works)):
        work = reduces.works[w]
        for at in range(work.first_lane, work.end_lane if work.gather_s > 0 else 0):
            lane = reduces.lanes[at]
            gathers[end[lane]] = w
            end[lane] += 1
    return gathers, first


@compiled
def _at(run: Run, place: int, time: float, number: int) -> None:
    """Something is due at a time, with a number among events of that time."""
    run.times[place], run.numbers[place] = time, number
    settle(run.tree, run.times, run.numbers, place)


@compiled
def _after(run: Run, place: int, seconds: float) -> None:
    clock = run.clock[0]
    clock.last_place += 1
    _at(run, place, clock.now + seconds, clock.last_place)


@compiled
def _compute(run: Run, lane: int, seconds: float, job: int) -> None:
    """A lane computes for so long, if it has a core for itself."""
    me = run.lanes[lane]
    me.job = job
    if not len(run.hosts):
        _after(run, lane, seconds)
        return
    h = me.device // run.host_size
    host, now = run.hosts[h], run.clock[0].now
    if host.jobs:
        host.work += (now - host.since) * (1 / _slowdown_of(run.slowdown, host.jobs))
    host.since = now
    host.started += 1
    host.jobs += 1
    me.job_end, me.job_number = host.work + seconds, host.started
    _expect(run, h)


@compiled
def _first_job(run: Run, h: int) -> int:
    """The lane of a host whose job ends first."""
    first = -1
    for device in range(h * run.host_size, (h + 1) * run.host_size):
        lane = run.lane_of[device]
        me = run.lanes[lane]
        if me.job_number and (
            first < 0
            or me.job_end < run.lanes[first].job_end
            or (
                me.job_end == run.lanes[first].job_end
                and me.job_number < run.lanes[first].job_number
            )
        ):
            first = lane
    return first


@compiled
def _expect(run: Run, h: int) -> None:
    """When the next job of a host ends, as many as they are now."""
    host, place = run.hosts[h], len(run.lanes) + len(run.works) + h
    if host.jobs:
        left = max(run.lanes[_first_job(run, h)].job_end - host.work, 0.0)
        _after(run, place, left / (1 / _slowdown_of(run.slowdown, host.jobs)))
    else:
        _at(run, place, math.inf, 0)


@part
def _end_share(run: Run, h: int) -> int:
    """A job on shared cores ends; its lane."""
    host, lane = run.hosts[h], _first_job(run, h)
    host.since, host.work = run.clock[0].now, run.lanes[lane].job_end
    run.lanes[lane].job_number = 0
    host.jobs -= 1
    _expect(run, h)
    return lane


@compiled
def _end_job(run: Run, lane: int) -> None:
    """What a lane was at has ended."""
    me, clock = run.lanes[lane], run.clock[0]
    if me.job == ARRIVAL:
        me.waits_for = -1
        _take(run, me)
        if run.flows[me.flow].receive_s > 0:
            _compute(run, lane, run.flows[me.flow].receive_s, OVERHEAD)
        else:
            _advance(run, lane)
        return
    if me.job == ACTION and me.mark >= 0:
        _pass_mark(run, lane)
        return
    clock.end = max(clock.end, clock.now)
    slice_of_last = -1
    if me.job == ACTION:
        stage = run.stages[me.stage]
        if not me.is_forward and _is_last(me, stage):
            slice_of_last = me.last
        _open(run, me, SEND)
    elif me.job == AGREEMENT:
        me.mode = UPDATE
    elif me.job == UPDATING:
        me.updates += 1
        me.mode = NEXT if clock.is_stream else GATHER
    _advance(run, lane)
    if slice_of_last >= 0:
        # After the messages of this backward, which other stages wait for.
        here = run.slices[slice_of_last]
        _give(run, here.first_final, here.end_final)


@compiled
def _advance(run: Run, lane: int) -> None:
    """Go through the list of a lane until it computes or has to wait."""
    me = run.lanes[lane]
    stage = run.stages[me.stage]
    while True:
        if me.mode == RECEIVE:
            if not _next_flow(run, me):
                me.mode = COMPUTE
                _come(run, lane, me, stage)
                return
            if not _has_arrived(run, lane, me):
                return
            _take(run, me)
            if run.flows[me.flow].receive_s > 0:
                _compute(run, lane, run.flows[me.flow].receive_s, OVERHEAD)
                return
        elif me.mode == SEND:
            if not _next_flow(run, me):
                updates = run.clock[0].is_stream and not me.is_forward and _is_last(me, stage)
                me.mode = UPDATE if updates and _has_update(stage) else NEXT
                continue
            _hand_over(run, me.flow, run.flows[me.flow].first + me.copy)
            if run.flows[me.flow].send_s > 0:
                _compute(run, lane, run.flows[me.flow].send_s, OVERHEAD)
                return
        elif me.mode == NEXT:
            if me.backwards == stage.count:
                me.mode = AGREE if run.agrees else UPDATE
                if run.clock[0].is_stream:
                    me.mode = GATHER
                continue
            ahead = min(stage.count, stage.in_flight + me.backwards // stage.k * stage.k)
            me.is_forward = me.forwards < ahead
            if me.is_forward:
                me.number = me.forwards
                me.forwards += 1
            else:
                me.number = me.backwards
                me.backwards += 1
            _open(run, me, RECEIVE)
        elif me.mode == AGREE:
            _agree(run, lane)
            return
        elif me.mode == UPDATE:
            if not _has_update(stage):
                me.mode = GATHER
                continue
            if _lacks_sums(me, stage):
                _await_sums(run, lane, me, stage)
            else:
                _compute(run, lane, stage.update_s, UPDATING)
            return
        else:
            if me.gather == run.first_gather[lane + 1] - run.first_gather[lane]:
                me.mode = DONE
            else:
                work = run.gathers[run.first_gather[lane] + me.gather]
                me.gather += 1
                _gather(run, run.works[work])
            return


@compiled
def _is_last(me: Any, stage: Any) -> bool:
    """Whether the micro-batch that a lane is at is the last one before an update."""
    return bool((me.number + 1) % stage.per_update == 0)


@compiled
def _has_update(stage: Any) -> bool:
    return bool(stage.pieces > 0 or stage.update_s > 0)


@compiled
def _lacks_sums(me: Any, stage: Any) -> bool:
    """Whether gradients of the update that a lane comes to are not summed yet."""
    return bool(stage.summed < (me.updates + 1) * stage.pieces)


@compiled
def _open(run: Run, me: Any, mode: int) -> None:
    """Begin with the receives before an action, or with the sends behind it."""
    me.mode = mode
    stage = run.stages[me.stage]
    me.overlap = me.end_overlap = 0
    if (mode == RECEIVE) == (me.is_forward == 1):
        me.edge, me.end_edge = stage.first_in - 1, stage.end_in
    else:
        me.edge, me.end_edge = stage.first_out - 1, stage.end_out


@compiled
def _next_flow(run: Run, me: Any) -> bool:
    """Find the next message of a lane's receives or sends, if there is one."""
    while me.overlap == me.end_overlap:
        me.edge += 1
        if me.edge == me.end_edge:
            return False
        _open_edge(run, me)
    me.flow = me.base + me.overlap * me.takers + me.k
    me.k += me.step
    if me.k >= me.takers:
        me.overlap += 1
        me.k = me.place % me.step
    return True


@part
def _open_edge(run: Run, me: Any) -> None:
    """Find the overlaps of a lane's slice along an edge, and the flows that stand for them."""
    stage, receives = run.stages[me.stage], me.mode == RECEIVE
    is_target = receives == (me.is_forward == 1)
    edge = run.edges[run.in_edges[me.edge] if is_target else me.edge]
    first = edge.first_flow if me.is_forward else edge.first_back
    me.overlap = me.end_overlap = 0
    if first < 0:
        return
    if is_target:
        bound, unit, other = edge.target_bound, edge.target_unit, edge.source
    else:
        bound, unit, other = edge.source_bound, edge.source_unit, edge.target
    whole = edge.copies * unit
    if me.number < whole:
        me.copy = me.number // unit
        bound += (me.number - me.copy * unit) * stage.replicas
    else:
        me.copy = 0
        bound += (unit * stage.replicas + 1) * (edge.copies > 0)
        bound += (me.number - whole) * stage.replicas
    # Each device of a group takes from one of the group that gives, in turn.
    me.takers = stage.tensor if receives else run.stages[other].tensor
    me.k, me.step = me.place % stage.tensor, stage.tensor
    if me.k < me.takers:
        me.overlap, me.end_overlap = (
            run.bounds[bound + me.replica],
            run.bounds[bound + me.replica + 1],
        )
    me.base = first - edge.first_overlap * me.takers


@part
def _has_arrived(run: Run, lane: int, me: Any) -> bool:
    """Whether the message that a lane takes next is there; otherwise the lane waits for it."""
    clock, message = run.clock[0], run.flows[me.flow].first + me.copy
    at, number = run.arrival[message], run.number[message]
    if at < clock.now or (at == clock.now and number <= clock.place):
        return True
    me.waits_for, me.job = message, ARRIVAL
    if at < math.inf:
        _at(run, lane, at, number)
    return False


@compiled
def _take(run: Run, me: Any) -> None:
    """A message is taken: receives of a later micro-batch may be posted."""
    if run.flows[me.flow].same >= 0:
        return
    f, copy = following(run.flows[me.flow], me.copy)
    for _ in range(run.slots - 1):
        if f < 0:
            return
        while run.flows[f].same >= 0:
            f = run.flows[f].same
        f, copy = following(run.flows[f], copy)
    while f >= 0:
        _hand_over(run, f, run.flows[f].first + copy)
        f = run.flows[f].same


@compiled
def _hand_over(run: Run, f: int, message: int) -> None:
    """A message is sent, or its receive posted: at the second of the two it moves."""
    if not run.ready[message]:
        run.ready[message] = True
        return
    flow, clock, end = run.flows[f], run.clock[0], run.clock[0].now
    for i in range(flow.num_ports):
        end = max(end, run.free_at[run.flow_ports[f, i]])
    end += flow.seconds
    for i in range(flow.num_ports):
        run.free_at[run.flow_ports[f, i]] = end
    clock.last_place += 1
    run.arrival[message] = end + flow.latency_s
    run.number[message] = clock.last_place
    if run.lanes[flow.target].waits_for == message:
        _at(run, flow.target, end + flow.latency_s, clock.last_place)


@part
def _come(run: Run, lane: int, me: Any, stage: Any) -> None:
    """The last lane of a replica to come to an action starts it on all of them."""
    first = lane - me.place % stage.tensor
    run.lanes[first].missing -= 1
    if run.lanes[first].missing == 0:
        run.lanes[first].missing = stage.tensor
        for other in range(first, first + stage.tensor):
            _start(run, other, run.lanes[other], stage)


@part
def _start(run: Run, lane: int, me: Any, stage: Any) -> None:
    """A lane begins an action."""
    is_last, clock = _is_last(me, stage), run.clock[0]
    if clock.now + me.left_s + stage.tail_s > clock.limit:
        clock.limit = -1.0
    here = run.slices[me.last if is_last else me.full]
    me.mark = -1
    seconds = here.forward_s if me.is_forward else here.backward_s
    me.left_s -= seconds
    if is_last and not me.is_forward:
        seconds = here.last_s
        if here.end_mark > here.first_mark:
            me.mark, seconds = here.first_mark, run.marks[here.first_mark].seconds
    _compute(run, lane, seconds, ACTION)


@part
def _pass_mark(run: Run, lane: int) -> None:
    """Gradients are final in the middle of a backward, which goes on."""
    me = run.lanes[lane]
    here, mark = run.slices[me.last], run.marks[me.mark]
    me.mark += 1
    if me.mark < here.end_mark:
        _compute(run, lane, run.marks[me.mark].seconds, ACTION)
    else:
        me.mark = -1
        _compute(run, lane, here.rest_s, ACTION)
    _give(run, mark.first_piece, mark.end_piece)


@compiled
def _give(run: Run, first: int, end: int) -> None:
    """A lane's gradients of some pieces are final."""
    for at in range(first, end):
        piece = run.pieces[run.marked[at]]
        piece.given += 1
        if piece.given == run.works[piece.work].waits_for:
            _sum_next(run, piece.work)


@compiled
def _sum_next(run: Run, w: int) -> None:
    """Start the next piece of an all-reduce, if it can."""
    work, start = run.works[w], run.clock[0].now
    piece = run.pieces[work.first_piece + work.turn]
    if work.is_summing or piece.given < work.waits_for:
        return
    work.is_summing, piece.given = 1, 0
    work.turn = (work.turn + 1) % (work.end_piece - work.first_piece)
    for at in range(work.first_port, work.end_port):
        start = max(start, run.free_at[run.work_ports[at]])
    for at in range(work.first_port, work.end_port):
        run.free_at[run.work_ports[at]] = start + piece.seconds
    run.clock[0].last_place += 1
    _at(run, len(run.lanes) + w, start + piece.seconds, run.clock[0].last_place)


@part
def _end_sum(run: Run, w: int) -> None:
    """A piece is summed: the next one, and lanes that have waited for it."""
    work, clock = run.works[w], run.clock[0]
    clock.end = max(clock.end, clock.now)
    work.is_summing = 0
    _sum_next(run, w)
    held = run.owners[work.owners]
    for at in range(held.first_member, held.end_member):
        stage = run.stages[run.members[at]]
        stage.summed += 1
        if stage.summed % stage.pieces:
            continue
        count, stage.waiting = stage.waiting, 0
        for i in range(stage.first_lane, stage.first_lane + count):
            lane = run.waiting[i]
            if run.lanes[lane].mode == UPDATE:
                _compute(run, lane, stage.update_s, UPDATING)
            else:
                _agree(run, lane)


@compiled
def _await_sums(run: Run, lane: int, me: Any, stage: Any) -> None:
    run.waiting[stage.first_lane + stage.waiting] = lane
    stage.waiting += 1


@compiled
def _agree(run: Run, lane: int) -> None:
    """A lane is through its list; the last one to have its sums lets all go on."""
    me, clock = run.lanes[lane], run.clock[0]
    stage = run.stages[me.stage]
    if _lacks_sums(me, stage):
        _await_sums(run, lane, me, stage)
        return
    clock.agreed += 1
    if clock.agreed == len(run.lanes):
        for other in range(len(run.lanes)):
            run.lanes[other].job = AGREEMENT
            _after(run, other, run.agreement_s)


@part
def _gather(run: Run, work: Any) -> None:
    """The last lane to come lets all send each other what they have updated."""
    work.missing -= 1
    if work.missing:
        return
    start = run.clock[0].now
    for at in range(work.first_port, work.end_port):
        start = max(start, run.free_at[run.work_ports[at]])
    for at in range(work.first_port, work.end_port):
        run.free_at[run.work_ports[at]] = start + work.gather_s
    for at in range(work.first_lane, work.end_lane):
        run.lanes[run.work_lanes[at]].job = GATHERING
        run.clock[0].last_place += 1
        _at(run, run.work_lanes[at], start + work.gather_s, run.clock[0].last_place)
