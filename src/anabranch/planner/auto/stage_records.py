"""Records of the evaluator: a model on a cluster, and the stages of a draft with their edges.

Letters: s, t stages; e stage edges; v values of the model; i operators; n measured sample counts;
d devices; l levels of the cluster. A way is 0 for forwards and their messages, from end 0 of an
edge to end 1, and 1 for backwards and theirs. Axis ``last``: 1 for the last micro-batch, else 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from anabranch.compiled import Floats, Ints, Table


class OperatorBytes:
    """Bytes of an operator's parameters and of its passes."""

    parameters: float
    trainable: float
    tables: float  # trainable parameters with sparse gradients
    rows: float  # sparse gradients
    largest_gradient: float
    kept: float  # per sample, for the backward
    kept_fixed: float  # for the backward, whatever the samples
    working: float  # per sample, only while a pass runs


class ValueRecord:
    """A value of the model, with its bytes in messages to another stage and back."""

    producer: int
    first: int  # start in ``PricedModel.readers`` of its readers
    last: int  # end of its readers there
    per_sample: Annotated[Floats, 2]  # [way] bytes
    fixed: Annotated[Floats, 2]  # [way] bytes whatever the samples


class LevelRecord:
    """A level of the cluster, with the slowest link on a way that climbs to it."""

    devices: int  # in a group
    cards: int  # of a group, towards the next level
    bandwidth: float
    latency: float
    own_bandwidth: float  # of this level's links alone: of one card of a group below


class Numbers:
    """Numbers of the problem; seconds and bytes."""

    batch_size: int
    most_replicas: int
    flush: int
    fewest: int  # fewest samples that the profile covers
    most: int  # most samples that the profile covers
    memory: float  # bytes of a device
    optimizer_factor: float
    update_byte: float  # seconds of the update per byte
    action: float  # seconds of a pass besides its operators
    send: float  # seconds of a processor at either end of a message
    cores: float  # ``computed_at_once``; 0 where no device slows another
    versions_in_flight: float  # versions of the weights per micro-batch in flight
    more_versions: float  # versions of the weights besides
    all_temporary: float  # temporary bytes of an update per byte that is updated
    largest_temporary: float  # temporary bytes of an update per byte of the largest parameter


class StageRecord:
    """A stage. Times are seconds from the beginning of the step, if not said otherwise."""

    microbatch: int  # this and the next two are its settings, see ``draft.Draft``
    k: int
    recompute: int
    operators: int  # number of operators
    devices: int  # number of devices
    low: int  # least device
    high: int  # greatest device
    cards: int  # number of its nodes' shared cards that its devices use
    far: int  # 1 if its devices are on several nodes
    replicas: int
    samples: int  # of a micro-batch on the fullest replica
    most: int  # micro-batches whose activations it may hold, with split backwards
    row: Annotated[Ints, 2]  # [last] row of ``op_seconds`` below its samples
    last: int  # samples of the last micro-batch
    total: int  # micro-batches of a step
    least: int  # fewest micro-batches in flight
    wanted: int  # micro-batches in flight without a limit of memory
    in_flight: int  # micro-batches in flight as memory allows
    ordered: int  # the stage at this position of a topological order
    counted: int  # counter or mark of whichever function runs
    edges: Annotated[Ints, 2]  # [way] number of edges whose messages it takes
    done: Annotated[Ints, 2]  # [way] number of actions done
    way: int  # of its next action
    taken: int  # number of edges whose messages for its next action it has taken
    begun: int  # 1 while its next action computes, where devices slow each other
    pieces: int  # number of pieces of its gradients
    pieces_done: int  # number of pieces that are summed
    above: Annotated[Floats, 2]  # [last] share of the way from ``row`` to the row above
    seconds: Annotated[Floats, 2, 2]  # [last, way] of a pass
    weights: Annotated[Floats, 2]  # [last] seconds of a split backward that can wait
    owed: float  # seconds of such parts that are not done yet
    turns: Annotated[Floats, 2]  # [end of edges] seconds that turns hold its cards per second used
    apart: float  # seconds by which its last replica has a message later than its first
    sums: float  # seconds of its all-reduce that are left after its last backward
    ring: float  # bandwidth of all-reduces
    update: float  # seconds of its update
    gather: float  # seconds of the all-gather of updated parameters
    before: float  # least seconds from the beginning of the step to its first forward
    behind: float  # least seconds from its last backward to the end of the step
    passed: float  # seconds of operators in the last backward so far
    final: float  # ``passed`` when all gradients that wait are final
    summed: float  # ``passed`` when all pieces so far are summed
    passed_all: float  # end of its last backward
    idle: float  # end of its last action
    ready: float  # when its next action may begin, as far as known
    takes: float  # seconds of its next action alone, without ``weights``
    until: float  # end of its next action; infinity if unknown
    left: float  # seconds of its actions still to come and of the way to the end of the step
    pace: float  # seconds of its action per second that it takes alone
    asks: float  # when it requests links for its next piece
    parameters: float  # this and the next six are sums or the largest of ``OperatorBytes``
    trainable: float
    tables: float
    rows: float
    largest_gradient: float
    kept: float
    kept_fixed: float
    passing: float  # bytes of a pass besides the bytes kept for the backward
    enters: float  # bytes per sample of values from other stages
    enters_fixed: float  # bytes of these whatever the samples
    returns: float  # bytes per sample of gradients of values for other stages
    returns_fixed: float  # bytes of these whatever the samples
    gradients: float  # bytes that are summed
    cut: float  # bytes of gradients in pieces
    waiting: float  # bytes of gradients that are final but in no piece yet
    buckets: float  # number of buckets of the waiting gradients, about


