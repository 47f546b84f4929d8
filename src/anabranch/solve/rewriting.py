"""Choice among plans for the same model, as written and with its graph rewritten."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.cost import CostModel
from anabranch.plans.plan import AS_WRITTEN, Plan
from anabranch.profile.profile import Profile
from anabranch.solve.bound import least_s_per_sample
from anabranch.solve.settings import SETTINGS


def splits_of_tables(plan: Plan, profile: Profile) -> list[str]:
    """Return rewrites that cut embedding tables which hold up a plan, if devices suffice.

    A table is heavy if looking up, summing and updating its rows takes more than the share
    ``SETTINGS.heavy`` of the step. Each is cut into as many parts, a power of two, as there are
    devices for it.
    """
    if plan.machines is None:
        return []
    batch_size = plan.stage_graph.batch_size
    cost = CostModel(profile, plan.machines, sparse_embeddings=plan.sparse_embeddings)
    compute_s = least_s_per_sample(cost, batch_size) * batch_size
    tables = [
        (name, float(seconds) + cost.update.seconds(1, cost.parameters[name].nbytes))
        for op, seconds in zip(profile.graph.ops, compute_s, strict=True)
        for name in op.parameters
        if cost.parameters[name].table is not None
    ]
    heavy = [name for name, seconds in tables if seconds > SETTINGS.heavy * plan.figures.step_s]
    if not heavy or 2 * len(heavy) > plan.machines.num_devices:
        return []
    parts = 1 << (plan.machines.num_devices // len(heavy)).bit_length() - 1
    sites = "" if len(heavy) == len(tables) else f"@{'+'.join(heavy)}"
    return [f"table-split={parts}{sites}"]


def choose_rewrite(written: Plan | None, rewritten: Sequence[Plan]) -> Plan | None:
    """Return the plan with the shortest step; ``written`` unless another one saves enough.

    Args:
        written: plan for the model as written; None where none fits.
    """
    best = min(rewritten, key=lambda plan: plan.figures.step_s, default=None)
    if written is None or best is None:
        return written or best
    is_shorter = best.figures.step_s < (1 - SETTINGS.least_gain) * written.figures.step_s
    return best if is_shorter else written


def rewrite_notes(rewrites: Iterable[str]) -> list[str]:
    """Return a sentence on each rewrite of a model."""
    notes = []
    for text in rewrites:
        rule, _, names = text.partition("@")
        sites = names.split("+")
        where = ", ".join(sites) if len(sites) < 4 else f"{len(sites)} parameters"
        notes.append(f"rewritten by {rule} at {where}")
    return notes


def gain_note(written: Plan, rewritten: Plan) -> str:
    """Return words for the gain of rewrites in the step."""
    written_s, step_s = written.figures.step_s, rewritten.figures.step_s
    return f"{written_s / step_s:.2f}x against {written_s * 1e3:.2f} ms {AS_WRITTEN}"
