"""Sums of the gradients of embedding tables, dense or by the rows that were looked up.

    whole      2 (d-1)/d * table           bytes that each of d holders sends, in a ring
    by rows    (d-1) * rows * (row + index)    each sends its looked-up rows to all others

    rows = lookups of a sample * samples of the fullest holder, repeated rows counted each time

The message of every holder has room for so many rows, so all know its size beforehand, and no
holder waits for the counts of others in the middle of its backwards.
"""

from __future__ import annotations

from anabranch.graph.opgraph import LookupTable

INDEX_BYTES = 8
"""Bytes of the index of a row."""


def most_samples(batch_size: int, microbatch_size: int, replicas: int) -> int:
    """Return an upper bound of the samples of a batch on the fullest replica."""
    return -(-batch_size // microbatch_size) * -(-microbatch_size // replicas)


def message_bytes(table: LookupTable, samples: int) -> int:
    """Return the bytes from each holder to each other one, for ``samples`` on the fullest."""
    return table.lookups * samples * (table.row_bytes + INDEX_BYTES)


def ring_bytes(table: LookupTable, samples: int, holders: int) -> int:
    """Return the bytes of a ring that sends as much as an exchange of rows among all holders."""
    return -(-holders * message_bytes(table, samples) // 2)


def rows_pay(table: LookupTable, nbytes: int, samples: int, holders: int) -> bool:
    """Return True if rows are fewer bytes to send than a ring of the whole table of ``nbytes``."""
    return ring_bytes(table, samples, holders) < nbytes
