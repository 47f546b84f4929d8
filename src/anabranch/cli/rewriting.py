"""Rewrites of the model that ``plan`` tries, and texts on their gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import typer

from anabranch.cli.parsing import usage
from anabranch.cli.progress import announce
from anabranch.cli.source import ModelSource
from anabranch.errors import CaptureError, InfeasiblePlanError

if TYPE_CHECKING:
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile

TOO_LARGE = ("table-split=4", "tensor-split=4")
"""Rewrites that are also tried if no plan of the model as it is written fits."""


def named_rewrites(text: str, source: ModelSource, mode: str) -> tuple[str, ...] | None:
    """Return the rewrites that the user names; None for ``auto``."""
    if text in ("auto", "none"):
        return None if text == "auto" and mode == "sync" and not source.is_file else ()
    from anabranch.graph.rewrites import Rewrite  # imports torch

    names = tuple(text.split(","))
    for name in names:
        usage(Rewrite.parse, name)
    if source.is_file:
        raise typer.BadParameter(
            f"{source.model} is a profile, whose operators are measured as they are; --rewrite "
            "needs the model itself, by name or package.module:function"
        )
    if mode != "sync":
        raise typer.BadParameter(
            "--rewrite is for --mode sync: without a flush slices of one parameter would have "
            "versions of different age"
        )
    return names


def required_rewrites(text: str, source: ModelSource, mode: str = "sync") -> tuple[str, ...]:
    """Return the rewrites that the user names, for a verb that does not choose them."""
    if text == "auto":
        raise typer.BadParameter(
            "--rewrite auto is for plan, which chooses; here name rewrites, such as join-split, "
            "or none"
        )
    return named_rewrites(text, source, mode) or ()


@dataclass
class Tried:
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
        """The plan to take, if there is any."""
        from anabranch.solve import choose_rewrite

        return choose_rewrite(self.written, [plan for plan, _ in self.plans.values()])

    def origin(self, plan: Plan) -> tuple[tuple[str, ...], Profile]:
        """The rewrites and the profile of a plan."""
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
        from anabranch.solve import gain_note

        best = self.best
        for name, (plan, _) in self.plans.items():
            if plan is not best:
                gain = "" if self.written is None else f", {gain_note(self.written, plan)}"
                yield f"rewrite {name}: {plan.figures.step_s * 1e3:.2f} ms a step{gain}; not taken"
        for name, error in self.errors.items():
            yield f"rewrite {name}: none, {error}"


def plan_with_rewrites(
    source: ModelSource,
    costs: Profile,
    profile_of: Callable[[ModelSource], Profile],
    search: Callable[[Profile], Plan],
    *,
    tries: bool,
) -> Tried:
    """Plan a model as it is written and, if asked to, with each rewrite that may make its step
    shorter: first those of joins; then, on top of the best, those of tables that hold up the step.

    Args:
        costs: profile of the model as it is written. If nothing fits, ``TOO_LARGE`` are tried as
            well; no rewrite is tried if the model's optimizer needs whole parameters.
    """
    from anabranch.solve import splits_of_tables

    tried, failure, whole = Tried(costs), None, costs.graph.whole_parameters
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
            rewritten = profile_of(replace(source, rewrites=names, batch_size=None))
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
