"""Bytes of rows against those of whole tables."""

from anabranch.cost.sparse import message_bytes, most_samples, rows_pay
from anabranch.graph.opgraph import LookupTable


def test_samples_of_the_fullest_replica() -> None:
    """10 samples in micro-batches of 4 are 3 micro-batches, each of 2 samples on one of 3."""
    assert most_samples(10, 4, 3) == 6


def test_a_row_travels_with_its_number() -> None:
    """3 rows of 16 bytes and 8 for the number, for each of 5 samples."""
    assert message_bytes(LookupTable(3, 16), 5) == 3 * 24 * 5


def test_rows_pay_up_to_the_bytes_of_the_ring() -> None:
    """On 4 devices 3 messages of 360 bytes are those of a ring of 720: 2 * 3 / 4 * 720."""
    assert not rows_pay(LookupTable(3, 16), 720, 5, 4)
    assert rows_pay(LookupTable(3, 16), 721, 5, 4)
