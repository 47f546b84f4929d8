"""What README and docs show: commands that there are, Python that compiles, examples that do what
they say.
"""

import ast
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import save_file

import anabranch
from anabranch.cli import app
from anabranch.cost import CostModel
from anabranch.errors import OutputError
from anabranch.files import load_plan
from anabranch.models import candle_uno
from anabranch.models.names import resolve
from anabranch.planner.auto.draft import Draft
from anabranch.planner.auto.space import Space
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.record import load_run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of a page in a language, those inside of lists too."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


def commands(page: Path) -> list[list[str]]:
    """Arguments of every call of the command line, whoever launches it."""
    found = []
    for block in blocks(page, "console") + blocks(page, "bash") + blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            call = re.search(r"(?:^\$ (?:\S*/)?| -m )anabranch (.*)", line.strip("'"))
            if call:
                words = shlex.split(call[1].replace("...", ""), comments=True)
                found.append(words[: next((i for i, w in enumerate(words) if w in "|>&&"), 99)])
    return found


def test_the_pages_have_what_is_looked_for():
    """Else the tests below would pass by finding nothing."""
    assert ["demo"] in commands(ROOT / "docs" / "quickstart.md")
    assert sum(len(commands(page)) for page in PAGES) > 40
    assert sum(len(blocks(page, "python")) for page in PAGES) > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_can_be_called(page, monkeypatch, tmp_path):
    """Verbs and options exist, and values are such as they take; nothing is done."""
    monkeypatch.chdir(tmp_path)
    command = typer.main.get_command(app)
    for verb in command.commands.values():
        monkeypatch.setattr(verb, "callback", None)
    with pytest.raises(typer.BadParameter.__mro__[1], match="clutser"):
        command.main(["plan", "mmt", "--clutser", "local:2"], standalone_mode=False)
    for words in commands(page):
        try:
            command.main(words, standalone_mode=False)
        except OutputError:
            pass  # a folder of the example that is not here
        except Exception as error:
            pytest.fail(f"anabranch {shlex.join(words)}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_a_page_compiles(page):
    """And asks of the package only what it has."""
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "anabranch":
                    assert hasattr(anabranch, node.attr), block
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anabranch"):
                wanted = [alias.name for alias in node.names]
                found = __import__(node.module, fromlist=wanted)
                assert [name for name in wanted if not hasattr(found, name)] == []


NOT_RUN = {
    'device="cuda"': "needs a GPU",
    "# mymodel.py": "is written to a file, and trained by its own test",
    ".py\n": "a file, run by ``test_a_tutorial_is_done_as_it_stands`` or, of the quick start, by "
    "``test_the_scripts_of_the_quick_start``",
    "multimodal_batch(module, batch": "for the model of the page, whose file its own test runs",
    'rows={"pixel_values": 1024}': "likewise; ``tests/data/test_packed.py`` has such a workload",
    "import Trainer": "run by ``tests/training/test_huggingface.py``, which has a model for it",
}
"""What a Python block has that is not run where it stands -> why."""

RUN = {
    page: [b for b in blocks(page, "python") if not any(part in b for part in NOT_RUN)]
    for page in PAGES
}


SEQUENCES = ("tokens", "mask", "labels")


@pytest.fixture(scope="module")
def planned_job(tmp_path_factory):
    """A model with its data, captured, estimated and planned for one rank once for all pages."""
    write_model(ROOT / "docs" / "workloads.md", folder := tmp_path_factory.mktemp("page"))
    job = resolve(f"{folder}/mymodel.py:workload")
    job = replace(job, eval_data=lambda size: job.data(size, 1))
    captured = anabranch.capture(job.module, job.example)
    profile = anabranch.estimate(captured, "v100", (1, 2, 4, 8, 16, 32))
    plans = [
        anabranch.plan(profile, anabranch.Cluster.preset(f"local:{n}"), 32, planner="even")
        for n in (1, 2)
    ]
    return job, captured, profile, *map(on_one_rank, plans)


@pytest.fixture
def at_hand(planned_job, tmp_path, monkeypatch):
    """What a reader of any page has: a model, its data in several forms, a profile, plans for one
    rank, and files.
    """
    monkeypatch.chdir(tmp_path)
    job, captured, profile, plan, other = planned_job
    monkeypatch.setattr("anabranch.runtime.assignment.captured_for", lambda *_: captured)
    save_file(job.module.state_dict(), tmp_path / "bert-base")
    np.save(tmp_path / "pixels.npy", np.zeros((8, 2), np.float32))
    return {
        **{"anabranch": anabranch, "torch": torch, "np": np, "Workload": anabranch.Workload},
        **{"job": job, "module": job.module, "example": job.example, "captured": captured},
        **{"profile": profile, "cluster": anabranch.Cluster.preset("local:2"), "plan": plan},
        **{"better": other, "other_plan": other, "loader": list(islice(job.data(32, 0), 4))},
        "batches": lambda size, epoch: iter([{name: torch.ones(size, 50) for name in SEQUENCES}]),
        **{"dataset": [0.0] * 32, "labels": np.zeros(8), "dataclass": dataclass},
        **{"ClassVar": ClassVar, "Iterable": Iterable, "CostModel": CostModel, "Draft": Draft},
        **{"StageGraph": StageGraph, "Space": Space, "Random": Random},
    }


def on_one_rank(plan: Plan) -> Plan:
    """All its stages on one device."""
    graph = plan.stage_graph
    stages = tuple(replace(stage, devices=(0,)) for stage in graph.stages)
    return replace(plan, stage_graph=replace(graph, stages=stages))


@pytest.mark.parametrize("page", [page for page in PAGES if RUN[page]], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page, at_hand):
    """Its blocks one after the other on one rank, each with what those before it have made."""
    for block in RUN[page]:
        exec(compile(block, page.name, "exec", dont_inherit=True), at_hand)


def links(page: Path) -> set[Path]:
    """Files that a page leads to."""
    found = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in found}


