"""compare --mode async: weight policies side by side, under every planner that is asked for.

What forwards and backwards read is written as in ``-3 +3``: the version of three updates ago,
extrapolated by three. Of several stages the table shows the one with the oldest weights; the
document has all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from anabranch.cli.comparing import digits, interrupted, plan_or_error, ratio, why_none
from anabranch.cli.inputs import note, options_by_planner, usage
from anabranch.cli.output import print_json, print_table, progress_of, say, say_written
from anabranch.errors import AnabranchError

if TYPE_CHECKING:
    from anabranch.cluster import Cluster
    from anabranch.planner.stages import Plan
    from anabranch.profile.profile import Profile
    from anabranch.simulator.staleness import Staleness

FoundAsync = Mapping[tuple[str, str], "Plan | AnabranchError"]
"""{(planner, policy): their plan, or why there is none}"""


def compare_policies(
    costs: Profile,
    machines: Cluster,
    batch_size: int,
    planners: list[str],
    policies: list[str],
    *,
    title: str,
    head: Mapping[str, Any],
    planner_option: list[str] | None,
    microbatch_size: int | None,
    schedule: str,
    max_replicas: int | None,
    model: str,
    file: Path | None,
    as_json: bool,
) -> None:
    """Search, then print and write what was found.

    Args:
        costs: the profile.
        machines: the cluster.
        batch_size: samples of one mini-batch.
        planners: whose plans.
        policies: under which policies; empty for all.
        title: of the table.
        head: what the document begins with.
        planner_option: as the user wrote them.
        microbatch_size: as the user wrote it.
        schedule: likewise.
        max_replicas: likewise.
        model: likewise.
        file: where the document is written, if anywhere.
        as_json: print the document instead of the table.

    Raises:
        Exit: with 1 if there is no plan at all.
    """
    from anabranch.solve import options_of
    from anabranch.solve_async import check_mode
    from anabranch.solve_async import compare as search
    from anabranch.weights import POLICIES

    policies = policies or [*POLICIES]
    usage(check_mode, "async", "", schedule)
    results = usage(
        search,
        costs,
        machines,
        batch_size,
        planners,
        policies,
        planner_options=options_by_planner(
            planner_option, planners, {name: options_of(name) for name in planners}
        ),
        microbatch_size=microbatch_size,
        max_replicas=max_replicas,
        model=model,
    )
    pairs = [(name, policy) for name in planners for policy in policies]
    found: dict[tuple[str, str], Plan | AnabranchError] = {}
    # An interrupt between two searches ends the comparison, not the table.
    with progress_of("planning") as progress, suppress(KeyboardInterrupt):
        for i, (name, policy) in enumerate(pairs):
            progress(i, len(pairs), f"planner {name}, policy {policy}; Ctrl-C ends its search")
            found[name, policy] = next(results)[2]
            if interrupted(found[name, policy]):
                note(f"{name}, {policy} interrupted")
    missing = why_none(found)
    document: dict[str, Any] = {
        **head,
        "mode": "async",
        "profile": costs.origin,
        "plans": [document_of(*pair, each) for pair, each in found.items()],
    }
    if missing is not None:
        document |= {"error": type(missing).__name__, "message": str(missing)}
    if file is not None:
        file.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)
    else:
        print_table(title, *comparison_async(found))
        for line in remarks_async(found, costs.origin):
            say(line)
        say_written(file)
    if missing is not None:
        # Not raised: standard output has its document already.
        typer.secho(f"{type(missing).__name__}: {missing}", err=True, fg="red")
        raise typer.Exit(1)


def comparison_async(found: FoundAsync) -> tuple[list[str], list[list[str]]]:
    """Headings, and one row per planner and policy."""
    plans = [each for each in found.values() if not isinstance(each, AnabranchError)]
    fastest = min((each.predicted.step_s for each in plans), default=0.0)
    peak = max((max(each.predicted.device_peak_bytes) for each in plans), default=0)
    unit, size = ("GiB", 2**30) if peak > 2**29 else ("MiB", 2**20)
    several = len({planner for planner, _ in found}) > 1
    headings = ["planner"] * several + ["policy", "ms per\nbatch", "over\nbest", "samples\nper s"]
    headings += ["depth", "updates\nbetween", "forward\nreads", "backward\nreads", "versions\nheld"]
    headings += ["bubble", f"peak\n{unit}"]
    rows = []
    for (planner, policy), each in found.items():
        name = [planner] * several
        if isinstance(each, AnabranchError):
            missing = ["-"] * (len(headings) - len(name) - 2)
            rows.append([*name, policy, "no plan", *missing])
        else:
            rows.append([*name, each.policy, *_figures(each, fastest, size)])
    return headings, rows


def _figures(plan: Plan, fastest: float, unit: int) -> list[str]:
    p, batch_size = plan.predicted, plan.stage_graph.batch_size
    over = ratio(p.step_s, fastest)
    stages = staleness_of(plan)
    oldest = max(stages, key=lambda each: (each.forward_delay, each.difference))
    return [
        digits(p.step_s * 1e3),
        "-" if over is None else digits(over),
        digits(batch_size / p.step_s) if p.step_s else "-",
        str(plan.stage_graph.depth),
        str(max(each.difference for each in stages)),
        _read(oldest.forward_delay, oldest.forward_ahead),
        _read(oldest.backward_delay, oldest.backward_ahead),
        str(max(each.versions for each in stages)),
        f"{p.bubble:.1%}",
        digits(max(p.device_peak_bytes) / unit),
    ]


def remarks_async(found: FoundAsync, costs: str) -> list[str]:
    """The lines below the table."""
    lines = [
        f"costs: {costs}",
        "updates between: of the stage, between the forward and the backward of a mini-batch; "
        "reads: the version of so many updates ago, + updates it is extrapolated by",
    ]
    alike: dict[tuple[str, str], list[str]] = {}
    for (planner, policy), each in found.items():
        what = str(each) if isinstance(each, AnabranchError) else _shape(each, costs)
        alike.setdefault((planner, what), []).append(policy)
    lines += [f"{planner}, {', '.join(names)}: {what}" for (planner, what), names in alike.items()]
    return lines


def _shape(plan: Plan, costs: str) -> str:
    graph = plan.stage_graph
    count, size = graph.num_microbatches(0), graph.stages[0].microbatch_size
    shape = f"{len(graph)} stage{'s' * (len(graph) > 1)}"
    if count > 1:
        shape += f", {count} micro-batches of {size}"
    # The origin of the costs says it in other words.
    own = [note for note in plan.notes if not ("proportional" in note and "proportional" in costs)]
    return "; ".join([shape, *own])


def staleness_of(plan: Plan) -> tuple[Staleness, ...]:
    """Per stage of an asynchronous plan, how old its weights are."""
    from anabranch.simulator.staleness import staleness
    from anabranch.weights import policy_named

    return staleness(plan.stage_graph, policy_named(plan.policy))


def document_of(planner: str, policy: str, found: Plan | AnabranchError) -> dict[str, Any]:
    """A plan's document with its staleness, or the reason why there is none."""
    document = plan_or_error(planner, found)
    if isinstance(found, AnabranchError):
        return {"policy": policy, **document}
    return document | {"staleness": [asdict(each) for each in staleness_of(found)]}


def ages(policy: str, stages: Sequence[Staleness]) -> tuple[str, list[str], list[list[str]]]:
    """Title, headings and rows of a table with the weights of every stage."""
    headings = ["stage", "updates between", "forward reads", "backward reads", "versions held"]
    rows = [
        [
            str(s),
            str(each.difference),
            _read(each.forward_delay, each.forward_ahead),
            _read(each.backward_delay, each.backward_ahead),
            str(each.versions),
        ]
        for s, each in enumerate(stages)
    ]
    return f"weights under policy {policy}, in updates", headings, rows


def _read(delay: int, ahead: int) -> str:
    version = f"-{delay}" if delay else "0"
    return f"{version} +{ahead}" if ahead else version
