"""Loops that are faster than plain Python's.

``functions`` compiles inner loops to machine code by numba, and has the records that they work on.
``forked`` runs the items of a loop in as many processes as there are cores.
"""

from anabranch.compiled.functions import Floats as Floats
from anabranch.compiled.functions import Ints as Ints
from anabranch.compiled.functions import Table as Table
from anabranch.compiled.functions import compile_ahead as compile_ahead
from anabranch.compiled.functions import compiled as compiled
from anabranch.compiled.functions import compiled_if_worth as compiled_if_worth
from anabranch.compiled.functions import record_type as record_type
from anabranch.compiled.functions import records as records
