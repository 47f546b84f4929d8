"""The plan of the first rank, under torchrun."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
import typer

from anabranch import launch
from anabranch.cli.source import ModelSource
from anabranch.cli.torchrun import on_first
from anabranch.cli.training.job import Job
from anabranch.cli.training.local_run import looks_of
from anabranch.errors import InfeasiblePlanError
from anabranch.plans.plan import Plan
from anabranch.plans.stages import Stage
from tests.cli.examples import TOWERS, a_plan, four
from tests.emulation.models import chain, job, machines

pytestmark = pytest.mark.dist


def as_torchrun(search: Callable[[], Plan]) -> Plan:
    """The plan of a rank that torchrun has started."""
    os.environ["RANK"] = str(dist.get_rank())
    return on_first(search)


def test_all_ranks_have_the_plan_of_the_first() -> None:
    """With its cluster and its figures; the others do not search."""
    on = machines(2)
    plan = replace(job(chain(2), [(0,), (1,)], on)[0], notes=("by hand",), shard_optimizer=True)

    def search() -> Plan:
        assert dist.get_rank() == 0
        return plan

    assert launch.run(lambda: as_torchrun(search), 2, timeout=60.0) == [plan, plan]


def test_the_first_rank_says_why_there_is_none() -> None:
    """The others just end."""

    def search() -> Plan:
        raise InfeasiblePlanError("needs 20 GiB")

    def rank() -> str:
        with pytest.raises((InfeasiblePlanError, typer.Exit)) as caught:
            as_torchrun(search)
        return type(caught.value).__name__

    assert launch.run(rank, 2, timeout=60.0) == ["InfeasiblePlanError", "Exit"]


def test_another_plan_has_the_traits_of_the_plan_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients by rows and shared optimizer state are no question of speed alone."""
    traits = {"shard_optimizer": True, "sparse_embeddings": True}
    plan = replace(a_plan(Stage(("0",), (0, 1), 4)), **traits)
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    job = Job(ModelSource(TOWERS), plan)
    job.profile = four().profile
    looks = looks_of(job, replans=True)
    assert looks is not None
    assert looks.replanner.options == traits
