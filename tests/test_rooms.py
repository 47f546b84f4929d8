"""The order of the rooms: who may import whom, as CONTRIBUTING.md states it."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in (SOURCE / "anabranch").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module in modules():
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules() else node.module


@cache
def imports() -> dict[str, set[str]]:
    """What every module imports, but for the package's own table of public names."""
    return {
        name: set(imported(path)) - {name}
        for name, path in modules().items()
        if name not in ("anabranch", "anabranch.__main__")
    }


def rows() -> list[list[str]]:
    """The table of rooms in CONTRIBUTING.md, from the first row to the last."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| rooms |")[2].partition("\n\n")[0]
    return [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:]]


def test_every_room_has_its_place_in_the_table():
    """A new file or folder at the top is put in order, and nothing is listed that is gone."""
    present = {path.stem for path in (SOURCE / "anabranch").iterdir() if path.suffix == ".py"}
    present |= {path.parent.name for path in (SOURCE / "anabranch").glob("*/__init__.py")}
    listed = [room for row in rows() for room in row]
    assert sorted(listed) == sorted(present - {"__init__", "__main__"})


def test_the_reading_order_names_files_that_are_there():
    """A newcomer is led from file to file, so none of them may have moved."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("in reading order")[2]
    named = re.findall(r"`([\w/]+\.py)`", text.partition("\n\n")[0])
    assert len(named) > 10
    assert not [name for name in named if not (SOURCE / "anabranch" / name).is_file()]


def test_rooms_import_only_from_the_rooms_above_them():
    """An arrow against the order, a lazy one too, ties two rooms into one."""
    place = {room: i for i, row in enumerate(rows()) for room in row}
    against = []
    for module, targets in imports().items():
        room = module.split(".")[1]
        for target in targets:
            other = [*target.split("."), ""][1]
            if other != room and place.get(other, len(place)) >= place[room]:
                against.append(f"{module} imports {target}")
    assert not against


def test_no_modules_import_each_other_in_a_circle():
    """Not inside a room either: a circle is one file in several parts."""
    TopologicalSorter(imports()).prepare()  # raises CycleError, which names the circle


def test_a_schedule_rule_stands_on_little():
    """A rule knows stages and actions; it needs no planner, no simulator and no runtime."""
    code = (
        "import sys, anabranch.schedule.kfkb\n"
        "print(sum(name.startswith('anabranch') for name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 25


def test_files_that_the_docs_name_are_there():
    """A file that has moved is named anew where the pages on papers and on extending lead to it."""
    for page in ("papers.md", "extending.md"):
        named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / page).read_text(encoding="utf-8"))
        sources = [file for file in named if not re.search("halves|NAME", file)]
        assert [file for file in sources if not any(_places(file))] == []


def _places(file: str) -> Iterator[Path]:
    """Where a file may be that a page names below ``src/anabranch``, its folder, or the root."""
    yield from (SOURCE / "anabranch").rglob(file)
    yield from ROOT.glob(file)
