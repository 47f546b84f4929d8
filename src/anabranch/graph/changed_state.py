"""Buffers and frozen parameters that a forward changes, once per micro-batch.

Running means of batch normalisation are told apart (``normalised``); tables that are cut to a norm
(``max_norm``) come out the same however often they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from anabranch.graph.call_traits import base_name
from anabranch.graph.flat_program import (
    BATCH_LEAF,
    BUFFER,
    PARAMETER,
    FlatProgram,
    PlaceholderSource,
    frame,
    is_bounding,
    trains_norm,
)
from anabranch.graph.operations import BATCH_NORMS


def changed_state(program: FlatProgram, whole: Collection[fx.Node]) -> tuple[str, ...]:
    """Names of buffers and parameters that a program changes other than by batch normalisation;
    calls that have the ``whole`` batch do so once.
    """
    norms = {frame(n) for n in program.calls if base_name(n) in BATCH_NORMS and trains_norm(n)}
    return tuple(
        dict.fromkeys(
            source.name
            for call, source in _writes(program)
            if source.name.rpartition(".")[0] not in norms
            and call not in whole
            and not is_bounding(call)
        )
    )


def seen_writes(program: FlatProgram) -> frozenset[str] | None:
    """Names of all state that a program changes; None with regions, whose writes are unknown."""
    return None if program.regions else frozenset(source.name for _, source in _writes(program))


def changed_by_samples(program: FlatProgram) -> tuple[str, ...]:
    """Names of parameters that a program changes by what is in the batch."""
    return tuple(
        dict.fromkeys(
            source.name
            for call, source in _writes(program)
            if source.kind == PARAMETER and BATCH_LEAF in program.kinds_above([call])
        )
    )


def _writes(program: FlatProgram) -> Iterator[tuple[fx.Node, PlaceholderSource]]:
    for kind in (BUFFER, PARAMETER):
        yield from program.writes_to(kind)
