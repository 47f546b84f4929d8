"""What a user is told of errors that are not ours."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import sympy

from anabranch.errors import shadowed


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of the user's that is called as some package is."""
    (tmp_path / "own_z3").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_z3", raising=False)
    return str(tmp_path / "own_z3")


def test_a_folder_that_a_library_takes_for_a_package_is_named(own: str) -> None:
    """That the user's z3 lacks a class, which torch asks for, says nothing to anybody."""
    own_z3 = import_module("own_z3")
    with pytest.raises(AttributeError) as caught:
        exec(compile("module.ExprRef", sympy.__file__, "exec"), {"module": own_z3})
    assert f"looks for the package own_z3 and finds {own}, which is another" in shadowed(
        caught.value
    )


def test_other_errors_are_left_alone(own: str) -> None:
    """The user's own mistakes, and those of packages that are what they should be."""
    own_z3 = import_module("own_z3")
    for make in (lambda: own_z3.ExprRef, lambda: sympy.nothing, lambda: int("a")):
        with pytest.raises((AttributeError, ValueError)) as caught:
            make()
        assert not shadowed(caught.value)
