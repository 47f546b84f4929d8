"""A plan that was found, beside its baselines: as a document and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anabranch.cli.comparison import (
    STALENESS_WORDS,
    plan_or_error,
    plans_among,
    ratio,
    staleness_document,
    staleness_of,
    staleness_table,
)
from anabranch.cli.output import print_table, say
from anabranch.errors import AnabranchError
from anabranch.plans.baselines import BASELINES, gain_text, is_as_fast
from anabranch.plans.plan import Plan, time_text

if TYPE_CHECKING:
    from anabranch.profile.profile import Profile
    from anabranch.solve import Explanation, TriedRewrites
    from anabranch.weights import OptimizerFacts


@dataclass(frozen=True)
class PlannedModel:
    """All that a search has found out about a model.

    Attributes:
        best: the plan.
        costs: profile that it rests on.
        tried: rewrites that were tried.
        others: baseline -> its plan, or why there is none.
        why: explanation of the plan; None without a flush, or where the user stopped waiting.
        optimizer: facts of the optimizer, without a flush.
        seconds: seconds from the beginning of the search to the end of the explanation.
        flushed: text on training with a flush, for a plan without one.
        max_replicas: most replicas of a stage that the user allows.
    """

    best: Plan
    costs: Profile
    tried: TriedRewrites
    others: Mapping[str, Plan | AnabranchError]
    why: Explanation | None
    optimizer: OptimizerFacts | None
    seconds: float
    flushed: str = ""
    max_replicas: int | None = None

    def document(self) -> dict[str, Any]:
        """Return the plan as its file has it, its baselines, and why it is as it is."""
        from anabranch.files import plan_to_dict

        best, others, graph = self.best, self.others, self.costs.graph
        step_s = {name: other.figures.step_s for name, other in plans_among(others).items()}
        document = plan_to_dict(best) | {"rewrites": list(best.rewrites), **self.tried.document()}
        document |= {
            "baselines": {name: plan_or_error(name, p) for name, p in others.items()},
            "gain": {name: ratio(other_s, best.figures.step_s) for name, other_s in step_s.items()},
            "loss_kind": graph.loss_kind,
            "normalised": list(graph.normalised),
            "stateful": list(graph.stateful),
        }
        if self.why is not None:
            document["explanation"] = self.why.to_dict()
        if best.mode == "async":
            document["optimizer"] = self.optimizer.name if self.optimizer is not None else None
        return document | staleness_document(best, self.optimizer)

    def say(self) -> None:
        """Print the plan, what it gains, what the user should know of it, and why it is so."""
        from anabranch.graph.loss_kinds import loss_notes
        from anabranch.schedule import glossary

        best, graph = self.best, self.costs.graph
        lines = [*gains(self.others, best), faster(self.others, best, self.max_replicas)]
        say(best.summary([line for line in (*lines, self.flushed) if line]))
        say(glossary(best))
        for sentence in loss_notes(graph.loss_kind, graph.normalised, graph.stateful):
            say(sentence)
        if best.mode == "async":
            print_table(*staleness_table(best.policy, staleness_of(best, self.optimizer)))
            say(STALENESS_WORDS)
        say(
            f"planned in {self.seconds:.1f} s, of which the search that found this plan took "
            f"{best.search_s:.3f} s, its simulation {best.simulate_s:.3f} s and improvement "
            f"{best.improve_s:.3f} s"
        )
        for line in self.tried.lines():
            say(line)
        if self.why is not None:
            say(self.why.summary())


def gains(others: Mapping[str, Plan | AnabranchError], ours: Plan) -> Iterator[str]:
    """Generate lines that compare a plan with another start, data parallelism and the best chain.

    The chains are the sequential pipeline, with replicas and without, and what the search finds.
    """
    chains = [name for name in others if BASELINES[name].is_chain]
    plans = plans_among(others)
    planned = [name for name in chains if name in plans]
    best = min(planned, key=lambda name: plans[name].figures.step_s, default="")
    for name, other in others.items():
        if name in chains and best not in ("", name):
            continue
        if isinstance(other, AnabranchError):
            yield f"{BASELINES[name].words} has no plan: {other}"
        elif name == best and ours.stage_graph.shape == "chain" and _is_faster(ours, other):
            # Found with more evaluations, or on fewer devices.
            yield f"{BASELINES['chain'].words} is this plan"
        elif name == best and name != "chain":
            yield f"{gain(name, other, ours)}, the best chain of stages"
        else:
            yield gain(name, other, ours)


def gain(name: str, other: Plan, ours: Plan) -> str:
    step_s, graph, own_s = other.figures.step_s, other.stage_graph, ours.figures.step_s
    if (graph, other.schedule) == (ours.stage_graph, ours.schedule):
        return f"{BASELINES[name].words} is this plan"
    times, taken = gain_text(name, step_s, own_s, ours.mode), time_text(step_s)
    if taken == time_text(own_s) and not times.startswith("as fast as"):
        taken = f"{time_text(step_s, 3)} against {time_text(own_s, 3)}"
    return (
        f"{times} ({taken}, "
        f"depth {graph.depth}, micro-batch {graph.stages[0].microbatch_size}, {other.schedule})"
    )


def flush_text(flushed: Mapping[str, Plan | AnabranchError]) -> str:
    """Name the time of synchronous baselines, and say how to plan with a flush."""
    seconds = {
        BASELINES[name].words: other.figures.step_s for name, other in plans_among(flushed).items()
    }
    how = "the same command without --mode async plans steps with a flush"
    if not seconds:
        return how
    steps = " and ".join(f"{name} takes {time_text(step_s)}" for name, step_s in seconds.items())
    return f"with a flush, {steps} per batch: {how}"


def _is_faster(plan: Plan, other: Plan) -> bool:
    """Return True if a step is shorter than another plan's, by more than counts as equal."""
    step_s, other_s = plan.figures.step_s, other.figures.step_s
    return step_s < other_s and not is_as_fast(other_s, step_s)


def faster(
    others: Mapping[str, Plan | AnabranchError], ours: Plan, limit: int | None = None
) -> str:
    """Return a line on the best baseline, if that is better than our plan.

    Args:
        limit: most replicas of a stage that our plan may have; baselines have no limit.
    """
    plans = {name: other for name, other in plans_among(others).items() if name != "from"}
    name = min(plans, key=lambda name: plans[name].figures.step_s, default="")
    if not name or not _is_faster(plans[name], ours):
        return ""
    if name == "one device":
        if ours.cluster.startswith("local:"):
            return "one device is faster than this plan: --cluster local:1 plans it"
        return "one device is faster than this plan: plan for a cluster of one"
    search = BASELINES[name].search or {}
    options = " ".join(
        f"--{key.replace('_', '-')} {value}"
        for key, value in search.items()
        if isinstance(value, str | int)
    )
    if limit is not None and "max_replicas" not in search:
        options += " without --max-replicas"
    without = " without a flush" * (ours.mode == "async")
    return f"{BASELINES[name].words}{without} is faster than this plan: {options} plans it"
