"""Built-in models: those of the GraphPipe paper, and one on real data.

A model is one file with ``PRESETS`` (preset -> sizes, a frozen dataclass whose fields are its
options) and ``workload`` (sizes -> Workload), and one line in ``MODELS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any

from anabranch.errors import suggestion
from anabranch.models.sizes import with_options
from anabranch.workload import Workload

MODELS: Mapping[str, str] = {
    "mmt": "multi-modal transformer: 4 branches of 8 transformer layers",
    "dlrm": "recommendation: 7 dense and 7 sparse branches",
    "candle-uno": "drug response: 7 feed-forward branches",
    "two-branch": "case study: 2 branches of 4 x (attention, linear, linear)",
    "transformer": "sequential language model, no branches",
    "glyphs": "image and text tower that learn whether a name belongs to a picture, real data",
}
"""Name -> description in one line."""


def build(
    name: str,
    *,
    preset: str = "published",
    options: Mapping[str, str] | None = None,
    meta: bool = False,
) -> Workload:
    """Return a built-in model as a workload.

    Args:
        name: a key of ``MODELS``.
        preset: ``published`` (the paper's sizes) or ``small`` (quick steps on one processor core).
        options: size -> its value as text, such as ``{"branches": "2"}``.
        meta: build parameters and example without memory, for planning only.

    Raises:
        ValueError: for an unknown model, preset or option; the message names those that exist.
        DataError: if a model on real data can neither find nor download its data.
    """
    home = _home(name)
    if preset not in home.PRESETS:
        raise ValueError(f"{name} has no preset {preset}; it has {', '.join(home.PRESETS)}")
    sizes = with_options(home.PRESETS[preset], options or {}, name)
    workload: Workload = home.workload(sizes, meta=meta)
    return workload


def options_of(name: str) -> dict[str, dict[str, str]]:
    """Return option -> preset -> default of a built-in model; a ``ValueError`` if unknown."""
    presets: Mapping[str, Any] = _home(name).PRESETS
    names = [field.name for field in fields(next(iter(presets.values())))]
    return {n: {preset: str(getattr(sizes, n)) for preset, sizes in presets.items()} for n in names}


def _home(name: str) -> ModuleType:
    """Import the module of a model; only then, as models on real data need more than torch."""
    if name not in MODELS:
        raise ValueError(
            f"there is no built-in model {name}{suggestion(name, MODELS)}; there are "
            f"{', '.join(MODELS)}. A model of your own is written package.module:function, where "
            "the function returns an anabranch.Workload"
        )
    return import_module(f"anabranch.models.{name.replace('-', '_')}")
