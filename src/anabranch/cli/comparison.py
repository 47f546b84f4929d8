"""Tables of plans side by side, within 80 columns, and of the ages of the weights of one plan.

Facts that fit no column are lines below the table; a fact of all plans is said once. Without a
flush the table shows the ages in the stage with the oldest weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from anabranch.errors import AnabranchError, BudgetError, InfeasiblePlanError, SearchStoppedError
from anabranch.plans.baselines import BASELINES

if TYPE_CHECKING:
    from anabranch.cluster import Cluster
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile
    from anabranch.simulator.staleness import Staleness
    from anabranch.weights import OptimizerFacts

_Key = TypeVar("_Key")


class Contender(NamedTuple):
    """A planner and, without a flush, the weight policy that it plans for."""

    planner: str
    policy: str = ""

    @property
    def name(self) -> str:
        """Planner and policy in words."""
        return ", ".join(filter(None, self))


Results = Mapping[Contender, "Plan | AnabranchError"]
"""Contender -> its plan, or the error that says why there is none."""


def side_by_side(
    results: Results, optimizer: OptimizerFacts | None = None
) -> tuple[list[str], list[list[str]]]:
    """Return the headings, and one row per contender, the shortest step first."""
    plans, is_async = [*plans_among(results).values()], _is_async(results)
    fastest = min((plan.figures.step_s for plan in plans), default=0.0)
    peak = max((max(plan.figures.device_peak_bytes) for plan in plans), default=0)
    unit = "GiB" if peak > 2**29 else "MiB"
    names = ["planner"] * names_planner(results) + ["policy"] * is_async
    columns = [*_figures(plans[0], fastest, unit, optimizer)] if plans else ["step\nms"]
    rows = []
    for contender, plan in sorted(results.items(), key=lambda item: _step_s(item[1])):
        if isinstance(plan, AnabranchError):
            cells = [_LABELS.get(type(plan), "no plan"), *["-"] * (len(columns) - 1)]
        else:
            cells = list(_figures(plan, fastest, unit, optimizer).values())
            contender = contender._replace(policy=plan.policy)  # which the search chose for auto
        rows.append([*(getattr(contender, name) for name in names), *cells])
    return [*names, *columns], rows


def names_planner(results: Results) -> bool:
    """Return True unless contenders differ by policy alone."""
    return not _is_async(results) or len({contender.planner for contender in results}) > 1


def _step_s(plan: Plan | AnabranchError) -> float:
    return math.inf if isinstance(plan, AnabranchError) else plan.figures.step_s


_LABELS = {BudgetError: "too big", SearchStoppedError: "stopped"}


def _figures(
    plan: Plan, fastest: float, unit: str, optimizer: OptimizerFacts | None
) -> dict[str, str]:
    """Return heading -> figure, for every column but the names."""
    figures, graph = plan.figures, plan.stage_graph
    is_async = plan.mode == "async"
    peak = max(figures.device_peak_bytes) / (2**30 if unit == "GiB" else 2**20)
    time = {
        "ms per\nbatch" if is_async else "step\nms": digits(figures.step_s * 1e3),
        "over\nbest": digits(ratio(figures.step_s, fastest)),
        "samples\nper s": digits(ratio(graph.batch_size, figures.step_s)),
    }
    use = {"bubble": f"{figures.bubble:.1%}", f"peak\n{unit}": digits(peak)}
    if is_async:
        stages = staleness_of(plan, optimizer)
        oldest = max(stages, key=lambda stage: (stage.forward_delay, stage.difference))
        forward, backward = reads(oldest)
        ages = {
            "depth": str(graph.depth),
            "vers.\ndiff.": str(max(stage.difference for stage in stages)),
            "fwd\nreads": forward,
            "bwd\nreads": backward,
            "\nheld": str(max(stage.versions for stage in stages)),
        }
        return time | ages | use
    bottleneck_s = figures.bottleneck_s_per_sample * graph.batch_size
    return {
        **time,
        "slowest\nstage ms": digits(bottleneck_s * 1e3),
        "depth": str(graph.depth),
        **use,
        "search\ns": _seconds(plan.search_s),
        "total\ns": _seconds(plan.search_s + plan.simulate_s + plan.improve_s),
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:.{3 if seconds < 10 else 1}f}"


def remarks(results: Results, costs: str) -> list[str]:
    """Return the lines below the table: origin of costs, common notes, shape of each plan."""
    if not names_planner(results):
        results = {contender._replace(planner=""): plan for contender, plan in results.items()}
    plans = [*plans_among(results).values()]
    notes = plans[0].notes if plans else ()
    common = [text for text in notes if all(text in p.notes for p in plans)]
    lines = [f"costs: {costs}"]
    if _is_async(results):
        lines.append(
            "vers. diff.: updates of a stage between the forward and the backward of a mini-batch; "
            "fwd, bwd reads: a forward or backward reads the weights of so many updates ago, + "
            "updates they are extrapolated by; held: copies of the weights in a stage"
        )
    elif any(max(_groups(plan)) > 1 for plan in plans):
        lines.append("k: forwards that a stage makes one after another, then as many backwards")
    lines += common

    def shape(plan: Plan) -> str:
        return "; ".join([_shape(plan), *(text for text in plan.notes if text not in common)])

    return lines + _lines(
        (contender, str(plan) if isinstance(plan, AnabranchError) else shape(plan))
        for contender, plan in results.items()
    )


def _lines(texts: Iterable[tuple[Contender, str]]) -> list[str]:
    """Return a line per contender; policies of one planner with the same text share a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for contender, text in texts:
        alike.setdefault((contender.planner, text), []).append(contender.policy)
    return [
        f"{', '.join(filter(None, [planner, *policies]))}: {text}"
        for (planner, text), policies in alike.items()
    ]


