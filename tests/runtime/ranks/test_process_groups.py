"""Process groups: the backend that all ranks choose alike, their first use and their end."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from anabranch import launch
from anabranch.errors import InvalidPlanError, StageFailedError
from anabranch.runtime.guards.timeouts import TIMEOUTS
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.ranks import mesh as meshes
from anabranch.runtime.ranks import process_groups
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.ranks.process_groups import (
    abort,
    blocks_of,
    choose_backend,
    connection_bytes,
    device_digest,
    listens_to_all,
    nccl_digest,
    require_streams,
)
from anabranch.workload import Workload
from tests.runtime.small import batch, built, plan

NO_GPU = bytes(32)


@st.composite
def ranks(draw: st.DrawFn) -> list[bytes]:
    """Ranks with a few GPUs, some of them shared, some missing or without NCCL."""
    gpus = [bytes([g]) * 32 for g in range(1, draw(st.integers(1, 16)) + 1)]
    one = st.sampled_from(gpus) | st.just(NO_GPU) if draw(st.booleans()) else st.sampled_from(gpus)
    return draw(st.lists(one, min_size=1, max_size=12, unique=draw(st.booleans())))


@given(seen=ranks())
def test_nccl_needs_a_gpu_of_its_own_for_every_rank(seen: list[bytes]) -> None:
    """However many GPUs a host shows to a rank: two ranks on one GPU of many would fail under NCCL,
    and one visible GPU per rank is enough for it. All ranks see the same, so they choose the same.
    """
    own = all(gpu != NO_GPU and gpu not in seen[i + 1 :] for i, gpu in enumerate(seen))
    assert choose_backend(seen) == ("nccl" if own else "gloo")
    assert choose_backend(seen[::-1]) == choose_backend(seen)


def test_a_device_without_nccl_has_no_digest() -> None:
    """As long as that of a GPU: ranks gather them."""
    assert nccl_digest(torch.device("cpu")) == NO_GPU
    assert any(device_digest(torch.device("cpu")))


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 00000000:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2
   2: 00000000:1F92 0100007F:1F93 01 00000000:00000000 00:00000000 00000000     0        0 3
"""


def test_a_port_of_all_interfaces_is_known(tmp_path: Path) -> None:
    """Port 8080 listens on loopback, 8081 everywhere; 8082 is a connection."""
    table = tmp_path / "tcp"
    table.write_text(TABLE)
    tables = str(table), str(tmp_path / "no such file")
    assert [listens_to_all(port, tables) for port in (8080, 8081, 8082, 1)] == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.dist
def test_groups_on_gpus_connect_at_the_start_in_one_order() -> None:
    """NCCL connects a group when it is first used and blocks the host meanwhile. Inside of a
    backward of one rank, that may be before it has sent what another member needs to come there.
    """
    sets = [(0, 1), (0, 2), (1, 2), (0, 1, 2)]

    def rank() -> list[tuple[int, ...]]:
        used: list[tuple[int, ...]] = []
        all_reduce, new_group = dist.all_reduce, dist.new_group

        def noted(tensor: torch.Tensor, *, group: Any, **options: Any) -> Any:
            used.append(tuple(dist.get_process_group_ranks(group)))
            return all_reduce(tensor, group=group, **options)

        def on_gloo(members: Sequence[int], **options: Any) -> Any:
            return new_group(members, **{**options, "backend": "gloo"})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(meshes, "choose_backend", lambda seen: "nccl")
            patch.setattr(dist, "new_group", on_gloo)
            patch.setattr(dist, "all_reduce", noted)
            Mesh(range(3), sets, timeout=20.0)
        return used[:-1]  # the last is the barrier

    expected = sorted(sets)
    for number, used in enumerate(launch.run(rank, 3, timeout=60.0)):
        assert used == [members for members in expected if number in members]


def test_nobody_waits_long_for_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group may take up to its timeout, and the user's error waits for it."""
    let_go = threading.Event()
    begun: list[str] = []

    def aborts(groups: Sequence[str]) -> None:
        begun.extend(groups)
        let_go.wait(60.0)

    monkeypatch.setattr(process_groups, "TIMEOUTS", replace(TIMEOUTS, abort_s=0.01))
    monkeypatch.setattr(process_groups, "_abort", aborts)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    groups: Any = ["a", "b"]
    abort(groups)
    assert begun == ["a", "b"]
    let_go.set()


def test_more_connections_than_queues_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them in one queue would wait for each other, though nothing in the plan does. A rank
    with 14 connections has 28 streams for them and 4 others.
    """
    gpu, name = torch.device("cuda"), "CUDA_DEVICE_MAX_CONNECTIONS"
    star = [(0, rank) for rank in range(1, 15)]
    monkeypatch.setenv(name, "32")
    require_streams(star, 15, gpu)
    with pytest.raises(InvalidPlanError, match=r"rank 0 has 15 .* 34 streams .* are 32; plan"):
        require_streams([*star, (1, 0)], 15, gpu)
    monkeypatch.setenv(name, "31")
    with pytest.raises(InvalidPlanError, match=f"but {name} is 31, .* set {name}=32 in the"):
        require_streams(star, 15, gpu)
    require_streams(star[:13], 15, gpu)
    monkeypatch.delenv(name)
    require_streams(star[:2], 15, gpu)
    with pytest.raises(InvalidPlanError, match=f"but {name} is 8"):
        require_streams(star[:3], 15, gpu)


def test_waiting_kernels_leave_room_for_others() -> None:
    """All connections of the busiest rank together take 16 multiprocessors at most, and each as
    many as a link needs; every rank comes to the same number.
    """
    assert [blocks_of([(0, r) for r in range(1, n + 1)], 40) for n in (0, 1, 4, 5, 8, 32, 39)] == [
        0, 8, 4, 3, 2, 1, 1,
    ]  # fmt: skip
    assert connection_bytes([(0, 1), (1, 0), (1, 2)], 3, 1) == 3 * 5 * (4 << 20)
    assert connection_bytes([(0, 1), (1, 0), (1, 2)], 3, 2) == 5 * (4 << 20)


def test_groups_are_aborted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """To destroy a group waits for its kernels, which wait for a rank that is gone; to abort one
    may wait for the kernels of another, unless both are aborted as one.
    """
    told: list[str] = []

    class Backend:
        def _group_start(self) -> None:
            told.append("begin")

        def _group_end(self) -> None:
            told.append("end")

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def _get_backend(self, device: torch.device) -> Backend:
            return Backend()

    def aborted(group: Group) -> None:
        told.append(group.name)
        if group.name == "a":
            raise RuntimeError("NCCL error")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(process_groups.distributed_c10d, "_abort_process_group", aborted)
    groups: Any = [Group("a"), Group("b")]
    abort(groups)
    assert told == ["begin", "a", "b", "end"]


@pytest.mark.dist
def test_a_failure_aborts_and_a_clean_end_does_not() -> None:
    """Only who ends after a failure may leave kernels behind."""

    def rank() -> list[str]:
        told: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(meshes, "abort", lambda groups: told.append("abort"))
            patch.setattr(meshes.dist, "destroy_process_group", lambda _: told.append("destroy"))
            Mesh(range(2), timeout=20.0).close()
            chain = built("Chain")
            pipeline = Pipeline(Workload(chain.module, batch(4)), plan(chain, 2, batch_size=4))
            with pytest.raises(StageFailedError), pipeline._session.failing():
                raise ValueError("of this rank")
        return [name for name, _ in groupby(told)]

    assert launch.run(rank, 2, timeout=60.0) == [["destroy", "abort", "destroy"]] * 2
