"""Buffers and frozen parameters that a forward changes, once per micro-batch.

Running means of batch normalisation are told apart (``normalised``); tables that are cut to a norm
(``max_norm``) come out the same however often they are.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from anabranch.graph.call_traits import base_name
from anabranch.graph.flat_program import (
    FlatProgram,
    frame,
    insert,
    is_bounding,
    requires_grad,
    trains_norm,
    written,
)
from anabranch.graph.operations import BATCH_NORMS

_aten = torch.ops.aten


def changed_state(program: FlatProgram, whole: Collection[fx.Node]) -> tuple[str, ...]:
    """Return the names of buffers and parameters that a program changes other than by batch
    normalisation; calls that have the ``whole`` batch do so once.
    """
    norms = {frame(n) for n in program.calls if base_name(n) in BATCH_NORMS and trains_norm(n)}
    return tuple(
        dict.fromkeys(
            source.name
            for call, source in program.writes_to("buffer", "parameter")
            if not {frame(call), source.name.rpartition(".")[0]} <= norms
            and call not in whole
            and not is_bounding(call)
        )
    )


def seen_writes(program: FlatProgram) -> frozenset[str] | None:
    """Names of all state that a program changes; None with regions, whose writes are unknown."""
    return None if program.regions else frozenset(program.changed("buffer", "parameter"))


def copy_changed_state(program: FlatProgram) -> None:
    """Change a program so that calls with gradients read copies of state that the forward changes:
    autograd keeps what they read, and this forward or the next one changes it. Views of state stay,
    as writes may go through them.
    """
    calls = {call for call, _ in program.writes_to("buffer", "parameter")}
    writes = [call for call in calls if not is_bounding(call)]
    changed = {target.meta.get("storage", 0) for call in writes for target in written(call)}
    for call in program.calls:
        is_read = not written(call) and call.meta.get("storage") not in changed
        for source in call.all_input_nodes if is_read and requires_grad(call) else []:
            if source.meta.get("storage") in changed:
                call.replace_input_with(source, insert(call, _aten.clone.default, source))


def changed_by_samples(program: FlatProgram) -> tuple[str, ...]:
    """Return names of parameters that a program changes depending on the batch."""
    writes = program.writes_to("parameter")
    names = (source.name for call, source in writes if "batch" in program.kinds_above([call]))
    return tuple(dict.fromkeys(names))
