"""No file makes code run: every reader meets a shell command and a file of Python."""

import json
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from anabranch.files.capture_cache import _checksum
from anabranch.record import save_run
from tests.record.test_folder import RUN

Runner = Callable[..., tuple[int, str, str]]

EVIL = """
    from pathlib import Path

    Path({marker!r}).touch()

    def workload(**options):
        raise AssertionError
"""
SHELL = "os:system"
FILE = "FOLDER/evil.py:workload"
MODULE = "evil:workload"
SMALL = (
    "candle-uno", "--preset", "small", "-o", "branches=2", "-o", "layers=1", "-o", "top_layers=1",
)  # fmt: skip
"""A model that is captured soon: every file that is refused has it captured again."""
PLANNED = ("plan", *SMALL, "--device", "v100")


@pytest.fixture(autouse=True)
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that is there once something ran; beside it a module that makes it when imported."""
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(textwrap.dedent(EVIL.format(marker=str(ran))))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield ran
    assert sys.modules.pop("evil", None) is None
    assert not ran.exists()


def attacks(tmp_path: Path) -> list[tuple[str, dict[str, str]]]:
    """Models that run something if they are built or imported, with their options."""
    command = {"command": f"touch {tmp_path / 'ran'}"}
    return [(SHELL, command), (FILE.replace("FOLDER", str(tmp_path)), {}), (MODULE, {})]


def texts(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a document that holds a text."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(items):
        if isinstance(value, str):
            yield document, key
        elif isinstance(value, dict | list):
            yield from texts(value)


def poisoned(document: dict[str, Any], tmp_path: Path, most: int = 20) -> Iterator[None]:
    """The document with an attack in place of each of its first texts, one after the other; the
    three kinds of attacks take turns.
    """
    kinds = cycle(attacks(tmp_path))
    for (holder, key), (model, _) in zip(list(texts(document))[:most], kinds, strict=False):
        old, holder[key] = holder[key], model
        yield
        holder[key] = old


@pytest.fixture
def planned(run: Runner) -> dict[str, Any]:
    """A plan, as its file ``plan.json`` has it; planned once for all tests."""
    if not _PLANS:
        code, _, err = run(
            *PLANNED, "--cluster", "summit:1x2", "--batch-size", "8", "--planner", "even",
            "--no-baselines", "-o", "plan.json",
        )  # fmt: skip
        assert code == 0, err
        _PLANS.append(Path("plan.json").read_text())
    document: dict[str, Any] = json.loads(_PLANS[0])
    Path("plan.json").write_text(_PLANS[0])
    return document


_PLANS: list[str] = []


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "plan.json"),
        ("check", "plan.json"),
        ("check", "plan.json", *SMALL, "--device", "v100"),
        ("verify", *SMALL, "--plan", "plan.json"),
        ("train", *SMALL, "--plan", "plan.json", "--steps", "1"),
        (*PLANNED, "--cluster", "summit:1x2", "--batch-size", "8", "--from", "plan.json"),
    ],
    ids=lambda command: f"{command[0]}-{len(command)}",
)
def test_a_plan(run: Runner, planned: dict[str, Any], tmp_path: Path, command: tuple[str, ...]):
    """Its model is what the attacker says, and its stages fit no other."""
    planned["stages"][0]["operators"][0] = "other"
    for model, options in attacks(tmp_path):
        Path("plan.json").write_text(json.dumps(planned | {"model": model, "options": options}))
        assert run(*command)[0] in (0, 1, 2)


def test_any_text_of_a_plan(run: Runner, planned: dict[str, Any], tmp_path: Path):
    """Planner, schedule, cluster, device, profile, policy and notes are names, too."""
    planned |= {"mode": "async", "policy": "stash", "notes": ["a note"]}
    for _ in poisoned(planned, tmp_path):
        Path("plan.json").write_text(json.dumps(planned))
        assert run("simulate", "plan.json")[0] in (0, 1, 2)


def test_the_refusal_says_what_to_write(run: Runner, planned: dict[str, Any]):
    """The name is the user's own to give; whatever stands in it is one word for the shell."""
    Path("plan.json").write_text(json.dumps(planned | {"model": "my:workload; touch ran"}))
    code, _, err = run("simulate", "plan.json")
    assert code == 2
    assert "plan.json names the function my:workload; touch ran, and no file makes" in err
    assert "if you trust that code: anabranch simulate plan.json 'my:workload; touch ran'" in err


@pytest.mark.parametrize("more", ["", "trust = true\n", "emulate = true\nplan = 'plan.json'\n"])
def test_a_run_file(run: Runner, tmp_path: Path, more: str):
    """Only the command line can say that it trusts the file."""
    for model, options in attacks(tmp_path):
        table = "".join(f"{name} = {value!r}\n" for name, value in options.items())
        Path("evil.toml").write_text(f"model = {model!r}\n{more}\n[options]\n{table}")
        code, _, err = run("train", "evil.toml")
        assert code == 2
        assert "no option 'trust'" in err or "add --trust (anabranch train evil.toml --trust" in err


