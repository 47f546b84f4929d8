"""All-reduces of a stage graph: the gradients that devices sum up, in pieces, and their seconds."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from anabranch.cost import CostModel
from anabranch.cost.buckets import cut_into_buckets, piece_bytes, piece_count
from anabranch.cost.communication import transfer_s
from anabranch.cost.overheads import all_gather_work_s, all_reduce_work_s
from anabranch.cost.sparse import ring_bytes
from anabranch.graph.opgraph import Parameter
from anabranch.plans.stages import split_evenly
from anabranch.simulator.stage_costs import StageCosts


class Piece(NamedTuple):
    """Gradients that are final together and occupy their ports together: a bucket, a part of a
    large one (messages may go between parts), or several small ones.

    Attributes:
        final: per stage of the all-reduce, the operator whose backward is the last that adds to
            them there.
    """

    nbytes: int
    seconds: float
    final: tuple[int, ...]


class _Gradient(NamedTuple):
    """Bytes to be summed, and per stage the operator whose backward is the last that adds to it."""

    nbytes: int
    final: tuple[int, ...]


class AllReduce(NamedTuple):
    """Gradients that devices sum up, piece after piece, each as soon as it is final in the last
    backwards of all of these stages.

    Attributes:
        device_s: seconds that the sums take of each device's own time.
        gather_s: seconds of the all-gather behind the update, in which devices that share the
            optimizer's state send each other the parameters they have updated.
        gather_work_s: seconds that the all-gather takes of each device's own time.
    """

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    pieces: tuple[Piece, ...]
    ports: tuple[int, ...]
    device_s: float = 0.0
    gather_s: float = 0.0
    gather_work_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def seconds(self) -> float:
        """Seconds of all pieces, one after the other."""
        return sum(piece.seconds for piece in self.pieces)


def all_reduce_of(
    cost: CostModel, holders: Sequence[StageCosts], devices: Sequence[tuple[int, ...]]
) -> AllReduce | None:
    """Return the all-reduce of the parameters that exactly these stages read, over all of their
    devices; None where there is nothing to sum. The stages are numbered from 0.
    """
    ring = tuple(sorted({device for held in devices for device in held}))
    if len(ring) == 1:
        return None  # as of most stages that a search prices
    union = sum(holder.mask for holder in holders)
    shared = set.intersection(*(set(holder.readers) for holder in holders))
    readers = cost.graph.readers
    names = {name for name in shared if not readers[name] & ~union}
    owned = [p for p in reversed(cost.graph.parameters) if p.name in names and p.nbytes]
    if not owned:
        return None
    samples = max(holder.most_samples for holder in holders)
    # Tables whose rows are exchanged come last, as in the runtime.
    whole: list[_Gradient] = []
    by_rows: list[_Gradient] = []
    for parameter in owned:
        summed = _summed_bytes(cost, samples, len(ring), parameter)
        final = tuple(holder.readers[parameter.name] for holder in holders)
        is_whole = summed == parameter.nbytes
        (whole if is_whole else by_rows).append(_Gradient(summed, final))
    price = cost.all_reduce_price(ring)
    buckets = [
        _bucket(gradients, price)
        for kind in (whole, by_rows)
        for gradients in cut_into_buckets(kind, attrgetter("nbytes"))
    ]
    total = sum(gradient.nbytes for gradient in whole + by_rows)
    own_s = all_reduce_work_s(
        cost.calibration, total, len(ring), buckets=len(buckets), shares=cost.shard_optimizer
    )
    stages, ports = tuple(range(len(holders))), cost.cluster.ring_ports(ring)
    work = AllReduce(stages, ring, _pieces(buckets), ports, own_s)
    if not cost.shard_optimizer:
        return work
    gather_work_s = all_gather_work_s(cost.calibration, len(ring), buckets=len(buckets))
    return _sharded(work, gather_work_s)


def _summed_bytes(cost: CostModel, samples: int, devices: int, parameter: Parameter) -> int:
    """Return the bytes of a gradient in a ring, or of a ring that takes as long as its rows.

    Args:
        samples: samples of a batch on the fullest device.
    """
    if parameter.table is None or not cost.has_rows(parameter):
        return parameter.nbytes
    return min(parameter.nbytes, ring_bytes(parameter.table, samples, devices))


def _bucket(gradients: Sequence[_Gradient], price: tuple[float, float]) -> Piece:
    nbytes = sum(gradient.nbytes for gradient in gradients)
    final = tuple(map(min, zip(*(gradient.final for gradient in gradients), strict=True)))
    return Piece(nbytes, float(transfer_s(nbytes, *price)), final)


def _sharded(work: AllReduce, gather_work_s: float) -> AllReduce:
    """Return a reduce-scatter before the update, an all-gather behind it: half of a ring each."""
    pieces = tuple(piece._replace(seconds=piece.seconds / 2) for piece in work.pieces)
    return work._replace(pieces=pieces, gather_s=work.seconds / 2, gather_work_s=gather_work_s)


def _pieces(buckets: Sequence[Piece]) -> tuple[Piece, ...]:
    """Join small buckets and cut large ones, by ``piece_bytes``."""
    left = sum(bucket.nbytes for bucket in buckets)
    before, count = 0, 1
    pieces: list[Piece] = []
    for bucket in buckets:
        size = piece_bytes(before, left)
        if pieces and count == 1 and pieces[-1].nbytes + bucket.nbytes <= size:
            last = pieces.pop()
            final = tuple(map(min, zip(last.final, bucket.final, strict=True)))
            seconds = last.seconds + bucket.seconds
            pieces.append(Piece(last.nbytes + bucket.nbytes, seconds, final))
        else:
            count = piece_count(bucket.nbytes, size)
            seconds = bucket.seconds / count
            parts = split_evenly(0, bucket.nbytes, count)
            pieces += [Piece(stop - start, seconds, bucket.final) for start, stop in parts]
        before, left = before + bucket.nbytes, left - bucket.nbytes
    return tuple(pieces)
