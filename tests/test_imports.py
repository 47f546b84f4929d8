"""What loads what: planning never needs torch, and --help answers at once."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import anabranch

ROOM = Path(anabranch.__file__).parent


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = (
        f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_planning_imports_neither_torch_nor_numba():
    """torch takes seconds to import, and numba half of one; whoever plans on a saved profile should
    not wait for the one, nor who only reads a file for the other.
    """
    loaded = loaded_after("import anabranch.solve, anabranch.files, anabranch.report.html")
    assert not {"torch", "numba"} & loaded


def test_the_command_line_imports_nothing_heavy():
    """Each verb imports what it needs."""
    assert not {"torch", "numpy", "pydantic", "rich"} & loaded_after("import anabranch.cli")


def test_every_public_name_exists():
    """The table in __init__ points at real definitions."""
    for name in anabranch.__all__:
        assert getattr(anabranch, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    """As for any module."""
    with pytest.raises(AttributeError, match="no attribute 'pipeline'"):
        _ = anabranch.pipeline


def test_the_package_is_imported_from_a_zip_file_as_well(tmp_path):
    """Archives of an application hold packages so; the stub of the public names is no file then."""
    archive = tmp_path / "site.zip"
    with zipfile.ZipFile(archive, "w") as written:
        for name in ("__init__.py", "__init__.pyi", "errors.py"):
            written.write(ROOM / name, f"anabranch/{name}")
    code = "import anabranch; print(anabranch.__file__, anabranch.AnabranchError.__name__)"
    command = [sys.executable, "-c", code]
    path = os.environ | {"PYTHONPATH": str(archive)}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=path)
    assert run.stdout.split() == [f"{archive}/anabranch/__init__.py", "AnabranchError"]
