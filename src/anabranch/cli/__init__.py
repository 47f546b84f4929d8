"""The command line: verbs that read files, call one public function, write files and print.

Everything heavy is imported inside the verbs; planning on a saved profile never loads torch.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import typer
from typer.exceptions import TyperException

from anabranch.cli.output import Warnings, print_json, say_error, without_colour
from anabranch.cli.run_file import asks_for_json
from anabranch.cli.run_summary import INTERRUPTED
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


def _interruptible(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb, which says so where Ctrl-C ends it and it has not said so itself."""

    @wraps(verb)
    def call(*arguments: Any, **options: Any) -> None:
        try:
            verb(*arguments, **options)
        except KeyboardInterrupt:
            as_json = asks_for_json(sys.argv[1:])
            _fail("Interrupted", "ended by Ctrl-C", INTERRUPTED, as_json=as_json)

    return call


for _verb in _verbs:
    app.command()(_interruptible(_verb))


def main() -> None:
    """Entry point: exit code 0 on success, 1 on an anabranch error, 2 on wrong usage."""
    without_colour()
    as_json = asks_for_json(sys.argv[1:])
    try:
        # Ranks are forked, so they show warnings the same way.
        with warnings.catch_warnings():
            warnings.showwarning = Warnings()
            # With --json wrong usage is a document as well, which typer would not write.
            raise SystemExit(app(standalone_mode=not as_json))
    except AnabranchError as error:
        if os.environ.get("ANABRANCH_DEBUG"):
            raise
        # Where something else than ours has raised, its traceback says more.
        is_theirs = isinstance(error, StageFailedError | WorkloadError | LoaderError)
        more = " (ANABRANCH_DEBUG=1 shows the traceback)" if is_theirs else ""
        _fail(type(error).__name__, str(error), 1, more=more, as_json=as_json)
    except OSError as error:
        if os.environ.get("ANABRANCH_DEBUG") or error.filename is None:
            raise
        message = f"{error.filename} cannot be read or written: {error.strerror}"
        more = "; name another file, or make its folder first"
        _fail(type(error).__name__, message, 1, more=more, as_json=as_json)
    except TyperException as error:  # with --json alone: otherwise typer has ended it
        message = getattr(error, "format_message", error.__str__)()
        _fail("UsageError", message, getattr(error, "exit_code", 2), as_json=as_json)


def _fail(kind: str, message: str, code: int, *, more: str = "", as_json: bool) -> NoReturn:
    """End with one paragraph on standard error and, for programs, a document."""
    if as_json:
        print_json({"error": kind, "message": message})
    say_error(f"{kind}: {message}{more}")
    raise SystemExit(code) from None
