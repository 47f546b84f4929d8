"""Ranks that torchrun has started, as the environment tells."""

from __future__ import annotations

import os
from collections.abc import Callable

import typer

from anabranch.errors import AnabranchError
from anabranch.plans.plan import Plan


def is_rank() -> bool:
    return "RANK" in os.environ


def is_first() -> bool:
    """Return True for the first rank, and without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def num_ranks() -> int | None:
    """Return the ranks that torchrun has started, on all hosts; None without it."""
    size = os.environ.get("WORLD_SIZE")
    return None if size is None else int(size)


def is_restarted() -> bool:
    """Return True if torchrun has started the ranks again."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from anabranch.runtime.ranks.process_groups import join

        join()  # after which all ranks have the same count
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def begin_surviving() -> int | None:
    """Make the first rank of torchrun the parent of all ranks, as ``--survive`` needs: torchrun
    ends all that it has started when one of them dies. The others have nothing to do, and end.

    Returns:
        Number of ranks that the parent is to start; None without torchrun.
    """
    size = os.environ.get("WORLD_SIZE")
    if not is_rank() or size is None:
        return None
    if os.environ.get("LOCAL_WORLD_SIZE") != size:
        raise typer.BadParameter(
            "--survive: the ranks are on several hosts, and each of torchrun's agents ends and "
            "starts those of its own host when one dies, so no rank outlives another; give "
            "--max-restarts to torchrun, and --save-every here"
        )
    if not is_first():
        raise typer.Exit
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    return int(size)


def on_first(make: Callable[[], Plan]) -> Plan:
    """Make a plan here or, under torchrun, on the first rank, whose plan the others take, as
    measurements differ.
    """
    if not is_rank():
        return make()
    import torch.distributed as dist

    from anabranch.files import plan_from_dict, plan_to_dict
    from anabranch.runtime.ranks import texts
    from anabranch.runtime.ranks.process_groups import join

    join()
    plan, failure = None, None
    if dist.get_rank() == 0:
        try:
            plan = make()
        except AnabranchError as error:
            failure = error
    document = {} if plan is None else plan_to_dict(plan)
    received = texts.gather(document)[0]
    if failure is not None:
        raise failure
    if not received:
        raise typer.Exit(1)  # the first rank says why; the others just end
    return plan or plan_from_dict(received)
