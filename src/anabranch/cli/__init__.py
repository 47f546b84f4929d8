"""The command line: verbs that read files, call one public function, write files and print.

Everything heavy is imported inside the verbs; planning on a saved profile never loads torch.
"""

from __future__ import annotations

import os
import sys
import warnings

import typer

from anabranch.cli.output import Warnings, print_json
from anabranch.cli.verbs.check import check
from anabranch.cli.verbs.cluster import cluster
from anabranch.cli.verbs.compare import compare
from anabranch.cli.verbs.demo import demo
from anabranch.cli.verbs.doctor import doctor
from anabranch.cli.verbs.export import export
from anabranch.cli.verbs.models import models
from anabranch.cli.verbs.plan import plan
from anabranch.cli.verbs.profile import profile
from anabranch.cli.verbs.report import report
from anabranch.cli.verbs.simulate import simulate
from anabranch.cli.verbs.train import train
from anabranch.cli.verbs.verify import verify
from anabranch.errors import AnabranchError, LoaderError, StageFailedError, WorkloadError

app = typer.Typer(
    name="anabranch",
    help="Train any PyTorch model as a pipeline whose stages form a graph.\n\n"
    "MODEL is a built-in name (see `anabranch models`), `package.module:function` that returns "
    "an anabranch.Workload, or, where only planning is asked, a profile file.\n\n"
    "Start with `anabranch demo`; then `doctor`, `plan`, `verify` and `train` your own model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)
_verbs = (
    *(
        doctor,
        profile,
        plan,
        compare,
        check,
        simulate,
        models,
        verify,
        train,
        export,
        report,
        cluster,
    ),
    demo,
)
for _verb in _verbs:
    app.command()(_verb)


def main() -> None:
    """Entry point: exit code 0 on success, 1 on an anabranch error, 2 on wrong usage."""
    try:
        # Ranks are forked, so they show warnings the same way.
        with warnings.catch_warnings():
            warnings.showwarning = Warnings()
            app()
    except AnabranchError as error:
        if os.environ.get("ANABRANCH_DEBUG"):
            raise
        if "--json" in sys.argv:
            print_json({"error": type(error).__name__, "message": str(error)})
        # Where something else than ours has raised, its traceback says more.
        is_theirs = isinstance(error, StageFailedError | WorkloadError | LoaderError)
        more = " (ANABRANCH_DEBUG=1 shows the traceback)" if is_theirs else ""
        typer.secho(f"{type(error).__name__}: {error}{more}", err=True, fg="red")
        raise SystemExit(1) from None
    except OSError as error:
        if os.environ.get("ANABRANCH_DEBUG") or error.filename is None:
            raise
        message = f"{error.filename} cannot be read or written: {error.strerror}"
        if "--json" in sys.argv:
            print_json({"error": type(error).__name__, "message": message})
        typer.secho(f"{message}; name another file, or make its folder first", err=True, fg="red")
        raise SystemExit(1) from None
