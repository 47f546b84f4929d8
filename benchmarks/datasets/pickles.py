"""Pickles from elsewhere, read as data and never as programs.

A pickle may name any function and have it called. Containers, numbers and text need none, so a
reader that refuses every name is safe, and still reads a dict of lists.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import NoReturn

from anabranch.errors import DataError


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside")


def load_plain(path: Path) -> object:
    """The containers, numbers and text in a pickle; raises DataError if it holds anything else."""
    try:
        with path.open("rb") as stream:
            return _PlainUnpickler(stream).load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a pickle of plain containers, numbers and text ({error}), and nothing "
            f"else is read from a pickle; remove it to download it again"
        ) from error
