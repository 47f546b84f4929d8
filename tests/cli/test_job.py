"""The plan of the first rank, under torchrun."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist
import typer

from anabranch import launch
from anabranch.cli.job import agreed
from anabranch.errors import InfeasiblePlanError
from anabranch.plans.plan import Plan
from tests.emulation.models import chain, job, machines

pytestmark = pytest.mark.dist


def test_all_ranks_have_the_plan_of_the_first() -> None:
    """With its cluster and its figures; the others do not search."""
    on = machines(2)
    plan = replace(job(chain(2), [(0,), (1,)], on)[0], notes=("by hand",), shard_optimizer=True)

    def search() -> Plan:
        assert dist.get_rank() == 0
        return plan

    assert launch.run(lambda: agreed(search), 2, timeout=60.0) == [plan, plan]


def test_the_first_rank_says_why_there_is_none() -> None:
    """The others just end."""

    def search() -> Plan:
        raise InfeasiblePlanError("needs 20 GiB")

    def rank() -> str:
        with pytest.raises((InfeasiblePlanError, typer.Exit)) as caught:
            agreed(search)
        return type(caught.value).__name__

    assert launch.run(rank, 2, timeout=60.0) == ["InfeasiblePlanError", "Exit"]
