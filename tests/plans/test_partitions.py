"""Every partition of a small model, each once."""

import pytest

from anabranch.plans.partitions import partitions
from tests.planner.helpers import linked_model


@pytest.mark.parametrize(
    ("n", "edges", "count"),
    [
        (4, [(0, 1), (1, 2), (2, 3)], 8),  # a chain of n: 2^(n - 1) cuts
        (4, [], 15),  # independent: the Bell number
        (8, [], 4140),
        (3, [(0, 1), (0, 2), (1, 2)], 4),  # the implied edge changes nothing
        # a diamond: all 15 but {0,3} with 1, 2 outside (2), {0,1,3} (1), {0,2,3} (1); {1,2} may be
        (4, [(0, 1), (0, 2), (1, 3), (2, 3)], 11),
    ],
)
def test_counts_partitions_with_an_acyclic_stage_graph(n, edges, count):
    """Known numbers, and each partition once: of all operators, in topological order."""
    found = [*partitions(linked_model(n, edges))]
    assert len(found) == len({frozenset(masks) for masks, _ in found}) == count
    assert all(x < y for _, pairs in found for x, y in pairs)
    assert {sum(masks) for masks, _ in found} == {2**n - 1}
