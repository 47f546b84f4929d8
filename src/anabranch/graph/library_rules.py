"""Replacements for library code that tracing cannot follow, in force while it is traced.

Each rule gives the same values. Those of vision-language models are in ``multimodal``;
``docs/multimodal.md`` has the table of the models that need them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from anabranch.graph.module_state import with_attributes


def _broadcast(masking: Any) -> Callable[..., Any]:
    """``torch.vmap`` over the four dimensions of a mask is broadcasting, where the mask's function
    works on whatever indices it is given, as those of transformers do.
    """

    def expansion(mask_function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *indices: mask_function(*masking._non_vmap_expansion_sdpa(*indices))

    return expansion


_RULES: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    # Gemma3: masks that let the tokens of one image see each other.
    ("transformers.masking_utils", "_vmap_expansion_sdpa", _broadcast),
    ("transformers.masking_utils", "TransformGetItemToIndex", lambda _: contextlib.nullcontext),
)
"""Module, a name in it, and the module -> what the name stands for while a forward is traced."""


def library_rules() -> contextlib.AbstractContextManager[None]:
    """Inside, library code can be traced that says otherwise what it means."""
    loaded = [(sys.modules[name], key, make) for name, key, make in _RULES if name in sys.modules]
    return with_attributes([(owner, key, make(owner)) for owner, key, make in loaded])