def _shape(plan: Plan) -> str:
    """Describe a plan: stages, micro-batches, groups, recomputation, schedule."""
    graph = plan.stage_graph
    stages = graph.stages
    parts = [f"{len(stages)} stage{'s' * (len(stages) > 1)}"]
    if plan.mode == "async":
        count = graph.num_microbatches(0)
        if count > 1:
            parts.append(f"{count} micro-batches of {stages[0].microbatch_size}")
        return ", ".join(parts)
    sizes, groups = sorted({stage.microbatch_size for stage in stages}), _groups(plan)
    parts.append(f"micro-batch {','.join(map(str, sizes))}")
    if groups != [1]:
        parts.append(f"k {','.join(map(str, groups))}")
    recomputing = sum(stage.recompute for stage in stages)
    if recomputing:
        parts.append("recompute" if recomputing == len(stages) else f"{recomputing} recompute")
    sums = plan.figures.exposed_sums or 0.0
    waits = [f"bubble with {sums:.1%} summing gradients"] if sums >= 0.0005 else []
    return ", ".join([*parts, plan.schedule, *waits])


def _groups(plan: Plan) -> list[int]:
    graph = plan.stage_graph
    return sorted({graph.group_size(s) for s in range(len(graph))})


def staleness_of(plan: Plan, optimizer: OptimizerFacts | None = None) -> tuple[Staleness, ...]:
    """Return how old the weights of each stage of an asynchronous plan are."""
    from anabranch.simulator.staleness import staleness
    from anabranch.solve.asynchronous.simulation import order_of
    from anabranch.weights import policy_named

    last_update = optimizer is not None and optimizer.keeps_last_update
    policy = policy_named(plan.policy)
    return staleness(order_of(plan, plan.stage_graph, policy), policy, last_update=last_update)


STALENESS_WORDS = (
    "version difference: updates of a stage between forward and backward of a mini-batch; -2 +2: "
    "reads the weights of two updates ago, extrapolated by two; versions held: copies of weights"
)
"""Meaning of the columns of ``staleness_table``."""


def staleness_table(
    policy: str, stages: Sequence[Staleness]
) -> tuple[str, list[str], list[list[str]]]:
    """Return the ages of weights stage by stage: title, headings and rows.

    ``-3 +3`` is the version of three updates ago, extrapolated by three.
    """
    headings = ["stage", "version difference", "forward reads", "backward reads", "versions held"]
    rows = [
        [str(s), str(stage.difference), *reads(stage), str(stage.versions)]
        for s, stage in enumerate(stages)
    ]
    return f"weights under policy {policy}, in updates", headings, rows


def reads(stage: Staleness) -> tuple[str, str]:
    """Return the versions that the forward and the backward of a stage read."""
    return (
        _version(stage.forward_delay, stage.forward_ahead),
        _version(stage.backward_delay, stage.backward_ahead),
    )


def _version(delay: int, ahead: int) -> str:
    version = f"-{delay}" if delay else "0"
    return f"{version} +{ahead}" if ahead else version