def test_a_run_file_that_is_trusted(run: Runner, tmp_path: Path):
    """Its function is imported; a shell command is none even then."""
    Path("own.toml").write_text("model = 'tests.cli.models:without_data'\n")
    code, _, err = run("train", "own.toml", "--trust")
    assert (code, "the workload has no data" in err) == (1, True)
    Path("own.toml").write_text(f"model = 'os:system'\n[options]\ncommand = 'touch {tmp_path}/ran'")
    code, _, err = run("train", "own.toml", "--trust")
    assert (code, "os:system is" in err) == (2, True)


@pytest.mark.parametrize("text", ["os:system", "subprocess:run", "builtins:exec", "os:popen"])
def test_the_command_line_takes_no_function_of_python(run: Runner, tmp_path: Path, text: str):
    """Whoever pastes what a file proposed gets no shell."""
    code, _, err = run("profile", text, "-o", f"command=touch {tmp_path}/ran")
    assert code == 2
    assert f"{text} is " in err
    assert "of Python itself, not a function of yours" in err


def test_the_folder_of_a_run(run: Runner, tmp_path: Path):
    """Its page is written anew, in which nothing is a script either."""
    save_run(RUN, Path("run"))
    file = Path("run/run.json")
    document = json.loads(file.read_text())
    for _ in poisoned(document, tmp_path, most=60):
        file.write_text(json.dumps(document))
        assert run("report", "run")[0] in (0, 1)
    for holder, key in list(texts(document)):
        old, holder[key] = holder[key], "</script><script>alert(1)</script>"
        file.write_text(json.dumps(document))
        if run("report", "run")[0] == 0:
            assert "<script>alert" not in Path("run/report.html").read_text()
        holder[key] = old


def test_a_profile(run: Runner, profile: str, tmp_path: Path):
    """Planned for, and simulated under a plan that names it."""
    document = json.loads(Path(profile).read_text())
    for _ in poisoned(document, tmp_path):
        Path(profile).write_text(json.dumps(document))
        where = ("--cluster", "summit:1x2", "--batch-size", "8", "--planner", "even")
        assert run("plan", profile, *where, "--no-baselines")[0] in (0, 1, 2)


def test_a_cluster(run: Runner, four_files: tuple[str, ...], tmp_path: Path):
    """Of the user's own, or that of a stranger."""
    document = json.loads(Path("box.json").read_text())
    for _ in poisoned(document, tmp_path):
        Path("box.json").write_text(json.dumps(document))
        assert run("plan", *four_files, "--planner", "even", "--no-baselines")[0] in (0, 1, 2)


class _Shell:
    """A pickle that runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, (self.command,)


@pytest.mark.dist
def test_a_checkpoint(run: Runner, tmp_path: Path):
    """Resumed, begun with and exported: with an attack in its JSON, and as a pickle."""
    train = ("train", *SMALL, "--devices", "1", "--no-check-gradients")
    code, _, err = run(*train, "--steps", "1", "--batch-size", "4", "--save", "kept")
    assert code == 0, err
    evil = pickle.dumps(_Shell(f"touch {tmp_path / 'ran'}"))
    for file in [path for path in Path("kept").rglob("*") if path.is_file()]:
        whole = file.read_bytes()
        damages = [evil]
        if file.suffix == ".json":
            document = json.loads(whole)
            damages += [json.dumps(document).encode() for _ in poisoned(document, tmp_path, 4)]
        for damage in damages:
            file.write_bytes(damage)
            assert run("export", "kept", "-o", "whole.safetensors")[0] == 1
            assert run(*train, "--steps", "1", "--resume", "kept")[0] == 1
        file.write_bytes(whole)
    for name in ("weights.pt", "pytorch_model.bin", "model.safetensors"):
        Path(name).write_bytes(evil)
        assert run(*train, "--steps", "1", "--weights", name)[0] == 1


@pytest.mark.filterwarnings("ignore:the kept capture")
def test_a_capture_in_the_cache(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever may write there can make a plan wrong, no more."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    command = (
        *PLANNED, "--cluster", "summit:1x2", "--batch-size", "8", "--planner", "even",
        "--no-baselines", "--rewrite", "none",
    )  # fmt: skip
    assert run(*command)[0] == 0
    (file,) = (tmp_path / "cache" / "captures").iterdir()
    document = json.loads(file.read_text().partition("\n")[2])
    for _ in poisoned(document, tmp_path, 3):  # one attack of each kind
        data = json.dumps(document).encode()
        file.write_bytes(_checksum(file, data) + b"\n" + data)
        assert run(*command)[0] in (0, 1, 2)
    file.write_bytes(pickle.dumps(_Shell(f"touch {tmp_path / 'ran'}")))
    assert run(*command)[0] in (0, 1, 2)
