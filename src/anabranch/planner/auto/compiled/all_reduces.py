"""All-reduces of the gradients of a layout: who sums which pieces, and with whom.

What ``ModelCosts.all_reduces`` says: parameters that the same stages read are summed in one ring,
or one per shard under tensor parallelism, in buckets, of which large ones are cut and small ones
put together.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anabranch.cost.buckets import BUCKET_BYTES, PIECE_SHARE
from anabranch.cost.sparse import INDEX_BYTES
from anabranch.planner.auto.compiled.jit import compiled, making, part
from anabranch.planner.auto.compiled.ports import level_of, num_ports, put_ports
from anabranch.planner.auto.compiled.records import OWNERS, PIECE, WORK, AllReduces, Layout
from anabranch.planner.auto.tables import Bools, Ints, Records, Tables


@making
def plan_all_reduces(layout: Layout, tables: Tables, sharded: bool) -> AllReduces:
    """The all-reduces before an update, ordered by their devices."""
    owners, members, owned = _owners(layout, tables)
    _share(layout, owners, members, tables)
    works, lanes = _rings(layout, owners, members)
    ports = _ring_ports(layout, works, lanes, tables.levels)
    most = finals = 0
    for w in range(len(works)):
        held = owners[works[w].owners]
        count = held.end_parameter - held.first_parameter + 2 * (held.nbytes // BUCKET_BYTES) + 2
        most += count
        finals += count * (held.end_member - held.first_member)
    reduces = AllReduces(
        owners,
        members,
        owned,
        works,
        lanes,
        ports,
        np.zeros(most, PIECE),
        np.zeros(finals, np.int64),
    )
    count = 0
    for w in range(len(works)):
        count = _add_pieces(layout, reduces, works[w], count, tables, sharded)
        for piece in range(works[w].first_piece, count):
            reduces.pieces[piece].work = w
    return reduces


@part
def _owners(layout: Layout, tables: Tables) -> tuple[Records, Ints, Ints]:
    """Sets of stages that read the same trainable parameters, each stage alone first; their
    members, and the parameters of each.
    """
    alone, count = len(layout.stages), len(tables.parameters)
    owners = np.zeros(alone + count, OWNERS)
    members = np.empty(alone + len(tables.parameter_readers), np.int64)
    for s in range(alone):
        members[s] = owners[s].first_member = s
        owners[s].end_member = s + 1
    sets, end = alone, alone
    owner = np.full(count, -1, np.int64)
    for p in range(count):
        parameter = tables.parameters[p]
        if not parameter.trainable or not parameter.nbytes:
            continue
        last = _put_members(layout, tables, parameter, members, end)
        found = members[end]
        if last > end + 1:
            found = alone
            while found < sets and not _same(members, owners[found], end, last):
                found += 1
            if found == sets:
                owners[sets].first_member, owners[sets].end_member = end, last
                end, sets = last, sets + 1
        owner[p] = found
        owners[found].nbytes += parameter.nbytes
        owners[found].end_parameter += 1
    first = 0
    for found in range(sets):
        number = owners[found].end_parameter
        owners[found].first_parameter = owners[found].end_parameter = first
        first += number
    owned = np.empty(first, np.int64)
    for p in range(count):
        if owner[p] >= 0:
            owned[owners[owner[p]].end_parameter] = p
            owners[owner[p]].end_parameter += 1
    return owners[:sets], members, owned


@part
def _put_members(layout: Layout, tables: Tables, parameter: Any, members: Ints, first: int) -> int:
    """Write the stages that read a parameter, ascending, from ``first`` on; where they end."""
    end = first
    for at in range(parameter.first, parameter.end):
        s = layout.home[tables.parameter_readers[at]]
        place = end
        while place > first and members[place - 1] > s:
            place -= 1
        if place > first and members[place - 1] == s:
            continue
        for i in range(end, place, -1):
            members[i] = members[i - 1]
        members[place] = s
        end += 1
    return end


@part
def _same(members: Ints, owners: Any, first: int, end: int) -> bool:
    same = owners.end_member - owners.first_member == end - first
    at = 0
    while same and at < end - first:
        same = members[owners.first_member + at] == members[first + at]
        at += 1
    return bool(same)


@part
def _share(layout: Layout, owners: Records, members: Ints, tables: Tables) -> None:
    """What of its gradients each device has, and in how many rings they are summed."""
    for found in range(len(owners)):
        held = owners[found]
        held.shards, share = layout.stages[members[held.first_member]].tensor, 0.0
        for at in range(held.first_member, held.end_member):
            stage = layout.stages[members[at]]
            share = max(share, _shard(layout, stage, tables))
            if stage.tensor != held.shards:
                # Where degrees differ, all devices sum the largest shard.
                held.shards = 1
        if held.nbytes > 0:
            held.share = math.ceil(held.nbytes * share) / held.nbytes


@part
def _shard(layout: Layout, stage: Any, tables: Tables) -> float:
    """Share of a stage's trainable parameters that each of its devices holds."""
    if stage.tensor == 1:
        return 1.0
    whole = 0.0
    for at in range(stage.first_op, stage.end_op):
        whole += tables.operators[0, layout.ops[at]].trainable
    here = layout.home[layout.ops[stage.first_op]]
    for p in range(len(tables.parameters)):
        parameter = tables.parameters[p]
        if parameter.end - parameter.first > 1 and parameter.trainable:
            for at in range(parameter.first, parameter.end):
                if layout.home[tables.parameter_readers[at]] == here:
                    whole += parameter.nbytes
                    break
    return stage.trainable / whole if whole > 0 else 0.0


