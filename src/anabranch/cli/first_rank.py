"""Plans that only the first rank of torchrun makes, for all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from anabranch.errors import AnabranchError

if TYPE_CHECKING:
    from anabranch.plans.plan import Plan


def on_first(make: Callable[[], Plan]) -> Plan:
    """Call a function here or, under torchrun, on the first rank alone."""
    return agreed(make) if "RANK" in os.environ else make()


def agreed(search: Callable[[], Plan]) -> Plan:
    """Under torchrun: the first rank plans, the others take its plan (measurements differ)."""
    import torch.distributed as dist

    from anabranch.files import plan_from_dict, plan_to_dict
    from anabranch.runtime import texts
    from anabranch.runtime.process_groups import join

    join()
    plan, failure = None, None
    if dist.get_rank() == 0:
        try:
            plan = search()
        except AnabranchError as error:
            failure = error
    document = {} if plan is None else plan_to_dict(plan)
    received = texts.from_first(document)
    if failure is not None:
        raise failure
    if not received:
        raise typer.Exit(1)  # the first rank says why; the others just end
    return plan or plan_from_dict(received)
