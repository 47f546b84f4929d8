"""Loops that are quicker than plain Python's.

``functions`` compiles inner loops to machine code by numba, and has the records that they work on.
``forked`` runs the items of a loop in as many processes as there are cores.
"""

from anabranch.compiled.functions import (
    Compiled,
    Floats,
    Ints,
    Table,
    affordable,
    begin,
    compiled,
    private_folder,
    record_type,
    records,
)

__all__ = [
    "Compiled",
    "Floats",
    "Ints",
    "Table",
    "affordable",
    "begin",
    "compiled",
    "private_folder",
    "record_type",
    "records",
]
