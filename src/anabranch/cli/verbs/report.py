"""The verb ``report``: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.output import file_to_write, print_json, say_written
from anabranch.cli.settings import AsJson


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that train wrote.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="The page [default: RUN/report.html].", callback=file_to_write
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about a run."""
    from anabranch.record import load_run, write_report

    path = output or run / "report.html"
    write_report(load_run(run), path)
    if as_json:
        print_json({"path": path})
    else:
        say_written(path)
