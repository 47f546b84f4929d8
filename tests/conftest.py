"""Settings for all tests."""

import atexit
import ctypes
import fcntl
import gc
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings

from anabranch.compiled import functions
from anabranch.planner.auto.settings import SETTINGS
from anabranch.plans.baselines import BASELINES
from anabranch.solve import search
from tests import exported_once

# No test reads or writes what the user's own commands keep: captures, and what was measured on the
# machine at hand. The workers of a run share what they keep.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["ANABRANCH_CACHE"] = tempfile.mkdtemp(prefix="anabranch-tests-")
    atexit.register(shutil.rmtree, os.environ["ANABRANCH_CACHE"], ignore_errors=True)

# Searches are short: how good plans are after one of full length is what benchmarks/planners says.
# Settings change in place, as modules that are imported by now hold them. A chain to compare with
# is searched for an eighth as long: evaluations beyond those of a search would be spent in rounds
# from the best plan on.
for name, number in {"evaluations": 300, "further": 300, "neighbours": 100}.items():
    object.__setattr__(SETTINGS, name, number)
_chain: Any = BASELINES["chain"].search["planner_options"]
_chain["evaluations"] = 40

exported_once.install()
gc.disable()  # until all tests are imported

# Results are compared bit for bit between processes, and additions are ordered by threads.
torch.set_num_threads(1)

# The first step of an optimizer imports what every rank would import anew.
torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()

# Workers that need the same machine code wait for the one that compiles it.
_call: Any = functions.Compiled.__call__


def _call_in_turn(function: Any, *args: Any, **kwargs: Any) -> Any:
    is_kept = function._machine_code is not None or function.folder is None
    if is_kept or functions._begun.get(function) is not None:
        return _call(function, *args, **kwargs)
    with open(function.folder.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return _call(function, *args, **kwargs)


functions.Compiled.__call__ = _call_in_turn  # type: ignore[method-assign]

# A deadline measures the machine, which may be busy, not the code. In CI the examples are the same
# each time, so a failure there is the change's; at home every run looks at new ones, so that few
# in one run are many in a week.
settings.register_profile(
    "anabranch", deadline=None, derandomize="CI" in os.environ, max_examples=30
)
settings.load_profile("anabranch")


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and not in modules and tests: tracing makes so many objects that
    nearly all live on that looking among them took a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    # Each of thousands of searches would count these objects, for 0.03 s, to learn that some are.
    search.gc = SimpleNamespace(get_freeze_count=lambda: 1)  # type: ignore[assignment]


_in_large_pages = 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have Linux copy less for each rank: a fork copies an entry for every page of a process, which
    is 0.04 s of 0.15 s for a rank, and pages are of 2 MiB here instead of 4 KiB. Nor does
    a rank forget what torch's compiler has looked up, as it would when its process group begins:
    300 of the 5000 pages that it writes to, and so copies.
    """
    global _in_large_pages
    if sys.platform != "linux" or item.get_closest_marker("dist") is None:
        return
    if "torch._dynamo.trace_rules" in sys.modules:
        sys.modules["torch._dynamo.trace_rules"].clear_lru_cache = lambda: None
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    if pages < _in_large_pages + 25_000:
        return
    _in_large_pages, size, collapse = pages, 2 << 20, 25  # MADV_COLLAPSE, which may be refused
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    private = r"^(\w+)-(\w+) rw-p \S+ 00:00 0\s*(?:\[heap\])?$"
    for begin, end in re.findall(private, Path("/proc/self/maps").read_text(), re.MULTILINE):
        first, last = -(-int(begin, 16) // size) * size, int(end, 16) // size * size
        if first < last:
            advise(first, last - first, collapse)
