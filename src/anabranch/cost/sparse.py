"""Sums of the gradients of embedding tables, dense or by the rows that were looked up.

    whole      2 (d-1)/d * table           bytes that each of d holders sends, in a ring
    by rows    (d-1) * rows * (row + index)    each sends all others the rows that it looked up

    rows = lookups of a sample * samples of the fullest holder, repeated rows counted each time

So many rows have room in the message of every holder: all know the size beforehand, and none waits
for the counts of others in the middle of its backwards.
"""

from __future__ import annotations

from anabranch.graph.opgraph import LookupTable

INDEX_BYTES = 8
"""Bytes of the index of a row."""


def most_samples(batch_size: int, microbatch_size: int, replicas: int) -> int:
    """Samples of a batch on the fullest replica, at most."""
    return -(-batch_size // microbatch_size) * -(-microbatch_size // replicas)


def message_bytes(table: LookupTable, samples: int) -> int:
    """Bytes that each holder sends each other one for so many samples on the fullest."""
    return table.lookups * samples * (table.row_bytes + INDEX_BYTES)


def ring_bytes(table: LookupTable, samples: int, holders: int) -> int:
    """Bytes whose ring sends as much as all holders that send all others their rows."""
    return -(-holders * message_bytes(table, samples) // 2)


def rows_pay(table: LookupTable, nbytes: int, samples: int, holders: int) -> bool:
    """Return whether rows are less to send than the ring of the table of ``nbytes``."""
    return ring_bytes(table, samples, holders) < nbytes
