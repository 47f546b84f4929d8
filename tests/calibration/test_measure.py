"""The whole calibration, on local ranks, with windows too short for good figures."""

from __future__ import annotations

import os
from itertools import combinations
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist

from anabranch import launch
from anabranch.calibration import measure, overheads, side_by_side
from anabranch.calibration.machine import this_machine
from anabranch.calibration.measure import Seen, calibrate, gathered, joined
from anabranch.calibration.messages import SIZES, Exchange, Line
from anabranch.calibration.overheads import Overheads
from anabranch.calibration.side_by_side import Pace
from anabranch.calibration.sums import Sums
from anabranch.cluster import BUSY, Calibration
from tests.calibration import examples


@pytest.mark.dist
def test_a_calibration_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    """Two of its ranks, all links between them, and figures that a cluster accepts."""
    monkeypatch.setattr(overheads, "_TURNS", 1)
    monkeypatch.setattr(side_by_side, "_ROUNDS", 1)
    monkeypatch.setattr(side_by_side, "_WINDOW_S", 0.01)
    monkeypatch.setattr(side_by_side, "counts", lambda cores, most: (1, 2))
    before = torch.random.get_rng_state()
    found = calibrate()
    assert torch.equal(before, torch.random.get_rng_state())
    cluster, calibration = found.cluster, found.cluster.calibration
    assert cluster.name == f"local:{cluster.cores}"
    assert cluster.num_devices == cluster.cores == this_machine().cores
    assert list(found.links) == [(0, 1)]
    assert calibration is not None
    assert calibration.machine == this_machine()
    assert len(calibration.slowdown) == 2
    assert [x.nbytes for x in found.links[0, 1]] == list(SIZES)
    assert min(x.send_s for x in found.links[0, 1]) > 0
    assert calibration.memory_bandwidth > 0


@pytest.mark.dist
def test_hosts_with_other_cores_wait_as_often_as_the_first(monkeypatch: pytest.MonkeyPatch):
    """The second rank takes its host for one of a single core and rank."""
    monkeypatch.setattr(side_by_side, "_ROUNDS", 1)
    monkeypatch.setattr(side_by_side, "_WINDOW_S", 0.01)

    def seen() -> list[list[int]]:
        if dist.get_rank() == 1:
            monkeypatch.setattr(os, "cpu_count", lambda: 1)
        ks = (1, 2) if dist.get_rank() == 0 else (1,)
        return [sorted(paces) for paces in measure._rank(ks, lambda done, total: None).paces]

    first, second = launch.run(seen, 2)
    assert first == second


def test_what_ranks_have_seen_is_one_cluster():
    """Two hosts of two ranks. A message takes 1 s and half a second per byte inside a host and four
    times as long between them; its ends 3 s and 5 s, and 1 s and 2 s per byte. Each of 48
    parameters that are summed or shared has a part of a message with one value. Others took one
    and three quarters of a core, of which a rank that computed alone saw nothing.
    """
    message_s = 3.0 + 5.0 + 2 * 0.0625

    def exchanges(times: int) -> list[Exchange]:
        return [Exchange(n, times * (1 + n / 2), 3.0 + n, 5.0 + 2 * n) for n in SIZES]

    hosts = "aabb"
    pairs = list(combinations(range(4), 2))
    links = {(a, b): exchanges(1 if hosts[a] == hosts[b] else 4) for a, b in pairs}
    seen = [
        Seen(
            hosts[rank],
            2,
            ({1: [Pace(1.0, 1.0)] if rank in (0, 2) else [], 2: [Pace(1.5, 1.5)]},),
            {sum(pair) - rank: link for pair, link in links.items() if rank in pair},
            Sums(Line(2.0 + message_s / 48, 4.0), Line(0.5 + message_s / 48, 0.25))
            if rank in (0, 1)
            else None,
            Overheads(1.0, 2.0, 0.125, 0.25, 100.0, value_s=0.0625) if rank == 0 else None,
        )
        for rank in range(4)
    ]
    found = joined(seen, name="two hosts", devices=4, others=1.75)
    assert sorted(found.links) == pairs
    assert [(x.name, x.size) for x in found.cluster.levels] == [("host", 2), ("network", 2)]
    figures = [(x.latency_s, x.bandwidth) for x in found.cluster.levels]
    assert figures == [(pytest.approx(1.0), 2.0), (pytest.approx(4.0), 0.5)]
    assert found.cluster.calibration == Calibration(
        this_machine(),
        ANY,
        slowdown=(1.0, 1.5),
        send_s=3.0,
        send_byte_s=1.0,
        receive_s=5.0,
        receive_byte_s=2.0,
        microbatch_s=0.125,
        step_s=0.25,
        sum_tensor_s=2.0,
        sum_byte_s=4.0,
        memory_bandwidth=100.0,
        lost_share=1.75,
        share_tensor_s=0.5,
        share_byte_s=0.25,
        value_s=0.0625,
    )


@pytest.mark.dist
def test_ranks_tell_what_they_have_seen():
    """To the last bit, whatever a rank has, and as text."""
    ends = {1: [Exchange(256, 0.1, 0.2, 1 / 3)]}
    seen = [
        Seen(
            "a \u00fc",
            2,
            ({1: [Pace(0.1, 0.2)], 2: []},),
            ends,
            None,
            Overheads(0.1, 0.2, 0.3, 0.4, 0.5),
        ),
        Seen("b", 2, ({1: [], 2: [Pace(1e-9, 2e-9)]},), {}, Sums(Line(0.1, 1e-30), Line(1.0, 2.0))),
    ]

    def rank() -> list[Seen]:
        return gathered(seen[dist.get_rank()])

    assert launch.run(rank, 2, timeout=60.0) == [seen, seen]


def test_a_busy_machine_is_said():
    """What others took while it was measured makes figures doubtful, and the user has to know."""
    assert examples.calibration(lost_share=BUSY).remark == ""
    assert "took 40% of a core" in examples.calibration(lost_share=0.4).remark
    assert "took 3.2 cores while" in examples.calibration(lost_share=3.2).remark
