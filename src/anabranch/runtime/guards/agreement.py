"""Agreement of the ranks on plan, model and options, before any other message.

A rank derives the work of other ranks from its own copy of these, so a difference would end in a
hang or in wrong numbers::

    rank 0   version ..., plan 4 stages (9f31), model ..., options accumulate 1
    rank 1   version ..., plan 4 stages (9f31), model ..., options accumulate 1
    rank 2   version ..., plan 3 stages (02c7), model ..., options accumulate 1
    all      InvalidPlanError: ... plan: ranks 0-1 have 4 stages (9f31), rank 2 has 3 stages (02c7)
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from anabranch import errors
from anabranch.errors import InvalidPlanError
from anabranch.graph.capture import Captured
from anabranch.plans.plan import Plan
from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.guards.same_batch import ranks_have
from anabranch.runtime.ranks import texts
from anabranch.runtime.state.initialisation import meta_names

_REMEDY = {
    "version": "install the same versions on every machine",
    "plan": "start every rank with the same plan file",
    "model": "build the same model, with the same example batch, on every rank",
    "sizes of batches": "give Workload the same buckets on every rank",
    "weights": "build the model anew for every pipeline, and in one way on every rank",
}


def require_agreement(facts: Mapping[str, str]) -> None:
    """Check that ``facts``, texts by name, are equal on all ranks; raises InvalidPlanError on every
    rank with the same text, naming the difference and the ranks with each version.
    """
    gathered = texts.gather(dict(facts))
    if all(other == gathered[0] for other in gathered):
        return
    # A rank that leaves while others still read from it would look like a failure of its own.
    with contextlib.suppress(PeerLostError):
        texts.gather_bytes(b" ")
    raise InvalidPlanError(_difference(gathered))


def _difference(gathered: list[dict[str, str]]) -> str:
    what = next(name for name in gathered[0] if len({own.get(name) for own in gathered}) > 1)
    ranks: dict[str, list[int]] = {}
    for rank, own in enumerate(gathered):
        ranks.setdefault(own.get(what, "nothing"), []).append(rank)
    listed = "; ".join(f"{ranks_have(who)} {value}" for value, who in ranks.items())
    remedy = _REMEDY.get(what, "start every rank with the same arguments")
    return f"the ranks disagree on the {what}: {listed}; {remedy}"


def facts_of(captured: Captured, plan: Plan, options: Mapping[str, object]) -> dict[str, str]:
    """Return the facts that ``require_agreement`` compares."""
    parameters = [(n, tuple(p.shape), str(p.dtype)) for n, p in captured.module.named_parameters()]
    numbers = sum(p.numel() for p in captured.module.parameters())
    graph, stages = captured.graph, plan.stage_graph
    model = repr((graph.ops, graph.values, graph.parameters, parameters))
    without = meta_names(captured.module)
    return {
        "version": version(),
        "model": f"{type(captured.module).__name__} with {len(graph)} operators and "
        f"{numbers} parameters ({_short(model)})",
        "sizes of batches": " or ".join(map(repr, captured.variants)),
        "weights": f"{len(without)} tensors on the meta device ({_short(repr(without))})",
        "plan": f"{len(stages)} stages on {len(stages.devices)} devices, {plan.schedule}, batch "
        f"{stages.batch_size} ({_short(repr((stages, plan.schedule)))})",
        "options": ", ".join(f"{name} {value}" for name, value in options.items()),
    }


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def version() -> str:
    """Return the versions of anabranch, with a digest of its source, and of torch."""
    try:
        number = metadata.version("anabranch")
    except metadata.PackageNotFoundError:
        number = "without a version"
    source = hashlib.sha256()
    folder = Path(errors.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        source.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return f"anabranch {number} (source {source.hexdigest()[:12]}), torch {torch.__version__}"
