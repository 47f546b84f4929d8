"""The order in which ranks give their GPUs what waits for other GPUs.

Programs are recorded from real runs (``cases``); the runtime's own transport, handshake and sums
give them to GPUs of a model (``gpu``), whose hosts may wait for their device at any call.
"""

import os
import random
from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from tests.gpu_model.cases import record
from tests.gpu_model.gpu import HangError, RaceError, World
from tests.gpu_model.replay import Programs, replay

pytestmark = pytest.mark.dist

DRAWS = int(os.environ.get("ANABRANCH_GPU_MODEL_DRAWS", "100"))


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, Programs]:
    return record()


def drawn(seed: int, *, user_may_wait: bool = True) -> dict[str, Any]:
    """A schedule, and waits that are injected into it: at few calls or at all."""
    draws = random.Random(seed)
    share = draws.choice([0.02, 0.1, 0.5, 1.0])
    return {
        "seed": seed,
        "injected": lambda rank, call: draws.random() < share,
        "lag": draws.choice([0.0, 0.5, 0.9, 1.0]),
        "user_waits": user_may_wait and draws.random() < 0.5,
    }


def hangs(programs: Programs, order: str, draws: int, **options: Any) -> Counter[str]:
    """Count how replays end."""
    ends: Counter[str] = Counter()
    for seed in range(draws):
        try:
            replay(programs, order=order, **drawn(seed, user_may_wait=False), **options)
            ends["ends"] += 1
        except HangError:
            ends["hangs"] += 1
    return ends


def test_no_schedule_hangs_and_no_memory_is_touched_in_no_order(
    recorded: Mapping[str, Programs],
) -> None:
    """Steps with and without a barrier, of long and short batches, without a flush, evaluation,
    checkpoints, another plan, tied weights, replicas, shared state, several stages on a device:
    whatever the order of hosts and devices, and wherever a host waits for its device. More are
    drawn with ``ANABRANCH_GPU_MODEL_DRAWS``.
    """
    names = list(recorded)
    for seed in range(DRAWS):
        name = names[seed % len(names)]
        try:
            replay(recorded[name], **drawn(seed))
        except (HangError, RaceError) as error:
            pytest.fail(f"{name}, draw {seed}: {error}")


def test_a_wait_at_every_call_in_turn(recorded: Mapping[str, Programs]) -> None:
    """As a kernel that is loaded where it is first launched waits for the device once."""
    programs = recorded["two stages: step"]
    for rank in range(2):
        for call in range(1, 120):
            replay(programs, seed=call, injected=lambda r, c, at=(rank, call): (r, c) == at)


def test_kernels_that_take_all_multiprocessors_hang(recorded: Mapping[str, Programs]) -> None:
    """Why connections have a bounded number of blocks: in any order, a kernel that waits for one
    that its own computation has to feed must leave it room.
    """
    assert hangs(recorded["four stages: steps"], "", 20, multiprocessors=3)["hangs"] > 0


CHAIN: Programs = [
    [("receive", 0, 1, 1), ("take", 0), ("receive", 1, 2, 2), ("take", 1), ("settle",)],
    [("send", 2, 3), ("send", 0, 1), ("settle",)],
    [("receive", 0, 1, 3), ("send", 0, 2), ("take", 0), ("settle",)],
]
"""Rank 0 receives from rank 2 behind what it receives from rank 1, which sends to rank 2."""


def test_nothing_is_given_behind_what_may_wait_for_a_host() -> None:
    """Rank 2 has sent to rank 0, whose receive stands behind that of another message; its sender,
    rank 1, waits for its device, which waits for rank 2 to receive, and rank 2 for its own.
    """
    for seed in range(200):
        replay(CHAIN, **drawn(seed, user_may_wait=False))
    assert hangs(CHAIN, "behind anything", 200)["hangs"] > 0


_SUM = [("start", 0, (1, 2), ""), ("finish", 0), ("look",), ("settle",)]
SUM: Programs = [
    [("receive", 0, 1, 1), ("compute", "a"), ("send", 2, 2), ("take", 0), ("settle",)],
    [("send", 0, 1), *_SUM],
    [("receive", 0, 0, 2), ("take", 0), *_SUM],
]
"""Rank 2 comes to its sum when rank 0 has sent it something, which may wait for rank 1's send."""


def test_sums_begin_when_all_hosts_have_come() -> None:
    """A sum on a device spins until all others have it, whose hosts may need this one before."""
    for seed in range(100):
        replay(SUM, **drawn(seed, user_may_wait=False))
    assert hangs(SUM, "sums at once", 100)["hangs"] > 0


def test_the_model_has_queues_and_multiprocessors() -> None:
    """What cannot begin holds up what is behind it in a queue, on whatever stream; and a kernel
    that spins keeps its multiprocessors from others.
    """

    def ends(**options: Any) -> bool:
        world = World(2, **options)

        def host(rank: int) -> None:
            one = ("one", 2)
            device = world.devices[rank]
            if rank == 0:
                made = device.give("compute", "a")
                device.give("in", "receive", blocks=1, partners=one)
                device.give("compute", "b", [made], blocks=1)
                device.give("out", "send", [device.place("compute")], blocks=1, partners=("two", 2))
            else:
                got = device.give("in", "receive", blocks=1, partners=("two", 2))
                device.give("out", "send", [got], blocks=1, partners=one)

        try:
            world.run([lambda: host(0), lambda: host(1)])
        except HangError:
            return False
        return True

    assert [ends(num_queues=q, multiprocessors=m) for q, m in product((1, 8), (1, 4))] == [
        False,
        True,
        False,
        True,
    ]
