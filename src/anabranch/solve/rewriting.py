"""Choice among plans for the same model, as written and with its graph rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anabranch.cost import CostModel
from anabranch.errors import CaptureError, InfeasiblePlanError
from anabranch.plans.plan import AS_WRITTEN, Plan
from anabranch.profile.profile import Profile
from anabranch.solve.bound import least_s_per_sample
from anabranch.solve.settings import SETTINGS

TOO_LARGE = ("table-split=4", "tensor-split=4")
"""Rewrites that are also tried if no plan of the model as it is written fits."""


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


@dataclass
class TriedRewrites:
    """Plans of one model, as it is written and with rewrites.

    Attributes:
        costs: profile of the model as it is written.
        written: plan of the model as it is written; None where nothing fits.
        plans: rewrites, joined by commas -> their plan, and the profile that it rests on.
        errors: rewrites -> why there is no plan.
    """

    costs: Profile
    written: Plan | None = None
    plans: dict[str, tuple[Plan, Profile]] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)

    @property
    def best(self) -> Plan | None:
        return choose_rewrite(self.written, [plan for plan, _ in self.plans.values()])

    def chosen(self) -> Plan:
        """Return the plan to take, with a note on the gain of its rewrites."""
        assert self.best is not None
        if self.written is None or self.best is self.written:
            return self.best
        return replace(self.best, notes=(*self.best.notes, gain_note(self.written, self.best)))

    def origin(self, plan: Plan) -> tuple[tuple[str, ...], Profile]:
        for names, (other, profile) in self.plans.items():
            if other is plan:
                return tuple(names.split(",")), profile
        return (), self.costs

    def document(self) -> dict[str, Any]:
        """Return the step of each rewrite that was tried, or why it has no plan."""
        if not self.plans and not self.errors:
            return {}
        tried: dict[str, Any] = {
            n: {"step_s": p.figures.step_s} for n, (p, _) in self.plans.items()
        }
        tried |= {name: {"error": str(error)} for name, error in self.errors.items()}
        written_s = None if self.written is None else self.written.figures.step_s
        return {"rewrites_tried": tried, "as_written_step_s": written_s}

    def lines(self) -> Iterator[str]:
        """A line for each rewrite that was tried and is not in the best plan."""
        best = self.best
        for name, (plan, _) in self.plans.items():
            if plan is not best:
                gain = "" if self.written is None else f", {gain_note(self.written, plan)}"
                yield f"rewrite {name}: {plan.figures.step_s * 1e3:.2f} ms a step{gain}; not taken"
        for name, error in self.errors.items():
            yield f"rewrite {name}: none, {error}"


def plan_with_rewrites(
    costs: Profile,
    profile_of: Callable[[tuple[str, ...]], Profile],
    search: Callable[[Profile], Plan],
    *,
    tries: bool = True,
    announce: Callable[[str], None] = lambda text: None,
) -> TriedRewrites:
    """Plan a model as it is written and, if asked to, with each rewrite that may make its step
    shorter: first those of joins; then, on top of the best, those of tables that hold up the step.

    Args:
        costs: profile of the model as it is written. If nothing fits, ``TOO_LARGE`` are tried as
            well; no rewrite is tried if the model's optimizer needs whole parameters.
        profile_of: returns the profile of the model with rewrites.
        tries: whether to try rewrites.
        announce: called with a text on what begins.

    Raises:
        InfeasiblePlanError: if no plan fits.
    """
    tried, failure, whole = TriedRewrites(costs), None, costs.graph.whole_parameters
    whole_only = InfeasiblePlanError(
        f"{', '.join(costs.graph.rewrites) or 'it'} cuts parameters, and the optimizer of the "
        "model is not known to treat each element of them alone, as SGD, Adam, AdamW and Adagrad do"
    )
    if whole and costs.graph.rewrites:
        raise whole_only

    def attempt(*names: str) -> None:
        key = ",".join(names)
        announce(f"trying rewrite {key}")
        try:
            rewritten = profile_of(names)
            announce(f"planning with rewrite {key}")
            tried.plans[key] = search(rewritten), rewritten
        except (CaptureError, InfeasiblePlanError) as error:
            tried.errors[key] = error

    try:
        tried.written = search(costs)
    except InfeasiblePlanError as error:
        failure = error
    if tries and whole:
        tried.errors, tries = dict.fromkeys(costs.graph.rewritable, whole_only), False
    if tries and not (tried.written is not None and tried.written.interrupted):
        for name in (*costs.graph.rewritable, *(() if tried.written else TOO_LARGE)):
            attempt(name)
        best = tried.best
        if best is not None and not best.interrupted:
            names, profile = tried.origin(best)
            for name in splits_of_tables(best, profile):
                attempt(*names, name)
    if failure is not None and tried.best is None:
        raise failure
    return tried