def test_every_page_is_found_from_the_readme():
    """No link leads nowhere, and no page of the docs is left out; those of a folder are in its
    index.
    """
    for page in PAGES:
        assert [str(target) for target in links(page) if not target.exists()] == [], page
    pages = {page.resolve() for page in (ROOT / "docs").glob("*.md")}
    assert pages - links(PAGES[0]) == {ROOT / "docs" / "index.md"}
    for index in (ROOT / "docs").rglob("index.md"):
        trees = re.findall(r"```{toctree}\n(.*?)```", index.read_text(encoding="utf-8"), re.DOTALL)
        lines = "\n".join(trees).splitlines()
        listed = {line for line in lines if line and not line.startswith(":")}
        assert {page.stem for page in index.parent.glob("*.md")} - listed == {"index"}


TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials" and page.stem != "index"]


@pytest.mark.dist
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_is_done_as_it_stands(page, call, tmp_path, monkeypatch, capsys):
    """Its files are written, then its commands called in their order; scripts print the same loss,
    or that most pairs are right. The built-in model has fewer layers here.
    """
    monkeypatch.syspath_prepend(tmp_path)
    few = replace(candle_uno.PRESETS["published"], branches=2, layers=1, top_layers=1)
    monkeypatch.setitem(candle_uno.PRESETS, "published", few)
    files = {block.split()[1]: block for block in blocks(page, "python")}
    for name, block in files.items():
        (tmp_path / name).write_text(block, encoding="utf-8")
    printed = []
    for line in "".join(blocks(page, "console")).splitlines():
        program, *words = shlex.split(line.removeprefix("$ "))
        if program == "python":
            capsys.readouterr()
            runpy.run_path(str(tmp_path / words[0]), run_name="__main__")
            printed.append(capsys.readouterr().out.splitlines()[-1])
        else:
            code, _, err = call(*words)
            assert code == 0, (line, err)
    for name in files:
        sys.modules.pop(name.removesuffix(".py"), None)
    assert len(set(printed)) <= 1, printed
    assert all(float(end.removeprefix("accuracy ")) > 0.8 for end in printed if "acc" in end)


def write_model(page: Path, folder: Path, **changed: str) -> None:
    """Write the file of a page's model, with other texts in place of some."""
    (block,) = (b for b in blocks(page, "python") if b.startswith("# mymodel.py"))
    for old, new in changed.items():
        block = re.sub(rf"\b{old}\b", new, block)
    (folder / "mymodel.py").write_text(block, encoding="utf-8")
    sys.modules.pop("mymodel", None)  # of another page


