"""The command line: verbs that read files, call one public function, write files and print.

Everything heavy is imported inside the verbs; planning on a saved profile never loads torch.
Errors end in ``main``, which prints them: docstrings of this folder do not list them.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from anabranch.cli import output
from anabranch.cli.parsing import completed, in_plain_words
from anabranch.cli.training.run_file import asks_for_json
from anabranch.errors import AnabranchError, LoaderError, StageFailedError, WorkloadError, shadowed

_MEANT = {
    "why": "anabranch simulate PLAN --why",
    "resume": "anabranch train MODEL --resume FOLDER",
    "calibrate": "anabranch cluster --calibrate",
}
"""Word that is no verb -> the command that is meant."""


class _Verbs(TyperGroup):
    """Group of verbs; points from words such as ``resume`` to the command that is meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except TyperException as error:
            if args and args[0] in _MEANT:
                error.message = f"No such command '{args[0]}'. Write: {_MEANT[args[0]]}"
            raise


app = typer.Typer(
    name="anabranch",
    cls=_Verbs,
    help="Train any PyTorch model as a pipeline whose stages form a graph.\n\n"
    "MODEL is a built-in name (see anabranch models), package.module:function that returns "
    "an anabranch.Workload, or, where only planning is asked, a profile file.\n\n"
    "Start with anabranch demo; then doctor, plan, verify and train your own model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's table cuts names of options to fit a terminal
)
_VERBS = (
    "doctor profile plan compare check simulate rehearse models "
    "verify train export export_plan report cluster demo"
)
"""Verbs in the order of the help; each is a function of its own name in a file of ``verbs``."""


class _Verb(TyperCommand):
    """Command of one verb. Prints remarks after the result, completes a command line that lacks an
    argument or option, and reports Ctrl-C where the verb has not.
    """

    def invoke(self, ctx: Any) -> None:
        try:
            with output.remarks_at_end():
                super().invoke(ctx)
                sys.stdout.flush()
        except KeyboardInterrupt:
            _fail("Interrupted", "ended by Ctrl-C", output.INTERRUPTED)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        written = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None and not error.message:  # it is missing
                error.message = completed(self, error.param, written)
            else:
                error.message = in_plain_words(error)
            raise


for _name in _VERBS.split():
    app.command(cls=_Verb)(getattr(import_module(f"anabranch.cli.verbs.{_name}"), _name))


_TORCHRUN_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file from which torchrun reads why a rank failed."""


def main() -> None:
    """Entry point: exit code 0, 1 on an anabranch error, 2 on wrong usage, 130 after Ctrl-C."""
    output.without_colour()
    # With --json wrong usage is a document as well, and under torchrun one paragraph, neither of
    # which typer would write.
    by_typer = not asks_for_json(sys.argv[1:]) and _TORCHRUN_FILE not in os.environ
    try:
        # Ranks are forked, so they show warnings the same way.
        with warnings.catch_warnings():
            warnings.showwarning = output.Warnings()
            raise SystemExit(app(standalone_mode=by_typer))
    except AnabranchError as error:
        if os.environ.get("ANABRANCH_DEBUG"):
            raise
        # An exception of the user's code has a traceback that says more.
        is_theirs = isinstance(error, StageFailedError | WorkloadError | LoaderError)
        has_trace = error.__cause__ is not None or hasattr(error, "__notes__")
        more = " (ANABRANCH_DEBUG=1 shows the traceback)" if is_theirs and has_trace else ""
        code = output.exit_code(error)
        _fail(type(error).__name__, str(error), code, more)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        if os.environ.get("ANABRANCH_DEBUG") or (error.filename is None and not is_full):
            raise
        message = f"{error.filename or 'the output'} cannot be read or written: {error.strerror}"
        more = "; make room" if is_full else "; name another file, or make its folder first"
        _fail(type(error).__name__, message, 1, more)
    except AttributeError as error:
        if os.environ.get("ANABRANCH_DEBUG") or not (message := shadowed(error)):
            raise
        _fail("ImportError", message, 1)
    except TyperException as error:  # in standalone mode typer prints it and exits
        message = getattr(error, "format_message", error.__str__)()
        _fail("UsageError", message, getattr(error, "exit_code", 2))


def _fail(kind: str, message: str, code: int, more: str = "") -> NoReturn:
    """End with one paragraph on standard error and, for programs, a document."""
    with output.answering(as_json=asks_for_json(sys.argv[1:])), suppress(OSError):
        output.print_json({"error": kind, "message": message})
    paragraph = f"{kind}: {message}{more}"
    output.say_error(paragraph)
    if file := os.environ.get(_TORCHRUN_FILE):
        # The earliest is taken for the cause, and ranks that end because of it have no file.
        when = {"timestamp": str(int(time.time()) - 1)}
        document = {"message": {"message": paragraph, "extraInfo": when}}
        Path(file).write_text(json.dumps(document), encoding="utf-8")
    raise SystemExit(code) from None
