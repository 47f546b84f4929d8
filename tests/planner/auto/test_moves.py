"""What every move makes, and that it leaves a draft as it was."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from anabranch.planner.auto.draft import Draft
from anabranch.planner.auto.moves import MOVES, Move, draw
from anabranch.planner.auto.space import Space
from tests.planner.auto.random_drafts import random_draft
from tests.planner.helpers import cluster, linked_model

#  0 --> 1 --> 3 --> 5        a fork, two branches of two operators, and a join
#   `--> 2 --> 4 --^
DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)]
CHAIN = [(i, i + 1) for i in range(5)]


def space(edges: list[tuple[int, int]], devices: int = 6, node: int | None = None) -> Space:
    """Six operators, each of one second, and a batch of 8 samples."""
    cost = replace(linked_model(6, edges), cluster=cluster(devices, node=node))
    return Space(cost, 8, (1, 2, 4, 8))


def draft(op_stage: str, device_stage: str, microbatch: int = 4) -> Draft:
    """A digit per operator and device: its stage."""
    count = 1 + max(map(int, op_stage))
    return Draft(
        np.array([*map(int, op_stage)], dtype=np.int32),
        np.array([*map(int, device_stage)], dtype=np.int32),
        (microbatch,) * count,
        (1,) * count,
        (0,) * count,
        deep=False,
        chained=False,
        sharded=False,
    )


def outcomes(name: str, before: Draft, where: Space) -> set[tuple[str, str]]:
    """All that a move makes of a draft, as digits of operators and devices."""
    move = MOVES[name][0]
    made = (move(before, where, Random(seed)) for seed in range(300))
    return {
        (digits(after.op_stage), digits(after.device_stage)) for after in made if after is not None
    }


def op_stages(name: str, op_stage: str, edges: list[tuple[int, int]]) -> set[str]:
    """What a move makes of the operators' stages; every stage has a device, the last one more."""
    device_stage = "012345"[: 1 + max(map(int, op_stage))].ljust(6, max(op_stage))
    return {after for after, _ in outcomes(name, draft(op_stage, device_stage), space(edges))}


def device_stages(
    name: str, device_stage: str, node: int | None = None, op_stage: str = "000111"
) -> set[str]:
    """What a move makes of the devices' stages."""
    where = space(CHAIN, len(device_stage), node)
    return {after for _, after in outcomes(name, draft(op_stage, device_stage), where)}


def digits(numbers: np.ndarray) -> str:
    return "".join(map(str, numbers.tolist()))


def well_formed(found: Draft) -> bool:
    """Every stage has an operator and a device, and everything that stages have."""
    stages = list(range(found.num_stages))
    return (
        np.unique(found.op_stage).tolist() == stages
        and np.unique(found.device_stage).tolist() == stages
        and min(found.microbatch) >= 1
        and min(found.k) >= 1
        and {*map(len, found[2:5])} == {len(stages)}
    )


@pytest.mark.parametrize("move", [move for move, _ in MOVES.values()], ids=list(MOVES))
def test_moves_make_drafts_and_leave_theirs_alone(move: Move):
    """Of any draft: as many stages with operators as with devices, and the draft as it was."""
    two_in_a_row = [*DIAMOND, *((a + 6, b + 6) for a, b in DIAMOND), (5, 6)]
    cost = replace(linked_model(12, two_in_a_row), cluster=cluster(8, node=4))
    where = Space(cost, 16, (1, 2, 4, 8, 16), shared=True, split=True)
    made = 0
    for seed in range(100):
        drawn = random_draft(cost, 16, seed)
        before = drawn._replace(device_stage=drawn.device_stage.astype(np.int32))
        copy = Draft(*(np.copy(x) if isinstance(x, np.ndarray) else x for x in before))
        after = move(before, where, Random(seed))
        assert all(np.array_equal(x, y) for x, y in zip(before, copy, strict=True))
        if after is not None:
            made += 1
            assert well_formed(after)
            assert not all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
            assert [x.dtype for x in after[:2]] == [np.dtype(np.int32), np.dtype(np.int32)]
            assert [type(x) for x in after[2:5]] == [tuple, tuple, tuple]
    assert made > 5


def test_shift_operator():
    """Either end of an edge between two stages, but never a stage's only operator."""
    assert op_stages("shift operator", "000111", CHAIN) == {"000011", "001111"}
    assert op_stages("shift operator", "000001", CHAIN) == {"000011"}
    assert op_stages("shift operator", "000000", CHAIN) == set()


def test_shift_run():
    """Any number of operators next to the border, with the branches that they lie on."""
    assert op_stages("shift run", "000111", CHAIN) == {"000011", "000001", "001111", "011111"}
    # Of the branches of the diamond: one operator, a whole branch, or both.
    assert op_stages("shift run", "011111", DIAMOND) == {"001111", "010111", "001011", "010101"}


def test_shift_tails():
    """The ends of both branches at once, into the join's stage and out of it."""
    assert op_stages("shift tails", "012123", DIAMOND) == {"012333"}
    assert op_stages("shift tails", "012333", DIAMOND) == {"012123"}


