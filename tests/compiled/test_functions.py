"""Compiled functions do what plain Python does; only their own user's machine code is trusted."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from anabranch.compiled import Floats, compile_ahead, compiled, compiled_if_worth
from anabranch.compiled import functions as module
from anabranch.compiled.functions import Compiled, code_folder
from anabranch.planner.auto.evaluator import Evaluator
from tests.planner import shapes
from tests.planner.auto.random_drafts import random_draft
from tests.planner.auto.simulated import simulated_s
from tests.planner.helpers import cost_model

FACTOR = 2.0


def scaled(x: float) -> float:
    return x * FACTOR


def add_scaled(table: np.ndarray, places: np.ndarray, x: float, count: int) -> int:
    for i in range(count):
        table[places[i], 1] += scaled(x)
    return len(table)


def arguments() -> tuple[np.ndarray, np.ndarray, float, int]:
    return np.zeros((3, 2)), np.array([2, 0]), 1.5, 2


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "anabranch" / "compiled"


def require_right(function: Compiled) -> None:
    args = arguments()
    assert function(*args) == 3
    assert args[0].tolist() == [[0, 3], [0, 0], [0, 3]]


class Column(NamedTuple):
    """Something with an array."""

    numbers: Floats


@compiled
def doubled(column: Column, times: int) -> int:
    """Double the numbers in place."""
    for i in range(len(column.numbers)):
        column.numbers[i] *= 2
    return times


def test_a_loop_that_runs_once_is_plain_python_where_numba_is_not_loaded(monkeypatch):
    """It changes the same array; many turns are worth loading numba, and so is one where it is
    loaded already.
    """
    monkeypatch.setitem(sys.modules, "numba", sys)
    assert compiled_if_worth(doubled, 1) is doubled
    monkeypatch.delitem(sys.modules, "numba")
    assert compiled_if_worth(doubled, module.WORTH_COMPILING + 1) is doubled
    column = Column(np.array([1.0, 2.0]))
    assert compiled_if_worth(doubled, 1)(column, 3) == 3
    assert column.numbers.tolist() == [2.0, 4.0]


def test_machine_code_is_kept_for_the_next_process(cache):
    """The same function made again compiles nothing."""
    require_right(compiled(add_scaled))
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb?")}
    assert len(files) == 2
    again = compiled(add_scaled)
    require_right(again)
    assert sum(again._machine_code.stats.cache_hits.values()) == 1
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb?")} == files


def test_python_does_the_same():
    """What numba is given is what a test can compare with."""
    args = arguments()
    assert compiled(add_scaled).py_func(*args) == 3
    assert args[0].tolist() == [[0, 3], [0, 0], [0, 3]]


def test_code_for_the_types_of_arguments_does_the_same(cache):
    """It is called once to be compiled, and then without a look at types."""
    args, function = arguments(), Compiled(add_scaled)
    quick = function.for_types_of(*args)
    assert quick(*args) == 3
    assert args[0].tolist() == [[0, 6], [0, 0], [0, 6]]
    assert quick is function.for_types_of(*args)


def test_it_is_compiled_again_where_what_it_calls_has_changed(cache, monkeypatch):
    """Numba looks at the file of the function alone."""
    folders = [compiled(add_scaled).folder]
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    folders.append(compiled(add_scaled).folder)
    monkeypatch.setitem(globals(), "scaled", lambda x: x + 1)
    folders.append(compiled(add_scaled).folder)
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    folders.append(compiled(add_scaled).folder)
    assert len({*folders}) == 4


def test_a_folder_that_others_may_write_to_is_not_trusted(cache):
    """Neither the folder itself nor one above it, such as a shared cache; what is open for all but
    sticky, as ``/tmp``, keeps what is whose.
    """
    assert code_folder() == cache
    cache.chmod(0o777)
    assert code_folder() is None
    cache.chmod(0o700)
    cache.parent.chmod(0o777)
    assert code_folder() is None
    require_right(compiled(add_scaled))
    assert not any(cache.iterdir())
    cache.parent.chmod(0o1777)
    assert code_folder() == cache


def test_a_folder_of_another_user_is_not_trusted(cache, monkeypatch):
    """Nor a link that leads to one."""
    cache.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    assert code_folder() is None


def test_a_link_in_place_of_the_folder_is_not_followed(cache, tmp_path):
    """Whoever owns the place it leads to may change it."""
    cache.parent.mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    assert code_folder() is None


def test_a_relative_cache_is_ignored(tmp_path, monkeypatch):
    """The working directory may be anybody's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert code_folder() == tmp_path / "home" / ".cache" / "anabranch" / "compiled"
    assert not Path("relative").exists()


def test_without_a_folder_nothing_is_kept(monkeypatch):
    """A home that cannot be written to, or none."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    assert code_folder() is None
    require_right(compiled(add_scaled))


def test_a_full_disk_is_no_error(cache, monkeypatch):
    """The machine code is there, though it cannot be kept."""
    from numba.core import caching

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)
    require_right(compiled(add_scaled))


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [None, b"canabranch.compiled\nGone\n.", b"cgone\nGone\n."])
def test_a_damaged_file_is_compiled_anew(cache, kind, content):
    """And replaced by the next process. So is one with a class of an older version."""
    require_right(compiled(add_scaled))
    (path,) = cache.rglob(f"*.{kind}")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    require_right(compiled(add_scaled))
    assert not path.exists()


def test_processes_beside_this_one_compile(cache):
    """The first call waits for them and takes what they have kept."""
    function = compiled(add_scaled)
    compile_ahead({function: lambda: function(*arguments())})
    begun = dict(module._begun)
    assert (function in begun) == (module.forked.cores() > 1)
    compile_ahead({function: pytest.fail})  # no second process, whose pipe nobody would close
    assert module._begun == begun
    require_right(function)
    compile_ahead({compiled(add_scaled): pytest.fail})  # it is kept


def evaluated_and_simulated() -> list[float]:
    """Seconds of random drafts by the loops that a search spends its time in."""
    profile = shapes.towers("towers", 2, 1, layers=3, top=2)
    cost = cost_model(profile, 4, node=2, memory=2**40)
    drafts = [random_draft(cost, 16, seed, plain=False) for seed in range(20)]
    evaluate = Evaluator(cost, 16)
    return [*map(evaluate, drafts), *(simulated_s(cost, 16, draft) for draft in drafts)]


def test_no_index_is_out_of_bounds(monkeypatch):
    """In plain Python, where every index is checked, planner and simulator say the same; elsewhere
    one too large would read what lies behind an array.
    """
    expected = evaluated_and_simulated()
    monkeypatch.setattr(Compiled, "__call__", lambda function, *args: function.py_func(*args))
    assert evaluated_and_simulated() == expected
