"""compare --mode async: weight policies side by side, under every planner that is asked for.

What forwards and backwards read is written as in ``-3 +3``: the version of three updates ago,
extrapolated by three. Of several stages the table shows the one with the oldest weights; a line
below it and the document have all.
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
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile
    from anabranch.simulator.staleness import Staleness
    from anabranch.weights import OptimizerFacts

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
    optimizer: OptimizerFacts | None,
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
        optimizer: what policies have to know of it, if anything is known.
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
        optimizer=optimizer,
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
        "optimizer": optimizer.name if optimizer is not None else None,
        "plans": [document_of(*pair, each, optimizer) for pair, each in found.items()],
    }
    if missing is not None:
        document |= {"error": type(missing).__name__, "message": str(missing)}
    if file is not None:
        file.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)
    else:
        print_table(title, *comparison_async(found, optimizer))
        for line in remarks_async(found, costs.origin):
            say(line)
        say_written(file)
    if missing is not None:
        # Not raised: standard output has its document already.
        typer.secho(f"{type(missing).__name__}: {missing}", err=True, fg="red")
        raise typer.Exit(1)


def comparison_async(
    found: FoundAsync, optimizer: OptimizerFacts | None = None
) -> tuple[list[str], list[list[str]]]:
    """Headings, and one row per planner and policy."""
    plans = [each for each in found.values() if not isinstance(each, AnabranchError)]
    fastest = min((each.figures.step_s for each in plans), default=0.0)
    peak = max((max(each.figures.device_peak_bytes) for each in plans), default=0)
    unit, size = ("GiB", 2**30) if peak > 2**29 else ("MiB", 2**20)
    several = len({planner for planner, _ in found}) > 1
    headings = ["planner"] * several + ["policy", "ms per\nbatch", "over\nbest", "samples\nper s"]
    headings += ["depth", "version\ndiff.", "forward\nreads", "backward\nreads", "versions\nheld"]
    headings += ["bubble", f"peak\n{unit}"]
    rows = []
    for (planner, policy), each in found.items():
        name = [planner] * several
        if isinstance(each, AnabranchError):
            missing = ["-"] * (len(headings) - len(name) - 2)
            rows.append([*name, policy, "no plan", *missing])
        else:
            rows.append([*name, each.policy, *_figures(each, fastest, size, optimizer)])
    return headings, rows


def _figures(plan: Plan, fastest: float, unit: int, optimizer: OptimizerFacts | None) -> list[str]:
    p, batch_size = plan.figures, plan.stage_graph.batch_size
    over = ratio(p.step_s, fastest)
    stages = staleness_of(plan, optimizer)
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
        "version difference: updates of a stage between the forward and the backward of a "
        "mini-batch; reads: the version of so many updates ago, + updates it is extrapolated by",
    ]
    alike: dict[tuple[str, str], list[str]] = {}
    for (planner, policy), each in found.items():
        what = str(each) if isinstance(each, AnabranchError) else _shape(each, costs)
        alike.setdefault((planner, what), []).append(policy)
    lines += [f"{planner}, {', '.join(names)}: {what}" for (planner, what), names in alike.items()]
    ages_of: dict[tuple[str, str], list[str]] = {}
    for (planner, policy), each in found.items():
        if not isinstance(each, AnabranchError) and each.stage_graph.depth > 1:
            ages_of.setdefault((planner, _stage_by_stage(each)), []).append(policy)
    lines += [f"{planner}, {', '.join(n)}: {what}" for (planner, what), n in ages_of.items()]
    return lines


def _stage_by_stage(plan: Plan) -> str:
    """What forwards and backwards read, stage by stage."""
    stages = staleness_of(plan)
    forward = ", ".join(_read(each.forward_delay, each.forward_ahead) for each in stages)
    backward = ", ".join(_read(each.backward_delay, each.backward_ahead) for each in stages)
    same = forward == backward
    reads = f"both read {forward}" if same else f"forward reads {forward}; backward {backward}"
    return f"stage by stage, {reads}"


def _shape(plan: Plan, costs: str) -> str:
    graph = plan.stage_graph
    count, size = graph.num_microbatches(0), graph.stages[0].microbatch_size
    shape = f"{len(graph)} stage{'s' * (len(graph) > 1)}"
    if count > 1:
        shape += f", {count} micro-batches of {size}"
    # The origin of the costs says it in other words.
    own = [note for note in plan.notes if not ("proportional" in note and "proportional" in costs)]
    return "; ".join([shape, *own])


def staleness_of(plan: Plan, optimizer: OptimizerFacts | None = None) -> tuple[Staleness, ...]:
    """Per stage of an asynchronous plan, how old its weights are."""
    from anabranch.simulator.staleness import staleness
    from anabranch.weights import policy_named

    last_update = optimizer is not None and optimizer.keeps_last_update
    return staleness(plan.stage_graph, policy_named(plan.policy), last_update=last_update)


def document_of(
    planner: str, policy: str, found: Plan | AnabranchError, optimizer: OptimizerFacts | None
) -> dict[str, Any]:
    """A plan's document with its staleness, or the reason why there is none."""
    document = plan_or_error(planner, found)
    if isinstance(found, AnabranchError):
        return {"policy": policy, **document}
    return document | {"staleness": [asdict(each) for each in staleness_of(found, optimizer)]}


def ages(policy: str, stages: Sequence[Staleness]) -> tuple[str, list[str], list[list[str]]]:
    """Title, headings and rows of a table with the weights of every stage."""
    headings = ["stage", "version difference", "forward reads", "backward reads", "versions held"]
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
