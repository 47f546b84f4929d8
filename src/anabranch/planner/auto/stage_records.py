"""Records of the evaluator: a model on a cluster, and the stages of a draft with their edges.

Letters: s, t stages; e stage edges; v values of the model; i operators; n sample counts that were
measured; d devices; l levels of the cluster. A way is 0 for what goes ahead, from end 0 of an edge
to end 1, and 1 for what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from anabranch.compiled import Floats, Ints, Table


class OperatorBytes:
    """Bytes of an operator's parameters and of what its passes take."""

    parameters: float
    trainable: float
    tables: float  # trainable ones with sparse gradients
    rows: float  # these gradients
    largest_gradient: float
    kept: float  # of a sample, for the backward
    kept_fixed: float  # besides, whatever the samples
    working: float  # of a sample, besides


class ValueRecord:
    """A value of the model, with the messages that it takes to another stage and back."""

    producer: int
    first: int  # of the readers of all values
    last: int  # behind its readers
    per_sample: Annotated[Floats, 2]  # [way] bytes
    fixed: Annotated[Floats, 2]  # [way] bytes whatever the samples


class LevelRecord:
    """A level of the cluster, with the slowest link up to it."""

    devices: int  # of a group
    cards: int  # of a group
    bandwidth: float
    latency: float
    own_bandwidth: float  # of a card of the groups below


class Numbers:
    """Numbers of the problem; seconds and bytes."""

    batch_size: int
    most_replicas: int
    flush: int
    fewest: int  # samples that the profile covers
    most: int
    memory: float
    optimizer_factor: float
    update_byte: float
    action: float
    send: float
    cores: float  # devices alone that compute as much as all at best; 0: none slows another
    versions_in_flight: float  # of the weights, per micro-batch in flight
    more_versions: float  # besides
    all_temporary: float  # of an update: bytes per byte that is updated
    largest_temporary: float  # likewise per byte of the largest parameter


class StageRecord:
    """A stage."""

    microbatch: int  # this and the next two are of ``draft.SETUP``
    k: int
    recompute: int
    operators: int
    devices: int
    low: int  # its least device
    high: int  # its greatest device
    cards: int  # of their nodes that they share with others
    far: int  # whether they are on several nodes
    replicas: int
    samples: int  # of the fullest replica
    most: int  # micro-batches whose activations it may hold, with split backwards
    row: Annotated[Ints, 2]  # [last] row of the measured seconds below them
    last: int  # samples of the last micro-batch
    total: int  # micro-batches of a step
    least: int  # in flight
    wanted: int  # in flight if memory were endless
    in_flight: int
    ordered: int  # the stage at this place of a topological order
    counted: int
    edges: Annotated[Ints, 2]  # [way] whose messages it takes
    done: Annotated[Ints, 2]  # [way] actions
    way: int  # of its next action
    taken: int  # edges whose messages it has for that
    begun: int  # whether it has begun on cores
    pieces: int  # of its gradients
    pieces_done: int  # that are summed
    above: Annotated[Floats, 2]  # [last] share of the way from that row to the next
    seconds: Annotated[Floats, 2, 2]  # [last, way]
    weights: Annotated[Floats, 2]  # [last] part of a backward that can wait, where it is split
    owed: float  # seconds of such parts that are not done yet
    turns: Annotated[Floats, 2]  # [end of edges] times as long as used that turns hold its cards
    apart: float  # how much later than the first replica the last one has a message
    sums: float  # what the last backward leaves of its all-reduce
    ring: float  # bandwidth of all-reduces
    update: float
    gather: float  # of what its replicas have updated
    before: float  # from the beginning of the step to its first forward, at least
    behind: float  # from its last backward to the end of the step, at least
    passed: float  # by operators in the last backward, and the next four: when
    final: float  # gradients that wait are final
    summed: float  # all are summed
    passed_all: float  # that backward ends
    idle: float  # its last action has ended
    ready: float  # its next action may begin, as far as that is known
    takes: float  # seconds of that alone; of a split backward without those nobody waits for
    until: float  # when that ends; infinity where it is not known
    left: float  # seconds that it has left to do
    pace: float  # times as long as alone that its action takes
    asks: float  # when it asks for links for its next piece
    parameters: float  # bytes, as of operators
    trainable: float
    tables: float
    rows: float
    largest_gradient: float
    kept: float
    kept_fixed: float
    passing: float  # bytes of a pass of all samples besides
    enters: float  # bytes per sample
    enters_fixed: float  # bytes whatever the samples
    returns: float
    returns_fixed: float
    gradients: float  # bytes that are summed
    cut: float  # of these in pieces
    waiting: float  # of these not in a piece yet
    buckets: float  # that wait, about


class EdgeRecord:
    """An edge between stages."""

    ends: Annotated[Ints, 2]  # source and target
    far: int  # whether it takes shared cards of nodes
    posted: Annotated[Ints, 2]  # [way] receives, of the receiver's micro-batches
    per_sample: Annotated[Floats, 2]  # [way] bytes
    fixed: Annotated[Floats, 2]  # [way] bytes whatever the samples
    latency: float
    byte_s: float  # of a message on the busiest link
    apart_s: float  # of a byte, how much later the last replica has it through a card
    port_s: Annotated[Floats, 2, 2]  # [end, link or card] of a byte, on the busiest


class StagePiece:
    """A part of a stage's gradients that is summed at once."""

    parts: int  # that take ports one after the other
    final: float  # seconds of the last backward's operators until it is final
    seconds: float  # of a part


class PricedModel(NamedTuple):
    """A model on a cluster."""

    numbers: Table[Numbers]  # the only record
    measured: Ints  # [n] samples
    op_seconds: Floats  # [n, i, way], and behind the ways the weights' part of the way back
    op_bytes: Table[OperatorBytes]  # [i]
    values: Table[ValueRecord]  # [v]
    readers: Ints
    levels: Table[LevelRecord]  # [l]


class State(NamedTuple):
    """Figures that follow from a draft.

    Ports are links of stages, [s], then cards of nodes, where devices share them; those of a stage
    are its link, then cards.
    """

    stages: Table[StageRecord]  # and more entries, the last of which is all zeros
    edges: Table[EdgeRecord]  # [e]
    num_edges: Ints  # the only number
    edges_of: Ints  # [way, s, 0 to its edges] those whose messages it takes
    ports_of: Ints  # [s, 0 to its cards]
    devices: Ints  # [s, 0 to its devices]
    ports: Floats  # [out or in, port] when it is free; before, seconds of a message of a byte
    pieces: Sequence[Table[StagePiece]]  # [s][0 to its pieces]
    behind: Ints  # [i] whether gradients of its stage's inputs come through an operator
    paces: Floats  # [devices that compute] times as long as alone; empty where that is no matter
    arrivals: Floats  # [way, e, micro-batch of the receiver] of the last of its messages
