"""Where machine code is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from anabranch import jit
from anabranch.jit import entries


def twice(x: float) -> float:
    return x + x


@jit.entry
def add_twice(table: np.ndarray, places: np.ndarray, x: float, count: int) -> int:
    """Takes and returns what entries may."""
    for i in range(count):
        table[places[i], 1] += twice(x)
    return len(table)


def test_compiled_code_is_kept_and_does_what_the_function_does(tmp_path, monkeypatch):
    """Also bound to arrays that change, and without a second compilation."""
    monkeypatch.setattr(entries, "code_folder", lambda: tmp_path)
    table, places = np.zeros((3, 2)), np.array([2, 0])
    assert add_twice(table, places, 1.5, 2) == 3
    assert table.tolist() == [[0, 3], [0, 0], [0, 3]]
    (kept,) = tmp_path.iterdir()
    assert add_twice(table, places, np.float64(1.5), np.int64(0)) == 3  # numbers of NumPy
    call = jit.bound(add_twice, table, places, 0.0, 0)
    places[0] = 1
    assert call(0.5, 1) == 3
    assert table.tolist() == [[0, 3], [0, 1], [0, 3]]
    assert list(tmp_path.iterdir()) == [kept]


def test_a_file_that_was_cut_short_is_compiled_anew(tmp_path, monkeypatch):
    """LLVM would crash of it, so it is looked at before."""
    monkeypatch.setattr(entries, "code_folder", lambda: tmp_path)
    monkeypatch.setattr(add_twice, "_codes", {})
    args = np.zeros((3, 2)), np.array([2, 0]), 1.5, 2
    path = add_twice.file(tuple(map(entries._kind, args)))
    path.write_bytes(b"no machine code")
    assert not jit.is_there(add_twice, *args)
    assert add_twice(*args) == 3
    kept = path.read_bytes()
    path.write_bytes(kept[:-1])
    assert entries._kept(path) is None


def test_code_that_another_process_has_just_kept_is_taken(tmp_path, monkeypatch):
    """Between the first look for it and the second."""
    monkeypatch.setattr(entries, "code_folder", lambda: tmp_path)
    monkeypatch.setattr(add_twice, "_codes", {})
    args = np.zeros((3, 2)), np.array([2, 0]), 1.5, 2
    assert add_twice(*args) == 3
    (path,) = tmp_path.iterdir()
    kept = entries._kept(path)
    looks = iter((None, kept, kept))
    monkeypatch.setattr(add_twice, "_codes", {})
    monkeypatch.setattr(entries, "_compilers", {})
    monkeypatch.setattr(entries, "_kept", lambda _: next(looks))
    assert add_twice(*args) == 3


def test_a_compiler_that_was_killed_is_started_again(tmp_path, monkeypatch):
    """By the next call; the first one says so and does not wait for ever."""
    monkeypatch.setattr(entries, "code_folder", lambda: tmp_path)
    monkeypatch.setattr(add_twice, "_codes", {})
    monkeypatch.setattr(entries, "_compilers", {})
    args = np.zeros((3, 2)), np.array([2, 0]), 1.5, 2
    jit.begin((add_twice, args))
    for compiler in entries._compilers.values():
        compiler.kill()
    with pytest.raises(RuntimeError, match="ended with -9"):
        add_twice(*args)
    assert add_twice(*args) == 3


def test_a_compiler_that_hangs_is_ended(tmp_path, monkeypatch):
    """Nobody waits for it for ever: here for one that has been stopped."""
    monkeypatch.setattr(entries, "code_folder", lambda: tmp_path)
    monkeypatch.setattr(add_twice, "_codes", {})
    monkeypatch.setattr(entries, "_compilers", {})
    monkeypatch.setattr(entries, "LONGEST_S", 0.1)
    args = np.zeros((3, 2)), np.array([2, 0]), 1.5, 2
    jit.begin((add_twice, args))
    for compiler in entries._compilers.values():
        compiler.send_signal(signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"ended with -9.* killed, as it is after 0.1 s"):
        add_twice(*args)


def test_python_without_docstrings_compiles_what_it_has(tmp_path):
    """The compiler's process reads sources as the process that asks does, without a home as well.

    It said that they had changed.
    """
    run = "import numpy as np; from anabranch.jit import entries; from pathlib import Path; "
    run += "import sys; entries.code_folder = lambda: Path(sys.argv[1]); "
    run += "from tests.jit.test_entries import add_twice; "
    run += "sys.exit(add_twice(np.zeros((3, 2)), np.array([2, 0]), 1.5, 2) != 3)"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-OO", "-c", run, tmp_path], env=environment, timeout=60, check=True
    )
    assert len(list(tmp_path.iterdir())) == 1


def test_sources_that_changed_are_not_compiled(tmp_path, monkeypatch, capfd):
    """Their records may have other fields than those of the process that asks."""
    monkeypatch.setattr(entries, "code_folder", lambda: tmp_path)
    monkeypatch.setattr(add_twice, "_codes", {})
    monkeypatch.setattr(add_twice, "digest", "of older sources")
    with pytest.raises(RuntimeError, match="could not be compiled"):
        add_twice(np.zeros((3, 2)), np.array([2, 0]), 1.5, 2)
    assert "start it again" in capfd.readouterr().err


def scaled(x: float) -> float:
    return entries.twice(x) * FACTOR


FACTOR = 2.0


def test_machine_code_is_that_of_all_that_is_called(monkeypatch):
    """By name or from a module, and of what it calls; and of numbers that stand beside it."""
    function = entries.entry(scaled)
    monkeypatch.setattr(entries, "twice", twice, raising=False)
    seen = [repr(list(entries._contents(function, set())))]
    monkeypatch.setattr(entries, "twice", lambda x: x + x + 1)
    seen.append(repr(list(entries._contents(function, set()))))
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    seen.append(repr(list(entries._contents(function, set()))))
    assert len(set(seen)) == 3