class EdgeRecord:
    """An edge between stages."""

    ends: Annotated[Ints, 2]  # source and target
    far: int  # 1 if its messages take shared cards of nodes
    posted: Annotated[Ints, 2]  # [way] number of receives posted, in the receiver's micro-batches
    per_sample: Annotated[Floats, 2]  # [way] bytes
    fixed: Annotated[Floats, 2]  # [way] bytes whatever the samples
    latency: float
    byte_s: float  # seconds per byte of a message on its busiest link
    apart_s: float  # seconds per byte by which a card lets the last replica have it later
    port_s: Annotated[Floats, 2, 2]  # [end, link or card] seconds per byte on the busiest


class StagePiece:
    """A part of a stage's gradients that is summed together."""

    parts: int  # number of equal parts, which take ports one after the other
    final: float  # ``StageRecord.passed`` when its gradients are final
    seconds: float  # of the all-reduce of a part


class PricedModel(NamedTuple):
    """A model on a cluster."""

    numbers: Table[Numbers]  # the only record
    measured: Ints  # [n] samples
    op_seconds: Floats  # [n, i, way]; at way 2 the gradients of weights alone
    op_bytes: Table[OperatorBytes]  # [i]
    values: Table[ValueRecord]  # [v]
    readers: Ints  # operators that read each value, value after value
    levels: Table[LevelRecord]  # [l]


class State(NamedTuple):
    """Figures that follow from a draft.

    Ports are the links of stages, [s], then the cards of nodes that devices share. A stage has its
    link and some cards.
    """

    stages: Table[StageRecord]  # [s], then spare entries; the last one is all zeros
    edges: Table[EdgeRecord]  # [e]
    num_edges: Ints  # [0] the number of edges
    edges_of: Ints  # [way, s, 0 to its edges] edges whose messages the stage takes
    ports_of: Ints  # [s, 0 to its cards] ports of the stage
    devices: Ints  # [s, 0 to its devices] devices of the stage
    ports: Floats  # [out or in, port] when it is free; in ``_route`` seconds per byte of a message
    pieces: Sequence[Table[StagePiece]]  # [s][0 to its pieces]
    behind: Ints  # [i] 1 if gradients of its stage's inputs come through the operator
    paces: Floats  # [devices that compute] seconds per second alone; empty if none slows another
    arrivals: Floats  # [way, e, micro-batch of the receiver] when its last message arrives