@part
def _rings(layout: Layout, owners: Records, members: Ints) -> tuple[Records, Ints]:
    """All rings of several devices by their devices, and the lanes of each, likewise."""
    count = most = 0
    for found in range(len(owners)):
        held = owners[found]
        count += held.shards
        for at in range(held.first_member, held.end_member):
            stage = layout.stages[members[at]]
            most += stage.end_lane - stage.first_lane
    works, lanes = np.zeros(count, WORK), np.empty(most, np.int64)
    count = end = 0
    for found in range(len(owners)):
        held = owners[found]
        for shard in range(held.shards if held.nbytes > 0 else 0):
            work = works[count]
            work.owners, work.first_lane = found, end
            for at in range(held.first_member, held.end_member):
                stage = layout.stages[members[at]]
                work.waits_for += stage.end_lane - stage.first_lane
                for lane in range(stage.first_lane + shard, stage.end_lane, held.shards):
                    end = _insert(layout.lanes, lanes, work.first_lane, end, lane)
            work.end_lane = end
            if end - work.first_lane > 1:
                count += 1
            else:
                end = work.first_lane
                work.waits_for = 0
    return _sorted(works[:count], lanes, layout.lanes), lanes


@part
def _insert(lanes: Records, ring: Ints, first: int, end: int, lane: int) -> int:
    """Put a lane into a ring by its device; where the ring ends then."""
    place = end
    while place > first and lanes[ring[place - 1]].device > lanes[lane].device:
        ring[place] = ring[place - 1]
        place -= 1
    ring[place] = lane
    return end + 1


@part
def _sorted(works: Records, ring: Ints, lanes: Records) -> Records:
    result = np.zeros(len(works), WORK)
    for w in range(len(works)):
        place = w
        while place > 0 and _is_before(works[w], result[place - 1], ring, lanes):
            result[place] = result[place - 1]
            place -= 1
        result[place] = works[w]
    return result


@part
def _is_before(a: Any, b: Any, ring: Ints, lanes: Records) -> bool:
    """Whether the devices of one ring come before those of another."""
    i, j = a.first_lane, b.first_lane
    while i < a.end_lane and j < b.end_lane:
        x, y = lanes[ring[i]].device, lanes[ring[j]].device
        if x != y:
            return bool(x < y)
        i, j = i + 1, j + 1
    return bool(i == a.end_lane and j < b.end_lane)


@part
def _ring_ports(layout: Layout, works: Records, ring: Ints, levels: Records) -> Ints:
    """The ports of all rings, each once in a ring."""
    most = 2 * len(levels)
    ports, way = np.empty(most * len(ring), np.int64), np.empty(most, np.int64)
    last = np.full(num_ports(levels), -1, np.int64)
    end = 0
    for w in range(len(works)):
        work = works[w]
        work.first_port = end
        for at in range(work.first_lane, work.end_lane):
            after = at + 1 if at + 1 < work.end_lane else work.first_lane
            a, b = layout.lanes[ring[at]].device, layout.lanes[ring[after]].device
            for i in range(put_ports(levels, a, b, way)):
                if last[way[i]] != w:
                    last[way[i]] = w
                    ports[end] = way[i]
                    end += 1
        work.end_port = end
    return ports


