"""The command line: one paragraph and an exit code for every mistake."""

import errno
import json
import sys

import pytest

from anabranch.cli.output import _columns
from tests.cli.examples import TOWERS


@pytest.fixture
def run(call):
    """As it is printed, line by line."""
    return call


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "mmt"], 2, "--cluster"),
        (["plan", "mtm", "--cluster", "local:2", "--batch-size", "4"], 2, "no built-in model mtm"),
        (["plan", "mmt", "--cluster", "nowhere:2", "--batch-size", "4"], 2, "summit:NODESxDEVICES"),
        (["plan", "no.json", "--cluster", "local:2", "--batch-size", "4"], 1, "does not exist"),
        (["profile", TOWERS, "--samples", "1,x"], 2, "whole numbers"),
        (["profile", TOWERS, "-o", "a.json", "-o", "b.json"], 2, "two output files"),
        (["profile", TOWERS, "-o", "depth=3"], 2, "depth"),
        (["simulate", "no.json", "-o", "a.json"], 2, "a.json is no option of the model"),
        (["train", TOWERS, "-o", "a.json"], 2, "a.json is no option of the model"),
        (["check", "no.json"], 1, "does not exist"),
        (["report", "nowhere"], 1, "does not exist"),
        (["verify", "tests.cli.models:nothing"], 2, "nothing"),
    ],
)
def test_a_mistake_is_one_paragraph(run, arguments, code, message):
    """What, where, a way on; never a traceback."""
    found, _, err = run(*arguments)
    text = " ".join(err.split())
    assert found == code
    assert message in text
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "mmt"], "Missing option '--cluster'."),
        (["plan", "mmt", "--clutser", "local:2"], "No such option: --clutser"),
        (["plan", "mtm", "--cluster", "local:2", "--batch-size", "4"], "(is mmt meant?)"),
        (["profile", "tests.cli.models:twoers"], "(is towers meant?)"),
        (["models", "much"], "unexpected extra argument"),
        (["why", "plan.json"], "No such command 'why'. Write: anabranch simulate PLAN --why"),
    ],
)
def test_wrong_usage_is_a_document_too(run, arguments, message):
    """Where one is asked for; a program need not read standard error."""
    code, out, err = run(*arguments, "--json")
    document = json.loads(out)
    assert (code, document["error"]) == (2, "UsageError")
    assert message in document["message"]
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["plan", "mmt"], "anabranch plan mmt --cluster summit:8x4 --batch-size 64"),
        (
            ["compare", "--batch-size", "8"],
            "anabranch compare --batch-size 8 mmt --cluster summit:8x4",
        ),
        (["plan", "a:b", "--cluster=d"], "anabranch plan a:b --cluster=d --batch-size 64"),
        (["plan", "my model.json"], "anabranch plan 'my model.json' --cluster summit:8x4"),
    ],
)
def test_what_is_missing_is_told_with_a_command_that_has_it(run, arguments, command):
    """Whoever tries a verb for the first time has something to copy."""
    code, _, err = run(*arguments)
    assert code == 2
    assert f"; for example: {command}" in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [(["plan", "no.json"], 2, "UsageError: Missing option"), (["check", "no.json"], 1, "no.json")],
)
def test_the_last_thing_that_torchrun_says_is_the_refusal(
    run, tmp_path, monkeypatch, arguments, code, said
):
    """torchrun ends with what it finds in a file of the rank that failed first, below its own
    traceback; without one it points at a page on tracebacks.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    found, _, err = run(*arguments)
    assert (found, err.count("\n")) == (code, 1)
    own = ProcessFailure(local_rank=1, pid=2, exitcode=code, error_file=str(file))
    victim = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="<N/A>")
    told = str(ChildFailedError("anabranch", {0: victim, 1: own})).partition("Root Cause")[2]
    assert said in told
    assert err.strip() in told


def test_an_interrupt_is_a_document_too(run, monkeypatch):
    """It says what it has ended: the capture, or the command."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("anabranch.graph.capture.capture", interrupt)
    code, out, _ = run("verify", TOWERS, "--json")
    assert code == 130
    assert f"interrupted while {TOWERS} was captured" in json.loads(out)["message"]
    monkeypatch.setattr("anabranch.cli.source.ModelSource.workload", interrupt)
    code, out, _ = run("verify", TOWERS, "--json")
    assert (code, json.loads(out)["error"]) == (130, "Interrupted")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=str)
def test_a_full_disk_below_the_output_is_one_paragraph(run, monkeypatch, options):
    """As behind ``models > file``; a file that is written says its name."""

    def full(_: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.stdout, "write", full)
    code, out, err = run("models", *options)
    assert (code, out) == (1, "")
    assert err == (
        "OSError: the output cannot be read or written: No space left on device; make room\n"
    )


@pytest.mark.parametrize("width", ["x", "40"])
def test_a_width_that_is_no_number_is_no_width(width, monkeypatch):
    """``COLUMNS`` may be anything."""
    monkeypatch.setenv("COLUMNS", width)
    assert _columns(otherwise=160) == (160 if width == "x" else 40)


def test_help_cuts_nothing_to_fit_a_terminal(call, monkeypatch):
    """Neither a name of an option or a choice nor what a verb does."""
    monkeypatch.setenv("COLUMNS", "80")
    said = call("compare", "--help")[1]
    for name in ("--no-sparse-embeddings", "|1f1b-deep-split|", "(piper.recompute=false)"):
        assert name in said
    assert "..." not in call("--help")[1].partition("\n")[2]


def test_no_colour_goes_before_forced_colour(call, monkeypatch):
    """In help and in errors, which would otherwise be bold and red."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    for arguments in (["--help"], ["plan", "mtm"], ["check", "no.json"]):
        _, out, err = call(*arguments)
        assert "\x1b" not in out + err