def test_merge():
    """Two stages with their devices; the last stage takes the number that is free."""
    where, before = space(CHAIN), draft("001122", "012222")
    for op_stage, device_stage in outcomes("merge", before, where):
        assert set(op_stage) == set(device_stage) == {"0", "1"}
    assert outcomes("merge", draft("000000", "000000"), where) == set()


def test_split():
    """Each part has about the share of the work that it has of the devices."""
    where = space(CHAIN, 3)
    assert outcomes("split", draft("000000", "000"), where) == {
        ("000111", "001"),
        ("000011", "001"),
        ("000001", "001"),
        ("011111", "011"),
        ("001111", "011"),
        ("000111", "011"),
    }


def test_merged_and_split_stages_may_leave_a_replica_its_samples():
    """As others have: two devices with a micro-batch of 4 are as four with one of 8."""
    where = space(CHAIN, 4)

    def sizes(name: str, before: Draft, where: Space) -> set[tuple[str, tuple[int, ...]]]:
        made = (MOVES[name][0](before, where, Random(seed)) for seed in range(300))
        found = [after for after in made if after is not None]
        return {(digits(x.device_stage), x.microbatch) for x in found}

    halves = draft("000111", "0011")
    assert sizes("merge", halves, where) == {("0000", (4,)), ("0000", (8,))}
    whole = draft("000000", "0000")
    assert {("0011", (2, 2)), ("0011", (4, 4))} <= sizes("split", whole, where)
    # Three of four devices would have 3 samples, which is no size here.
    assert {found for found in sizes("split", whole, where) if found[0] == "0001"} == {
        ("0001", (4, 4)),
        ("0001", (4, 1)),
    }
    unflushed = replace(where, flush=False)
    assert {size for _, size in sizes("split", whole, unflushed)} == {(4, 4)}


def test_move_device():
    """One device, never the last one."""
    assert device_stages("move device", "0011") == {"0111", "1011", "0001", "0010"}
    assert device_stages("move device", "011") == {"001", "010"}


def test_give_half():
    """Half of the replicas to another stage."""
    after = device_stages("give half", "000011")
    assert after == {"001111", "011011", "110011", "000001", "000010"}


def test_swaps():
    """Two devices of different stages, or all devices of two stages."""
    assert device_stages("swap devices", "0011") == {"1010", "1001", "0110", "0101"}
    assert device_stages("swap stages", "0001") == {"1110"}


def test_gather_and_scatter():
    """Stages in a row, one stage into a node, or every stage over all nodes."""
    assert device_stages("gather", "01010", op_stage="000111") == {"00011"}
    assert device_stages("gather stage", "0101", node=2) == {"0011", "1100"}
    assert device_stages("scatter", "0011", node=2) == {"0101"}
    assert device_stages("gather stage", "0101") == device_stages("scatter", "0101") == set()


def test_how_stages_run():
    """Sizes by powers of two within the batch, groups, recomputation, warm-up and chains."""
    before, where = draft("000111", "01", microbatch=4), space(CHAIN, 2)

    def after(name: str) -> list[Draft]:
        made = (MOVES[name][0](before, where, Random(seed)) for seed in range(100))
        return [found for found in made if found is not None]

    def setups(name: str, field: str) -> set[tuple[int, ...]]:
        return {getattr(found, field) for found in after(name)}

    assert setups("resize all", "microbatch") == {(2, 2), (8, 8)}
    assert setups("resize stage", "microbatch") == {(2, 4), (8, 4), (4, 2), (4, 8)}
    assert setups("regroup", "k") == {(2, 2), (2, 1), (1, 2)}
    assert setups("recompute stage", "recompute") == {(1, 0), (0, 1)}
    assert setups("recompute all", "recompute") == {(1, 1)}
    assert all(found.deep for found in after("warm-up"))
    assert all(found.chained for found in after("chain"))


def test_a_move_that_has_nothing_to_do_is_drawn_again():
    """One operator on one device: how it runs can change, by a fifth of the moves."""
    where = Space(replace(linked_model(1, []), cluster=cluster(1)), 8, (4, 8))
    before = draft("0", "0")
    drawn = [draw(before, where, Random(seed)) for seed in range(50)]
    sizes = {after.microbatch[0] for after in drawn}
    assert sizes == {4, 8}
    assert sum(after is not before for after in drawn) > 40


def test_nothing_recomputes_where_that_is_not_allowed():
    """And a size that was asked for stays."""
    before, where = draft("000111", "01"), space(CHAIN, 2)
    fixed = Space(where.cost, 8, (4,), recompute=False)
    for name in ("recompute stage", "recompute all", "resize all", "resize stage"):
        assert all(MOVES[name][0](before, fixed, Random(seed)) is None for seed in range(20))


def test_without_a_flush_stages_are_alike():
    """One micro-batch size, groups of one, the least warm-up."""
    before, where = draft("000111", "01", microbatch=2), space(CHAIN, 2)
    unflushed = replace(where, flush=False)
    for name in ("resize stage", "regroup", "warm-up"):
        assert all(MOVES[name][0](before, unflushed, Random(seed)) is None for seed in range(20))
