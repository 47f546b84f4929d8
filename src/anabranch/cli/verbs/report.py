"""The verb ``report``: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.output import file_to_write, print_json, say_written
from anabranch.cli.source import ModelSource
from anabranch.cli.spread import spread
from anabranch.plans.plan import Plan


@spread
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    output: Annotated[Path | None, typer.Option("-o", "--output", callback=file_to_write)] = None,
    against: Path | None = None,
) -> None:
    """Write one self-contained HTML page about a run.

    Args:
        run: A folder that train, rehearse or demo wrote.
        output: The page [default: RUN/report.html].
        against: The folder of another run of the same model, to lay over this one.
    """
    from anabranch.record import load_run, write_report

    path, shown = output or run / "report.html", load_run(run)
    other = load_run(against) if against is not None else None
    if other is not None and not _have_one_model(shown.plan, other.plan):
        raise typer.BadParameter(
            f"{against} is a run of {other.plan.model}, and {run} one of {shown.plan.model}"
        )
    name = against.resolve().name if against is not None else ""
    name = str(against) if name == run.resolve().name else name
    write_report(shown, path, against=(name, other) if other is not None else None)
    print_json({"path": path})
    say_written(path)


def _have_one_model(plan: Plan, other: Plan) -> bool:
    """True if two plans are for one model: a plan by a profile file has the name of that file."""
    if plan.model == other.model:
        return True
    is_by_file = any(ModelSource(p.model).is_file for p in (plan, other))
    sizes = [p.model_size.parameter_bytes if p.model_size else None for p in (plan, other)]
    return is_by_file and None not in sizes and sizes[0] == sizes[1]