@part
def _add_pieces(
    layout: Layout, reduces: AllReduces, work: Any, count: int, tables: Tables, sharded: bool
) -> int:
    """Cut the gradients of a ring into pieces, behind the first ``count`` ones; how many there are
    then.
    """
    held, ring = reduces.owners[work.owners], work.end_lane - work.first_lane
    sizes, is_rows = _summed_bytes(layout, reduces, held, ring, tables)
    tensors, total = len(sizes), sizes.sum()
    charges = tables.charges[0]
    first = layout.stages[reduces.members[held.first_member]]
    first.summing_s += charges.sum_tensor_s * tensors + charges.sum_byte_s * total * (ring - 1)
    buckets, final = _buckets(layout, reduces, held, sizes, is_rows, tables)
    a = layout.lanes[reduces.lanes[work.first_lane]].device
    b = layout.lanes[reduces.lanes[work.end_lane - 1]].device
    price = tables.rings[level_of(tables.levels, a, b), ring]
    work.first_piece = count
    count = _pieces(reduces, count, buckets, final, price)
    work.end_piece = count
    if sharded:
        # One device has the sum, and the way to the others comes behind the update.
        for piece in range(work.first_piece, count):
            work.gather_s += reduces.pieces[piece].seconds
            reduces.pieces[piece].seconds /= 2
        work.gather_s /= 2
    for at in range(held.first_member, held.end_member):
        layout.stages[reduces.members[at]].pieces += count - work.first_piece
    return count


@part
def _summed_bytes(
    layout: Layout, reduces: AllReduces, held: Any, ring: int, tables: Tables
) -> tuple[Ints, Bools]:
    """Bytes of each gradient in the ring, and whether they stand for rows of a table."""
    charges = tables.charges[0]
    samples = 0
    for at in range(held.first_member, held.end_member):
        stage = layout.stages[reduces.members[at]]
        most = -(-charges.batch_size // stage.microbatch) * -(-stage.microbatch // stage.replicas)
        samples = max(samples, most)
    sizes = np.empty(held.end_parameter - held.first_parameter, np.int64)
    is_rows = np.zeros(len(sizes), np.bool_)
    for i in range(len(sizes)):
        parameter = tables.parameters[reduces.owned[held.first_parameter + i]]
        sizes[i] = math.ceil(parameter.nbytes * held.share)
        if parameter.lookups and held.share >= 1:
            rows = ring_bytes(parameter.lookups, parameter.row_bytes, samples, ring)
            if rows < sizes[i]:
                sizes[i], is_rows[i] = rows, True
    return sizes, is_rows


@compiled
def ring_bytes(lookups: int, row_bytes: int, samples: int, holders: int) -> int:
    """``cost.sparse.ring_bytes``."""
    return -(-holders * lookups * samples * (row_bytes + INDEX_BYTES) // 2)


@part
def _buckets(
    layout: Layout,
    reduces: AllReduces,
    held: Any,
    sizes: Ints,
    is_rows: Bools,
    tables: Tables,
) -> tuple[Ints, Ints]:
    """Bytes of each bucket, and per member of the ring the operator behind which it is final.

    ``cost.buckets.cut_into_buckets``; those of rows come last.
    """
    members = held.end_member - held.first_member
    buckets = np.zeros(len(sizes), np.int64)
    final = np.full((len(sizes), members), len(layout.home), np.int64)
    end = 0
    for rows in (False, True):
        is_open = False
        for i in range(len(sizes)):
            if is_rows[i] != rows:
                continue
            if not is_open or buckets[end - 1] + sizes[i] > BUCKET_BYTES:
                is_open = True
                end += 1
            buckets[end - 1] += sizes[i]
            at = tables.parameters[reduces.owned[held.first_parameter + i]].first
            for m in range(members):
                s = reduces.members[held.first_member + m]
                reader = at
                while layout.home[tables.parameter_readers[reader]] != s:
                    reader += 1
                final[end - 1, m] = min(final[end - 1, m], tables.parameter_readers[reader])
    return buckets[:end], final


@part
def _pieces(
    reduces: AllReduces,
    count: int,
    buckets: Ints,
    final: Ints,
    price: Any,
) -> int:
    """Small buckets together, large ones cut; ``simulator.costs._pieces``."""
    members = final.shape[1]
    before, left, parts, first = 0, buckets.sum(), 1, count
    for b in range(len(buckets)):
        nbytes = buckets[b]
        seconds = nbytes * price.per_byte_s + (nbytes > 0) * price.latency_s
        most = max(BUCKET_BYTES, int(min(before, left) * PIECE_SHARE))
        if count > first and parts == 1 and reduces.pieces[count - 1].nbytes + nbytes <= most:
            last = reduces.pieces[count - 1]
            last.nbytes += nbytes
            last.seconds += seconds
            for m in range(members):
                at = last.first_final + m
                reduces.finals[at] = min(reduces.finals[at], final[b, m])
        else:
            parts = max(int(np.rint(nbytes / most)), 1)
            for _ in range(parts):
                piece, previous = reduces.pieces[count], reduces.pieces[max(count - 1, 0)]
                piece.first_final = previous.first_final + previous.members
                piece.members = members
                piece.nbytes, piece.seconds = nbytes, seconds / parts
                for m in range(members):
                    reduces.finals[piece.first_final + m] = final[b, m]
                count += 1
        before, left = before + nbytes, left - nbytes
    return count
