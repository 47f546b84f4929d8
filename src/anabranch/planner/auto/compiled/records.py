"""Records: what compiled functions hand on, one array per kind of thing.

A stage, an edge and so on is a row; a function that adds to what is known of it fills in its
columns. ``first`` and ``end`` of a list are places in the array that has all lists in a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.planner.auto.tables import Ints, Records, record

STAGE = record(
    "first_op end_op first_lane end_lane first_out end_out first_in end_in "
    "microbatch k recompute tensor degree replicas count per_update in_flight tensors "
    "pieces summed waiting",
    "parameters trainable kept largest largest_gradient tables rows "
    "entering entering_fixed returning returning_fixed fixed_bytes flight_bytes end_bytes "
    "untouched summing_s update_s head_s tail_s",
)
"""A stage. ``out`` and ``in`` are its edges to others and from others (places in ``in_edges``);
``count`` its micro-batches, so many of them ``per_update``; ``tensors`` its trainable parameters;
``entering`` and ``returning`` bytes per sample of values that enter and of gradients that come
back, ``fixed`` those that do not grow with samples; ``tables`` and ``rows`` bytes of tables whose
gradients are rows, and of these; ``*_bytes`` terms of its memory; ``summing_s`` what sums add to
its last backward; ``head_s`` and ``tail_s`` what lies before its first forward and after its last
backward at least; ``pieces`` of the gradients of an update, how many are ``summed`` so far, and how
many lanes are ``waiting`` for more.
"""

SLICE = record(
    "samples lanes first_mark end_mark first_final end_final",
    "forward_s backward_s last_s rest_s",
)
"""A slice of a stage's micro-batches: four per stage, the smaller and the larger slice of a full
micro-batch and of the last one. So many lanes have it; the last backward takes longer by its sums,
and ends so long behind its last mark.
"""

EDGE = record(
    "source target values gradients copies source_unit target_unit "
    "source_bound target_bound first_overlap rest_overlap end_overlap first_flow first_back",
    "forward forward_fixed back back_fixed",
)
"""A stage edge. Bytes of a message per sample and fixed, forward and back; which slices meet, and
which flows go along it, is in ``messages``: ``rest`` is what lies behind the last whole unit, and
without gradients ``first_back`` is -1.
"""

LANE = record(
    "device stage place replica full last "
    "mode job job_number is_forward number forwards backwards updates missing waits_for mark "
    "gather edge end_edge overlap end_overlap copy base takers k step flow",
    "left_s job_end",
)
"""A device: its place in its stage, its replica and the slices of it; all else is the state of the
``clock``.
"""

OVERLAP = record("source target source_batch target_batch samples")
"""Samples that a replica of the source makes and one of the target needs, with the micro-batches of
the unit in which they do."""

FLOW = record(
    "source target batch num_ports first copies same next rest is_wrap is_head",
    "nbytes seconds latency_s send_s receive_s",
)
"""A message that goes again and again, from one lane to another (``messages``)."""

OWNERS = record("first_member end_member first_parameter end_parameter nbytes shards", "share")
"""Stages that read the same trainable parameters: bytes of these, the share of them that each
device has, and in how many rings they are summed.
"""

WORK = record(
    "owners first_lane end_lane first_port end_port first_piece end_piece "
    "waits_for turn is_summing missing",
    "gather_s",
)
"""An all-reduce: a ring of lanes. A piece waits for the gradients of so many lanes."""

PIECE = record("work first_final members nbytes given", "seconds")
"""A piece of it. In ``finals`` is for each stage the operator behind which it is final there."""

MARK = record("first_piece end_piece", "seconds")
"""Where gradients become final inside a last backward, in seconds from the mark before."""

HOST = record("jobs started", "work since")
"""A host whose devices share cores (``clock``)."""

CLOCK = record("place last_place agreed is_stream", "now end limit")
"""The clock itself, see ``simulator.engine``; whether mini-batches follow without a flush."""


class Layout(NamedTuple):
    """The stages of a draft in topological order, S of them.

    Attributes:
        stages: [S] of ``STAGE``.
        lanes: [devices] of ``LANE``, those of stage 0 first, then those of stage 1 and so on.
        edges: of ``EDGE``, sorted by source and target.
        in_edges: indices of edges, by target and source.
        edge: [S, S] index of an edge or -1.
        home: [operators] stage of each.
        ops: operators by stage, ascending.
    """

    stages: Records
    lanes: Records
    edges: Records
    in_edges: Ints
    edge: Ints
    home: Ints
    ops: Ints


class Messages(NamedTuple):
    """All that stages send each other.

    Attributes:
        bounds: where the overlaps of each slice begin, by edge and end of the edge.
        flows: of ``FLOW``, by edge and direction; copies of one are messages in a row.
        ports: [flows, most ports] that a flow occupies.
        posted: [messages] whether the receive is posted before anything has been received.
    """

    bounds: Ints
    flows: Records
    ports: Ints
    posted: NDArray[np.bool_]


class AllReduces(NamedTuple):
    """What is summed before an update.

    Attributes:
        owners: of ``OWNERS``.
        members: stages of each, ascending.
        owned: parameters of each, last ones first.
        works: of ``WORK``, by their devices.
        lanes: of each, by device.
        ports: of each.
        pieces: of ``PIECE``, by work.
        finals: operators behind which they are final.
    """

    owners: Records
    members: Ints
    owned: Ints
    works: Records
    lanes: Ints
    ports: Ints
    pieces: Records
    finals: Ints


class Marks(NamedTuple):
    """Where last backwards leave final gradients.

    Attributes:
        marks: of ``MARK``, by slice.
        pieces: that are final at each mark, and at the end of each slice's backward.
    """

    marks: Records
    pieces: Ints
