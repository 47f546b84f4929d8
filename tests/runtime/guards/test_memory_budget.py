"""Ranks that would not fit do not start."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import launch
from anabranch.cluster import GIB
from anabranch.errors import InfeasiblePlanError
from anabranch.plans.plan import Plan
from anabranch.runtime.data_parallel.gradients import Holders
from anabranch.runtime.guards.memory_budget import _beyond_host, _container_free, _host_free
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.plan_parts import parts_of
from tests.runtime.small import batch, built, plan


def predicted(chosen: Plan, *gib: float) -> Plan:
    peaks = tuple(int(each * GIB) for each in gib)
    return replace(chosen, predicted=replace(chosen.predicted, device_peak_bytes=peaks))


def needs(*rows: tuple[float, float, int], given: float = 0) -> list[list[int]]:
    return [
        [int(more * GIB), int(given * GIB), int(free * GIB) if free >= 0 else -1, home]
        for more, free, home in rows
    ]


def test_ranks_of_one_host_add_up() -> None:
    """Their parameters are there already; another host is another matter."""
    both = needs((5, 8, 1), (5, 8.5, 1), (3, 4, 2))
    assert _beyond_host(both, "cpu") == (
        "ranks 0-1 together would take 10.00 GiB more at the peak by the plan's prediction, but "
        "the host or its container has 8.00 GiB free"
    )
    assert _beyond_host(needs((5, 8, 1), (5, 8, 2)), "cpu") == ""
    # Within the margin of a prediction, or with nothing known, it is tried.
    assert _beyond_host(needs((8.5, 8, 1)), "cpu") == ""
    assert _beyond_host(needs((99, -1, 1)), "cuda") == ""


def test_what_training_gives_back_counts_as_free() -> None:
    """A model of 12 GiB was built on a GPU of 16 GiB, and this rank's stage has 3 GiB of it: at its
    peak of 12 GiB the other 9 GiB are gone, though only 4 GiB are free now.
    """
    assert "4.00 GiB free" in _beyond_host(needs((9, 4, 1)), "cuda")
    assert _beyond_host(needs((9, 4, 1), given=9), "cuda") == ""
    # Two ranks on one GPU, with the whole model each.
    assert _beyond_host(needs((9, 2, 1), (9, 2, 1), given=8), "cuda") == ""
    assert _beyond_host(needs((9, 2, 1), (9, 2, 1), given=6), "cuda") != ""


def test_parameters_count_where_a_rank_computes() -> None:
    """Chain on two ranks; what is still on the host takes nothing of a GPU, and gives nothing."""
    model = built("Chain")
    chosen = plan(model, 2)
    holders = Holders.of(parts_of(model.captured, chosen, exact=False), chosen.stage_graph)
    held = model.captured.parameters()
    sizes = [p.numel() * p.element_size() for p in held.values()]
    own, others = holders.resident_bytes(held, 0, torch.device("cpu"))
    assert 0 < own < sum(sizes)
    assert own + others == sum(sizes)
    assert holders.resident_bytes(held, 1, torch.device("cpu")) == (others, own)
    assert holders.resident_bytes(held, 0, torch.device("cuda", 0)) == (0, 0)


def test_what_a_container_leaves(tmp_path: Path) -> None:
    """Version 2 and version 1 of control groups, with and without a limit."""
    assert _container_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600\n")
    assert _container_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert _container_free(tmp_path) == 400
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert _container_free(tmp_path) == 500
    (tmp_path / "memory.current").write_text("1200\n")
    assert _container_free(tmp_path) == 0


def test_what_a_host_has_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert _host_free(meminfo) is None
    meminfo.write_text("MemTotal:  64 kB\nMemFree:  1 kB\nMemAvailable:   12 kB\n")
    assert _host_free(meminfo) == 12 << 10


@pytest.mark.dist
def test_every_rank_is_refused_before_it_starts() -> None:
    """With the same text, though only one would take too much; unless it is switched off."""
    model = built("Chain")
    chosen = predicted(plan(model, 2), 0.5, 10**6)

    def rank() -> tuple[str, float]:
        options: dict[str, Any] = {"captured": model.captured, "timeout": 20.0}
        with pytest.raises(InfeasiblePlanError) as caught:
            Pipeline(model.workload, chosen, **options)
        pipe = Pipeline(model.workload, chosen, check_memory=False, **options)
        return str(caught.value), pipe.step(batch(16))

    found = launch.run(rank, 2, timeout=60.0)
    assert found[0] == found[1]
    text, loss = found[0]
    assert "GiB free; plan with a smaller micro-batch" in text
    assert "check_memory=False" in text
    assert loss > 0