def test_the_model_of_the_page_of_workloads_learns(tmp_path, monkeypatch):
    """In one process, with the optimizer that it has: the loss falls to less than half. That of the
    README is trained as a pipeline below.
    """
    write_model(ROOT / "docs" / "workloads.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    job = resolve("mymodel.py:workload")
    optimizer = job.optimizer(job.module.parameters())
    losses = []
    for batch in job.data(32, 0):
        result = job.module(**batch)
        loss = result["loss"] if isinstance(result, dict) else result
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    sys.modules.pop("mymodel")


@pytest.mark.dist
def test_the_readme_from_the_module_to_a_trained_model(call, tmp_path):
    """Its three commands as they stand, with times as measured here: right gradients, a lower
    loss. By times of a data sheet, which are the same on any machine, both towers come before the
    head. Layers are narrower here.
    """
    write_model(ROOT / "README.md", tmp_path, **{"1024": "256", "512": "128"})
    three = [words for words in commands(ROOT / "README.md") if "mymodel:workload" in words][:3]
    assert [words[0] for words in three] == ["plan", "verify", "train"]
    code, _, err = call(*three[0])
    assert code == 0, err
    code, out, err = call(*three[1])
    assert code == 0, err
    found = re.search(
        r"right: gradient error (\S+), where less than 0.0001 is rounding, over 2[01] parameters",
        out,
    )
    assert found, out
    assert float(found[1]) < 1e-5
    code, _, err = call(*three[2], "--out", "run")
    assert code == 0, err
    losses = load_run(tmp_path / "run").losses
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10])
    words = "plan mymodel:workload --cluster local:3 --device v100 --batch-size 64 -o graph.json"
    code, _, err = call(*words.split(), "--no-baselines", "--no-calibration")
    assert code == 0, err
    graph = load_plan(tmp_path / "graph.json").stage_graph
    assert (len(graph), graph.depth) == (3, 2)


@pytest.mark.dist
def test_the_optimizer_of_tables_and_all_else_is_both():
    """Two steps, with a ``state_dict`` between them, are those of SparseAdam and Adam by hand."""
    page = blocks(ROOT / "docs" / "training.md", "python")
    names: dict[str, Any] = {"torch": torch}
    exec(next(block for block in page if "class TablesAndRest" in block), names)

    def gradients(module: torch.nn.Module) -> None:
        module.zero_grad()
        module.head(module.table(torch.tensor([1, 3]))).sum().backward()

    ours, by_hand = (
        torch.nn.ModuleDict({"table": torch.nn.Embedding(5, 4, sparse=True)}) for _ in range(2)
    )
    for module in (ours, by_hand):
        module["head"] = torch.nn.Linear(4, 1)
    by_hand.load_state_dict(ours.state_dict())
    tables, rest = (by_hand[name].parameters() for name in ("table", "head"))
    both = torch.optim.SparseAdam(tables, lr=0.1), torch.optim.Adam(rest, lr=0.1)
    state = names["TablesAndRest"](ours.named_parameters(), lr=0.1).state_dict()
    for _ in range(2):
        optimizer = names["TablesAndRest"](ours.named_parameters(), lr=0.5)
        optimizer.load_state_dict(state)
        for module in (ours, by_hand):
            gradients(module)
        for part in (optimizer, *both):
            part.step()
        state = optimizer.state_dict()
    for mine, theirs in zip(ours.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_scripts_of_the_quick_start(tmp_path, monkeypatch, capsys):
    """The first makes a plan and prints it, the second reads it, trains, and prints the loss. Run
    as scripts, in this process: another one would only import everything again. Epochs are shorter.
    """
    monkeypatch.chdir(tmp_path)
    write_model(ROOT / "docs" / "workloads.md", tmp_path, **{"100": "40"})
    monkeypatch.syspath_prepend(tmp_path)
    printed = {}
    for block in blocks(ROOT / "docs" / "quickstart.md", "python"):
        name = block.split()[1]
        (tmp_path / name).write_text(block, encoding="utf-8")
        sys.modules.pop("mymodel", None)
        runpy.run_path(str(tmp_path / name), run_name="__main__")
        printed[name] = capsys.readouterr().out
    sys.modules.pop("mymodel")
    assert list(printed) == ["make_plan.py", "train.py"]
    assert re.search(r"on \d devices?, ", printed["make_plan.py"])
    last_line = printed["train.py"].splitlines()[-1]
    assert float(re.findall(r"[\d.e-]+", last_line)[0]) < 0.5