def plan_or_error(planner: str, plan: Plan | AnabranchError) -> dict[str, Any]:
    from anabranch.files import plan_to_dict

    if isinstance(plan, AnabranchError):
        return {"planner": planner, "error": str(plan), "kind": type(plan).__name__}
    return plan_to_dict(plan)


def staleness_document(
    plan: Plan | AnabranchError, optimizer: OptimizerFacts | None
) -> dict[str, Any]:
    """Return the ages of a plan's weights; an empty document with a flush."""
    if isinstance(plan, AnabranchError) or plan.mode == "sync":
        return {}
    return {"staleness": [asdict(stage) for stage in staleness_of(plan, optimizer)]}


class BestPlan(NamedTuple):
    """The best plan compared: the fastest; without a flush that of the same planner under the
    policy that ``auto`` takes, if it was compared.

    Attributes:
        policy: policy that ``auto`` takes; empty with a flush, as is the reason.
    """

    contender: Contender
    policy: str = ""
    why: str = ""

    def lines(self) -> list[str]:
        """Return a line on the policy, if there is one."""
        return [f"policy auto takes {self.policy}: {self.why}"] if self.policy else []


def taken(
    results: Results, costs: Profile, cluster: Cluster, optimizer: OptimizerFacts | None
) -> BestPlan:
    """Choose the best plan compared."""
    plans = plans_among(results)
    fastest = min(plans, key=lambda contender: plans[contender].figures.step_s)
    if not _is_async(results):
        return BestPlan(fastest)
    if (asked := fastest._replace(policy="auto")) in plans:
        policy = plans[asked].policy
        reasons = (note.partition(f"policy {policy}: ")[2] for note in plans[asked].notes)
        return BestPlan(asked, policy, next(filter(None, reasons), "as it is asked for"))
    from anabranch.solve import auto_policy

    # auto looks at the fastest stages of any policy, which are those of naive.
    best = plans.get(fastest._replace(policy="naive"), plans[fastest])
    policy, why = auto_policy(best, costs, cluster, optimizer)
    if isinstance(results.get(fastest._replace(policy=policy)), AnabranchError):
        policy, why = "naive", f"under {policy}, which would be better, there is no plan"
    contender = fastest._replace(policy=policy)
    return BestPlan(contender if contender in plans else fastest, policy, why)


def why_none(results: Results) -> AnabranchError | None:
    """Return the error to end with if no contender has a plan."""
    errors = [plan for plan in results.values() if isinstance(plan, AnabranchError)]
    if len(errors) < len(results):
        return None
    if len(errors) == 1:
        return errors[0]
    if any(isinstance(error, SearchStoppedError) for error in errors) or not errors:
        return SearchStoppedError("interrupted before any planner had a plan")
    reasons = [error for error in errors if isinstance(error, InfeasiblePlanError)]
    # The lines above have them all; the plainest one says enough.
    why = min(map(str, reasons), key=len) if reasons else "every search would take too long"
    return InfeasiblePlanError(f"no planner compared has a plan: {why}")


def ratio(step_s: float, ours_s: float) -> float | None:
    """Divide another step by ours; return None where ours is 0."""
    return step_s / ours_s if ours_s else None


def noting_baselines(
    plan: Plan, others: Mapping[str, Plan | AnabranchError], limit: str = ""
) -> Plan:
    """Return a plan whose figures include the steps of baselines, by name, and a limit."""
    step_s = {name: other.figures.step_s for name, other in plans_among(others).items()}
    chains = [s for name, s in step_s.items() if BASELINES[name].is_chain]
    chains += [plan.figures.step_s] * (bool(chains) and plan.stage_graph.shape == "chain")
    fastest, parallel_s = min(chains, default=None), step_s.get("data-parallel")
    figures = replace(plan.figures, data_parallel_s=parallel_s, chain_s=fastest, limit=limit)
    return replace(plan, predicted=figures)


def digits(value: float | None) -> str:
    """Format a number with at least three digits, in six characters below a million; - for None."""
    if value is None:
        return "-"
    if value and value < 0.1:
        return f"{value:.1e}" if value < 0.001 else f"{value:.3f}"
    return f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def plans_among(results: Mapping[_Key, Plan | AnabranchError]) -> dict[_Key, Plan]:
    return {key: plan for key, plan in results.items() if not isinstance(plan, AnabranchError)}


def _is_async(results: Results) -> bool:
    return any(contender.policy for contender in results)
