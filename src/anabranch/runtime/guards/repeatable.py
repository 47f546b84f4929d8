"""A second call of the user's module, which has to say what the first one said.

A captured program does the same at every step. A counter, a schedule or random numbers in Python
are fixed in it when the model is captured, and training goes on as if nothing were wrong.
"""

from __future__ import annotations

import math

from torch import nn

from anabranch.errors import TrainingError
from anabranch.runtime.compute.stage_compute import unchanged_buffers
from anabranch.runtime.placement import place_of
from anabranch.runtime.reference import call, in_training_mode, moved
from anabranch.workload import Batch

_ROUNDING = 1e-4


def require_repeatable(module: nn.Module, batch: Batch, first: float) -> tuple[str, ...]:
    """Accept a module whose loss of a batch is that of its first call, but for rounding.

    Returns:
        What the forward sets, one sentence, or nothing.

    Raises:
        TrainingError: naming what it sets.
    """
    before = plain_attributes(module)
    with unchanged_buffers(module), in_training_mode(module):
        second = float(call(module, moved(batch, place_of(module)))["loss"].detach())
    changed = [
        f"{name} ({before[name]!r}, then {value!r})"
        for name, value in plain_attributes(module).items()
        if name in before and before[name] != value
    ]
    name = type(module).__name__
    if math.isfinite(first) and not abs(first - second) <= _ROUNDING * max(abs(first), 1e-3):
        why = f": it sets {', '.join(changed[:3])}" if changed else ""
        raise TrainingError(
            f"{name} has the loss {first:.9g} for a batch, and {second:.9g} for the same batch at "
            f"its second call{why}; a counter, a schedule or random numbers in Python are fixed "
            "when the model is captured, so the pipeline would train something else: keep a count "
            "in a buffer (register_buffer) and change that in place, draw with torch (torch.rand), "
            "or pass the number in the batch"
        )
    if not changed:
        return ()
    return (
        f"the forward of {name} sets {', '.join(changed[:3])}, which made no difference to the "
        "loss of a second call; in the captured model it stays as it was, so if later steps depend "
        "on it, keep it in a buffer",
    )


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """Numbers, words and switches of a module and its parts by name, which a forward may change."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float | str) and name != "training"
    }
